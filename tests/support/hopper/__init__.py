"""Roles of the Hopper kernels as threads, and their kernels alone on a GPU."""
