"""What the forward does otherwise with fp8 inputs. May import `hopper.sm90` and
`hopper.forward`."""
