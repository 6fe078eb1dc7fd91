"""Attention by a tiled scan, for a CPU. May import `jax.operands`."""
