"""Gluon kernels for NVIDIA Hopper (sm_90): TMA, WGMMA, one warpgroup per role."""
