"""The Hopper decode of head dims above 256: products have keys, or columns of values, as their
rows. May import `hopper.sm90`, `hopper.decode`, `hopper.mla` and `split_kv`."""
