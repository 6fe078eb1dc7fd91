"""Tests of `heedful.core.planning` and `heedful.core.registry`."""
