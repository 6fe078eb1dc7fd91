"""Tests of the portable kernels on a GPU."""
