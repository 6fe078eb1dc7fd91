"""Gluon kernels for CDNA3 (gfx942)."""
