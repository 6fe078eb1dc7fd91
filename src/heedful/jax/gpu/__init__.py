"""Programs as custom calls of compiled kernels. May import `jax.base`."""
