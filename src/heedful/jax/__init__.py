"""heedful for JAX: the same kernels, semantics and argument names as the PyTorch functions.

Nothing is written in place: `flash_attn_with_kvcache` returns the caches. Seeds are explicit.
"""

from heedful.jax.api import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
