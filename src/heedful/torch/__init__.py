"""Attention for PyTorch. Names load on first use, so that a first call waits for what it needs
alone; operators are registered by the import."""

from heedful.core.base.late import load as _load

# For what it registers.
from heedful.torch.traced import library as _operators  # noqa: F401

# Name -> module that defines it.
_PUBLIC = {
    "Quads": "heedful.core.call.arguments",
    "attention_backward": "heedful.torch.api.gradients",
    "dequantize_kv": "heedful.torch.operands.quant",
    "explain": "heedful.torch.api.explaining",
    "flash_attn_func": "heedful.torch.api.attention",
    "flash_attn_kvpacked_func": "heedful.torch.api.packed",
    "flash_attn_qkvpacked_func": "heedful.torch.api.packed",
    "flash_attn_varlen_func": "heedful.torch.api.attention",
    "flash_attn_varlen_kvpacked_func": "heedful.torch.api.packed",
    "flash_attn_varlen_qkvpacked_func": "heedful.torch.api.packed",
    "flash_attn_with_kvcache": "heedful.torch.api.kvcache",
    "flex_attention": "heedful.torch.api.flex",
    "merge_attn_states": "heedful.torch.api.merge",
    "merge_into": "heedful.torch.api.merge",
    "pack_latent": "heedful.torch.operands.quant",
    "quantize_kv": "heedful.torch.operands.quant",
    "unpack_latent": "heedful.torch.operands.quant",
}

# Type checkers and editors take this for true, wherever it comes from.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from heedful.core.call.arguments import Quads as Quads
    from heedful.torch.api.attention import flash_attn_func as flash_attn_func
    from heedful.torch.api.attention import flash_attn_varlen_func as flash_attn_varlen_func
    from heedful.torch.api.explaining import explain as explain
    from heedful.torch.api.flex import flex_attention as flex_attention
    from heedful.torch.api.gradients import attention_backward as attention_backward
    from heedful.torch.api.kvcache import flash_attn_with_kvcache as flash_attn_with_kvcache
    from heedful.torch.api.merge import merge_attn_states as merge_attn_states
    from heedful.torch.api.merge import merge_into as merge_into
    from heedful.torch.api.packed import flash_attn_kvpacked_func as flash_attn_kvpacked_func
    from heedful.torch.api.packed import flash_attn_qkvpacked_func as flash_attn_qkvpacked_func
    from heedful.torch.api.packed import (
        flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func,
    )
    from heedful.torch.api.packed import (
        flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func,
    )
    from heedful.torch.operands.quant import dequantize_kv as dequantize_kv
    from heedful.torch.operands.quant import pack_latent as pack_latent
    from heedful.torch.operands.quant import quantize_kv as quantize_kv
    from heedful.torch.operands.quant import unpack_latent as unpack_latent
else:
    __all__ = [*_PUBLIC]


def __getattr__(name: str):
    return _load(globals(), _PUBLIC, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
