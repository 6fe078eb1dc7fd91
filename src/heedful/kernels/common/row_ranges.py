"""key_ranges on the device: the keys that each row sees by them, and the key tiles that a tile of
rows visits.

A row has one range or the union of two. Nothing is read back to the host: each program finds its
tiles from the ranges of its own rows. Shapes: M query rows.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from heedful.kernels.args.shared import Mask, Tile
from heedful.kernels.common.row_hulls import NOWHERE
from heedful.kernels.common.rows import wide


class Hull(NamedTuple):
    """Key tiles [begin, end), which hold all keys that any row of a tile sees in a range. Every row
    sees each key of [full_begin, full_end)."""

    begin: Any
    end: Any
    full_begin: Any
    full_end: Any


@triton.jit
def head_ranges(b, h, mask: Mask):
    """Where the ranges of query head h in batch entry b begin."""
    return mask.ranges.ptr + (b * mask.ranges.stride_b + h * mask.ranges.stride_h)


@triton.jit
def range_pointers(base, rows, place, mask: Mask):
    """Where the ranges of rows lie, which may have any shape. base: of `head_ranges`."""
    return base + (place.seq.token_q + wide(rows)) * mask.ranges.stride_m


@triton.jit
def range_visible(base, rows, cols, place, mask: Mask):
    """Which keys the ranges of a head show; rows and cols broadcast. Rows that do not exist see
    none."""
    exists = rows < place.seq.len_q
    pointers = range_pointers(base, rows, place, mask)
    begin = tl.load(pointers, mask=exists, other=0)
    end = tl.load(pointers + 1, mask=exists, other=0)
    ok = (cols >= begin) & (cols < end)
    if mask.RANGES == 2:
        begin = tl.load(pointers + 2, mask=exists, other=0)
        end = tl.load(pointers + 3, mask=exists, other=0)
        ok |= (cols >= begin) & (cols < end)
    return ok


@triton.jit
def row_range(pointers, rows_M, place, mask: Mask):
    """(begin, end) of the range of each row at `pointers`, cut to the keys that exist and that the
    window shows, leading keys aside; a range that shows nothing begins at len_k and ends at 0."""
    exists_M = rows_M < place.seq.len_q
    begin_M = tl.maximum(tl.load(pointers, mask=exists_M, other=0), 0)
    end_M = tl.minimum(tl.load(pointers + 1, mask=exists_M, other=0), place.seq.len_k)
    return cut_range(begin_M, end_M, rows_M, place, mask)


@triton.jit
def cut_range(begin_M, end_M, rows_M, place, mask: Mask):
    """`row_range` of ranges of keys that exist."""
    len_k = place.seq.len_k
    if mask.HAS_RIGHT:
        end_M = tl.minimum(end_M, rows_M + place.seq.off + mask.right + 1)
    if mask.HAS_LEFT:
        first_M = rows_M + place.seq.off - mask.left
        # Leading keys may be seen before the window.
        begin_M = tl.where(begin_M < mask.first, begin_M, tl.maximum(begin_M, first_M))
    shows_M = begin_M < end_M
    return tl.where(shows_M, begin_M, len_k), tl.where(shows_M, end_M, 0)


@triton.jit
def hull_of(begin_M, end_M, rows_M, place, mask: Mask, N: tl.constexpr):
    """The `Hull` of a range of each row of a tile, in tiles of N keys."""
    exists_M = rows_M < place.seq.len_q
    begin = tl.min(begin_M, 0) // N
    end = tl.maximum(tl.cdiv(tl.max(end_M, 0), N), begin)
    full_M = begin_M
    if mask.HAS_LEFT:
        full_M = tl.maximum(full_M, rows_M + place.seq.off - mask.left)
    full_begin = tl.cdiv(tl.max(tl.where(exists_M, full_M, 0), 0), N)
    full_end = tl.min(tl.where(exists_M, end_M, place.seq.len_k), 0) // N
    full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    return Hull(begin, end, full_begin, tl.minimum(tl.maximum(full_end, full_begin), end))


@triton.jit
def first_rows_and_others(row, place, mask: Mask, tile: Tile):
    """(end, others) of the rows of a tile, which have one range each. Rows whose range begins first
    see each key from there to `end`; all others see no key before `others`."""
    rows_M = row + tl.arange(0, tile.BLOCK_M)
    pointers = range_pointers(head_ranges(place.b, place.h, mask), rows_M, place, mask)
    begin_M, end_M = row_range(pointers, rows_M, place, mask)
    sees_M = begin_M < end_M
    is_first_M = sees_M & (begin_M == tl.min(begin_M, 0))
    end = tl.min(tl.where(is_first_M, end_M, NOWHERE), 0)
    others = tl.min(tl.where(sees_M & (is_first_M == 0), begin_M, NOWHERE), 0)
    return end, others


@triton.jit
def range_hulls(row, place, mask: Mask, tile: Tile):
    """(hull, other hull) of the rows of a tile from `row` on. They have no tile in common; of the
    other all tiles need a mask, and it is empty where each row has one range."""
    rows_M = row + tl.arange(0, tile.BLOCK_M)
    pointers = range_pointers(head_ranges(place.b, place.h, mask), rows_M, place, mask)
    N: tl.constexpr = tile.BLOCK_N
    begin_M, end_M = row_range(pointers, rows_M, place, mask)
    if mask.RANGES == 1:
        hull = hull_of(begin_M, end_M, rows_M, place, mask, N)
        return hull, Hull(0, 0, 0, 0)
    else:
        begin2_M, end2_M = row_range(pointers + 2, rows_M, place, mask)
        is_first = begin_M <= begin2_M
        low_M = tl.where(is_first, begin_M, begin2_M)
        low_end_M = tl.where(is_first, end_M, end2_M)
        high_M = tl.where(is_first, begin2_M, begin_M)
        high_end_M = tl.where(is_first, end2_M, end_M)
        low = hull_of(low_M, low_end_M, rows_M, place, mask, N)
        high = hull_of(high_M, high_end_M, rows_M, place, mask, N)
        # Tiles of both are the first one's.
        begin = tl.maximum(high.begin, low.end)
        end = tl.maximum(high.end, begin)
        full_begin = tl.minimum(tl.maximum(high.full_begin, begin), end)
        full_end = tl.maximum(tl.minimum(high.full_end, end), full_begin)
        is_low = low.full_end - low.full_begin >= full_end - full_begin
        return (
            Hull(
                tl.where(is_low, low.begin, begin),
                tl.where(is_low, low.end, end),
                tl.where(is_low, low.full_begin, full_begin),
                tl.where(is_low, low.full_end, full_end),
            ),
            Hull(tl.where(is_low, begin, low.begin), tl.where(is_low, end, low.end), 0, 0),
        )
