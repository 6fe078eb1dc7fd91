"""Tests of `heedful.torch`, by its folders."""
