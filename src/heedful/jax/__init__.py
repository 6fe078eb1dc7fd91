"""heedful for JAX: the same kernels, semantics and argument names as the PyTorch functions.

Nothing is written in place: `flash_attn_with_kvcache` returns the caches. Seeds are explicit.
"""

from heedful.core.call.arguments import Quads
from heedful.jax.api.attention import flash_attn_func, flash_attn_varlen_func
from heedful.jax.api.dot_product import dot_product_attention
from heedful.jax.api.gradients import attention_backward
from heedful.jax.api.kvcache import flash_attn_with_kvcache
from heedful.jax.api.merge import merge_attn_states, merge_into
from heedful.jax.operands.quant import dequantize_kv, pack_latent, quantize_kv, unpack_latent

__all__ = [
    "Quads",
    "attention_backward",
    "dequantize_kv",
    "dot_product_attention",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "merge_attn_states",
    "merge_into",
    "pack_latent",
    "quantize_kv",
    "unpack_latent",
]
