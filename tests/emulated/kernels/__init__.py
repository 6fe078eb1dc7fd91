"""Kernels executed by the emulator."""
