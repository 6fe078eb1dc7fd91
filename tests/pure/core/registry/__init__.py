"""Tests of `heedful.core.registry`."""
