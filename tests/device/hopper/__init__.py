"""Tests of the Hopper kernels on a GPU."""
