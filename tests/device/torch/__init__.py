"""Tests of the public functions of PyTorch on a GPU."""
