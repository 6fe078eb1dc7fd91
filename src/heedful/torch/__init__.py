"""Attention for PyTorch."""

from heedful.torch.api import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
