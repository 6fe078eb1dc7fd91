"""Tests of `heedful.launch`: what kernels are given, and what drivers are told."""
