"""Gluon kernels for NVIDIA Hopper (sm_90): TMA, WGMMA, and warps that each have one role."""
