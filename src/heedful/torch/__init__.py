"""Attention for PyTorch."""

from heedful.core.call.arguments import Quads
from heedful.torch.api.attention import flash_attn_func, flash_attn_varlen_func
from heedful.torch.api.explaining import explain
from heedful.torch.api.flex import flex_attention
from heedful.torch.api.gradients import attention_backward
from heedful.torch.api.kvcache import flash_attn_with_kvcache
from heedful.torch.api.merge import merge_attn_states, merge_into
from heedful.torch.api.packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from heedful.torch.operands.quant import dequantize_kv, pack_latent, quantize_kv, unpack_latent

__all__ = [
    "Quads",
    "attention_backward",
    "dequantize_kv",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "merge_attn_states",
    "merge_into",
    "pack_latent",
    "quantize_kv",
    "unpack_latent",
]
