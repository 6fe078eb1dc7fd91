"""JAX's arrays, devices and private names, for the other folders. Imports nothing else of
`heedful.jax`."""
