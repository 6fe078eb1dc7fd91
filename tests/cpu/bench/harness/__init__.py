"""Tests of `heedful.bench.harness`."""
