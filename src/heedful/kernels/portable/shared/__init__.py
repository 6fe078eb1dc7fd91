"""Code that all portable kernels share. Imports nothing else of `portable`."""
