"""Frameworks that run heedful, on a GPU."""
