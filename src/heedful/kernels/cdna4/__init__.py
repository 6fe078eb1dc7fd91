"""The main loop for CDNA4 (gfx950). May import `kernels.cdna`."""
