"""dQ: the warpgroup that makes it, its float32 sums, and its way out of them. May import
`hopper.backward` and `hopper.sm90`."""
