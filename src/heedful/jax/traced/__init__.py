"""Primitives, and how they are traced, batched, differentiated, sharded and lowered. May import
`jax.gpu`, `jax.tiled`, `jax.operands` and `jax.base`."""
