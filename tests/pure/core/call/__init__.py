"""Tests of `heedful.core.call`."""
