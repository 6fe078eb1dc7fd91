"""The wheel of compiled kernels: what it is for, its build, and tries of it as installed."""
