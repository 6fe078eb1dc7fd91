"""Attention of few queries over latent vectors (MLA): `kernel` and `swap_ab`. May import
`hopper.sm90`, `hopper.decode` and `split_kv`."""
