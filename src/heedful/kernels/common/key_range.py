"""Which keys the queries of a tile see; `core.call.mask.MaskSpec.key_range` is the same on the
host.

A row sees keys [start, stop) and leading keys below `first`. Both bounds grow by one from a row to
the next, so that the first and the last row of a tile bound all its rows. All families of kernels
derive their key tiles from here.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from heedful.kernels.args.shared import Mask


class KeyBounds(NamedTuple):
    """The first row sees keys [start_first, stop_first), the last row [start_last, stop_last). A
    stop is at most the sequence's length, and no bound is below 0."""

    start_first: Any
    start_last: Any
    stop_first: Any
    stop_last: Any


@triton.jit
def key_bounds(row, last, off, len_k, mask: Mask):
    """The keys that rows `row` to `last` see in the window; leading keys are not included. off: how
    far the sequence's diagonal is moved."""
    start_first = 0
    start_last = 0
    stop_first = len_k
    stop_last = len_k
    if mask.HAS_RIGHT:
        stop_first = tl.maximum(tl.minimum(len_k, row + off + mask.right + 1), 0)
        stop_last = tl.maximum(tl.minimum(len_k, last + off + mask.right + 1), 0)
    if mask.HAS_LEFT:
        start_first = tl.maximum(row + off - mask.left, 0)
        start_last = tl.maximum(last + off - mask.left, 0)
    return KeyBounds(start_first, start_last, stop_first, stop_last)
