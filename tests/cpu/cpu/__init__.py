"""Tests of `heedful.cpu`."""
