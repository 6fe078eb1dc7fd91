"""The main loop for CDNA3 (gfx942). May import `kernels.cdna`."""
