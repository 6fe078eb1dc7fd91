"""Tests of the public functions of PyTorch."""
