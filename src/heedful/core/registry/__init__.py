"""The kernels, the problems that they take, and their tuned tiles, as data. May import `core.base`
and `core.call`."""
