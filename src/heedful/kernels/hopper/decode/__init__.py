"""Few queries over a cache of 16 bits. May import `hopper.sm90`, `portable.cache`
and `split_kv`."""
