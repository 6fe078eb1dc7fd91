"""Tests of `heedful.jax` on a GPU."""
