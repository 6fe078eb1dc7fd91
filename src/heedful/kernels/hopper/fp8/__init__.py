"""Parts of the forward that fp8 inputs alone need. May import `hopper.sm90` and
`hopper.forward`."""
