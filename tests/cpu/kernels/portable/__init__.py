"""Tests of the portable kernels."""
