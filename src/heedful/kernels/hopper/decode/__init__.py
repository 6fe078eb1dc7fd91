"""Few queries over a cache of 16 bits. May import `hopper.sm90`, `hopper.forward`, and of
`portable` `shared`, `cache` and `decode`."""
