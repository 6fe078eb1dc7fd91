"""Fused attention kernels: one call runs the fastest kernel for the problem and the device."""

__version__ = "0.1.0"
