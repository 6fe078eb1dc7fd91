"""Triton kernels for any Triton target."""
