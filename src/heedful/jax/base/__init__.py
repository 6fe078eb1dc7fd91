"""JAX's arrays, devices and private names, as the rest sees them. Imports nothing else of
`heedful.jax`."""
