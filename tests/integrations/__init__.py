"""Frameworks that run heedful, on a CPU."""
