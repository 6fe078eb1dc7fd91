"""Triton kernels that compile for any target of Triton: NVIDIA, AMD, and its interpreter on CPUs.

`launch/bind/portable.py`, `portable_cache.py` and `decode.py` launch them.
"""
