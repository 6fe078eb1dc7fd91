"""The Hopper backward of head dims above 256: two programs of a cluster have half of the columns
each, and add up their scores. May import `hopper.sm90`, `hopper.backward` and
`hopper.forward_wide`."""
