"""Masks as data: arrays for `key_ranges`, and `BlockMask` for `block_mask`, made on the arrays' own
device.

Every function takes arrays of PyTorch or of JAX, and gives int32 (batch or 1, heads or 1, seqlen, 2
or 4) of the same framework; `documents` gives `Documents`, which says so to the planner. Nothing is
compiled for a mask. All but `from_flashmask` also run where calls are traced or captured. `t5_bias`
gives another array by position, a `rel_bias`.
"""

from heedful.core.base.late import load as _load

# Name -> module that defines it.
_PUBLIC = {
    "BlockMask": "heedful.masks.block_mask",
    "Documents": "heedful.core.call.numerics",
    "chunks": "heedful.masks.ranges",
    "documents": "heedful.masks.ranges",
    "from_flashmask": "heedful.masks.flashmask",
    "local_global": "heedful.masks.ranges",
    "padding": "heedful.masks.ranges",
    "prefix": "heedful.masks.ranges",
    "t5_bias": "heedful.masks.relative",
}

# Type checkers and editors take this for true, wherever it comes from.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from heedful.core.call.numerics import Documents as Documents
    from heedful.masks.block_mask import BlockMask as BlockMask
    from heedful.masks.flashmask import from_flashmask as from_flashmask
    from heedful.masks.ranges import chunks as chunks
    from heedful.masks.ranges import documents as documents
    from heedful.masks.ranges import local_global as local_global
    from heedful.masks.ranges import padding as padding
    from heedful.masks.ranges import prefix as prefix
    from heedful.masks.relative import t5_bias as t5_bias
else:
    __all__ = [*_PUBLIC]


def __getattr__(name: str):
    return _load(globals(), _PUBLIC, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
