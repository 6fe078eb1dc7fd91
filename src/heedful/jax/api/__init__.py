"""The public functions of JAX. May import all of `heedful.jax`."""
