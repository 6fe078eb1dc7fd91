"""Tests of `heedful.launch` and of the arguments of kernels, without a compiler."""
