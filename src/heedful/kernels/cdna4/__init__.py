"""Gluon kernels for CDNA4 (gfx950). May import `kernels.cdna`."""
