"""Tests of `core.registry`."""
