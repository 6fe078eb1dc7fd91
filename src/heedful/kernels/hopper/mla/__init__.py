"""Few queries over latent vectors: `kernel` and `swap_ab`. May import `hopper.sm90` and
`hopper.decode`."""
