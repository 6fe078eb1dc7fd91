"""Gluon kernels for CDNA4 (gfx950)."""
