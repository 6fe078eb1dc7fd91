"""Tests of the commands of `heedful.bench`."""
