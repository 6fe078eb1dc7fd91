"""Tests of the demo, of `heedful validate` and of tools."""
