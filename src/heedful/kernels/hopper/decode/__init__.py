"""Attention of few queries over a cache in 16 bits. May import `hopper.sm90`, `portable.cache` and
`split_kv`."""
