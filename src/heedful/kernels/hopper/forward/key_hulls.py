"""For the Hopper kernels: which keys each 64 query rows see by their key_ranges.

The kernel is `key_hulls`, launched before a forward or a backward. An entry has eight numbers of
keys: the rows see keys from the first to before the second, and from the fifth to before the sixth,
which lie behind these. Each row sees every key from the third to before the fourth. The last two
are those of `first_rows_and_others`, if a backward wants them. Heads that share their ranges share
entries.
"""

import triton
import triton.language as tl

from heedful.kernels.args.hopper import HullIO
from heedful.kernels.args.shared import KeyHulls, Mask, Sequences, Shape, Tile
from heedful.kernels.common.row_hulls import NOWHERE, first_entry
from heedful.kernels.common.row_ranges import first_rows_and_others, range_hulls
from heedful.kernels.common.sequences import place_of


@triton.jit
def key_hulls(
    io: HullIO,
    seqs: Sequences,
    shape: Shape,
    mask: Mask,
    tile: Tile,
    IS_BOUNDED: tl.constexpr,
    FIRST_ROWS: tl.constexpr,
):
    """Stores the entries. The grid has a program for each 64 rows of the longest sequence, of each
    sequence and of each head that has ranges of its own. tile: of 64 rows and one key.
    IS_BOUNDED: lengths are bounded by a bias. FIRST_ROWS: whether the last two numbers are
    wanted."""
    block = tl.program_id(0) % io.blocks
    bh = tl.program_id(0) // io.blocks
    b = bh // io.heads
    h = bh % io.heads
    place = place_of(b, h, h, seqs, shape, mask, IS_BOUNDED)
    row = block * tile.BLOCK_M
    if row >= place.seq.stored_q:
        return
    hull, other = range_hulls(row, place, mask, tile)
    blocks = io.blocks if seqs.cu_q is None else None
    at = first_entry(KeyHulls(io.key_hulls, io.entries, blocks), place.seq, b, h)
    at += block * 8
    store_hulls(at, hull, other)
    if FIRST_ROWS:
        first_end, others = first_rows_and_others(row, place, mask, tile)
        tl.store(at + 6, first_end)
        tl.store(at + 7, others)


@triton.jit
def store_hulls(at, hull, other):
    """Stores the first six numbers of an entry. other: of `range_hulls`."""
    begin = tl.where(hull.begin < hull.end, hull.begin, NOWHERE)
    end = tl.where(hull.begin < hull.end, hull.end, 0)
    other_begin = tl.where(other.begin < other.end, other.begin, NOWHERE)
    other_end = tl.where(other.begin < other.end, other.end, 0)
    is_first = begin <= other_begin
    tl.store(at, tl.where(is_first, begin, other_begin))
    tl.store(at + 1, tl.where(is_first, end, other_end))
    tl.store(at + 2, hull.full_begin)
    tl.store(at + 3, hull.full_end)
    tl.store(at + 4, tl.where(is_first, other_begin, begin))
    tl.store(at + 5, tl.where(is_first, other_end, end))
