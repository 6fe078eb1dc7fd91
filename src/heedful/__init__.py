"""Fused attention kernels: one call runs the fastest kernel for the problem and the device.

`import heedful` imports no framework; the public names are PyTorch's and load on first use.
"""

import gc
import importlib

__version__ = "0.2.0"

# Name -> module that defines it.
_PUBLIC = {
    "flash_attn_func": "heedful.torch",
    "flash_attn_varlen_func": "heedful.torch",
    "flash_attn_with_kvcache": "heedful.torch",
    "flash_attn_qkvpacked_func": "heedful.torch",
    "flash_attn_kvpacked_func": "heedful.torch",
    "flash_attn_varlen_qkvpacked_func": "heedful.torch",
    "flash_attn_varlen_kvpacked_func": "heedful.torch",
    "attention_backward": "heedful.torch",
    "merge_attn_states": "heedful.torch",
    "merge_into": "heedful.torch",
    "quantize_kv": "heedful.torch",
    "dequantize_kv": "heedful.torch",
    "pack_latent": "heedful.torch",
    "unpack_latent": "heedful.torch",
    "explain": "heedful.torch",
    "flex_attention": "heedful.torch",
    "Quads": "heedful.torch",
    "BlockMask": "heedful.masks",
    "load_pack": "heedful.launch.code.packs",
    "record": "heedful.launch.record",
    "counters": "heedful.launch.compiler",
    "configure": "heedful.core.base.settings",
}

# Type checkers and editors take this for true, wherever it comes from.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from heedful.core.base.settings import configure as configure
    from heedful.launch.code.packs import load_pack as load_pack
    from heedful.launch.compiler import counters as counters
    from heedful.launch.record import record as record
    from heedful.masks import BlockMask as BlockMask
    from heedful.torch import *  # noqa: F403  (its __all__ lists what is public)
else:
    __all__ = ["__version__", *_PUBLIC]


def _imported(name: str):
    """A public name, with no collection meanwhile: what an import makes stays, and to go through
    all of torch's objects would be 65 ms of a first call."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    finally:
        if was_on:
            gc.enable()


def __getattr__(name: str):
    if name in _PUBLIC:
        value = _imported(name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'heedful' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
