"""The callers' arguments as plain values, and quantised keys and values. May import `jax.base`."""
