"""Which kernels there are, what they ask of a problem, and their tuned tiles, as data. May import
`core.base` and `core.call`."""
