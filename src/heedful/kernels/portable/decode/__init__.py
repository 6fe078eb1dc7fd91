"""Decode: attention of few queries over many keys. May import `portable.cache` and `split_kv`."""
