"""The keys that tiles of rows see by their key_ranges, from the entries of each 64 rows that
hopper/forward/key_hulls.py stores. Rows that see nothing have no entry of their own."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from heedful.kernels.args.shared import KeyHulls

# Rows of an entry, and numbers that it has room for.
ROWS = tl.constexpr(64)
NUMBERS = tl.constexpr(8)
# Where rows that see nothing begin to see.
NOWHERE = tl.constexpr(1 << 30)


class RowHulls(NamedTuple):
    """Rows see keys of [begin, end) and of [later_begin, later_end), which lies behind; each row
    sees every key of [full_begin, full_end), if any. A run that begins behind its end is empty."""

    begin: Any
    end: Any
    later_begin: Any
    later_end: Any
    full_begin: Any
    full_end: Any


@triton.jit
def first_entry(hulls: KeyHulls, seq, b, h):
    """Where the entries of a sequence begin. Packed sequences each begin one entry later than their
    rows say, so that no two have an entry in common."""
    entry = seq.token_q // ROWS + b
    if hulls.blocks is not None:
        entry = tl.cast(b, tl.int64) * hulls.blocks
    if hulls.entries is not None:
        entry += tl.cast(h, tl.int64) * hulls.entries
    return hulls.key_hulls + entry * NUMBERS


@triton.jit
def sees_all_or_none(entries, row, len_q, col, COUNT: tl.constexpr, KEYS: tl.constexpr):
    """Whether each row of COUNT entries from `row` on, or of a tensor of tiles, sees all keys
    [col, col + KEYS) or none of them. It may be False where they do. Rows have one range each."""
    stop = col + KEYS
    known = row * 0 == 0
    for i in tl.static_range(COUNT):
        exists = row + i * ROWS < len_q
        entry = entries + (row // ROWS + i) * NUMBERS
        begin = tl.load(entry, mask=exists, other=NOWHERE)
        end = tl.load(entry + 1, mask=exists, other=0)
        first_end = tl.load(entry + 6, mask=exists, other=0)
        others = tl.load(entry + 7, mask=exists, other=NOWHERE)
        full_begin = tl.load(entry + 2, mask=exists, other=0)
        full_end = tl.load(entry + 3, mask=exists, other=NOWHERE)
        is_known = (begin >= stop) | (end <= col)
        is_known |= (begin <= col) & (first_end >= stop) & (others >= stop)
        known &= is_known | ((full_begin <= col) & (full_end >= stop))
    return known


@triton.jit
def row_hulls(entries, row, len_q, COUNT: tl.constexpr, RANGES: tl.constexpr):
    """The `RowHulls` of COUNT entries from `row` on, or of a tensor of tiles.
    entries: of `first_entry`."""
    begin = row * 0 + NOWHERE
    end = row * 0
    later_begin = begin
    later_end = end
    full_begin = end
    full_end = begin
    for i in tl.static_range(COUNT):
        exists = row + i * ROWS < len_q
        entry = entries + (row // ROWS + i) * NUMBERS
        begin = tl.minimum(begin, tl.load(entry, mask=exists, other=NOWHERE))
        end = tl.maximum(end, tl.load(entry + 1, mask=exists, other=0))
        full_begin = tl.maximum(full_begin, tl.load(entry + 2, mask=exists, other=0))
        full_end = tl.minimum(full_end, tl.load(entry + 3, mask=exists, other=NOWHERE))
        if RANGES == 2:
            other = tl.load(entry + 4, mask=exists, other=NOWHERE)
            later_begin = tl.minimum(later_begin, other)
            later_end = tl.maximum(later_end, tl.load(entry + 5, mask=exists, other=0))
    return RowHulls(begin, end, later_begin, later_end, full_begin, full_end)
