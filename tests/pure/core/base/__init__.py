"""Tests of `heedful.core.base`."""
