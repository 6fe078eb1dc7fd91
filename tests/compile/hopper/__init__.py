"""Tests of the compiled Hopper kernels."""
