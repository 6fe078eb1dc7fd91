"""Tests of `heedful.core`, by its folders."""
