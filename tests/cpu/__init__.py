"""Tests on CPU tensors: public functions, interpreted kernels, launches down to a stub."""
