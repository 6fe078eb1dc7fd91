"""The Hopper forward of head dims above 256: two warpgroups share the output's columns, another
one makes the scores, and clusters of programs share keys and values. May import `hopper.sm90` and
`hopper.forward`."""
