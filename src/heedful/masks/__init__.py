"""Masks as data: arrays for `key_ranges`, and `BlockMask` for `block_mask`, made on the arrays' own
device.

Every function takes arrays of PyTorch or of JAX, and gives int32 (batch or 1, heads or 1, seqlen, 2
or 4) of the same framework; `documents` gives `Documents`, which says so to the planner. Nothing is
compiled for a mask. All but `from_flashmask` also run where calls are traced or captured. `t5_bias`
gives another array by position, a `rel_bias`.
"""

from heedful.core.call.numerics import Documents
from heedful.masks.block_mask import BlockMask
from heedful.masks.flashmask import from_flashmask
from heedful.masks.ranges import chunks, documents, local_global, padding, prefix
from heedful.masks.relative import t5_bias

__all__ = [
    "BlockMask",
    "Documents",
    "chunks",
    "documents",
    "from_flashmask",
    "local_global",
    "padding",
    "prefix",
    "t5_bias",
]
