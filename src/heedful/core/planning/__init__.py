"""From a problem to a plan: kernels, sizes, splits, and why no other. May import all of `core`."""
