"""Tests of `heedful.jax`."""
