"""For the Hopper forward: which keys each 64 query rows see by their key_ranges.

The kernel is `key_hulls`, launched before a forward. An entry has four numbers of keys: the rows
see keys from the first to before the last, and each of them sees every key from the second to
before the third. Heads that share their ranges share entries.
"""

import triton
import triton.language as tl

from heedful.kernels.args.hopper import HullIO
from heedful.kernels.args.shared import Mask, Sequences, Shape, Tile
from heedful.kernels.common.row_ranges import range_hulls
from heedful.kernels.common.sequences import place_of

# Where rows that see nothing begin to see.
NOWHERE = tl.constexpr(1 << 30)


@triton.jit
def key_hulls(
    io: HullIO,
    seqs: Sequences,
    shape: Shape,
    mask: Mask,
    tile: Tile,
    IS_BOUNDED: tl.constexpr,
):
    """Stores the entries. The grid has a program for each 64 rows of the longest sequence, of each
    sequence and of each head that has ranges of its own. tile: of 64 rows and one key.
    IS_BOUNDED: lengths are bounded by a bias."""
    block = tl.program_id(0) % io.blocks
    bh = tl.program_id(0) // io.blocks
    b = bh // io.heads
    h = bh % io.heads
    place = place_of(b, h, h, seqs, shape, mask, IS_BOUNDED)
    row = block * tile.BLOCK_M
    if row >= place.seq.stored_q:
        return
    hull, other = range_hulls(row, place, mask, tile)
    begin = tl.where(hull.begin < hull.end, hull.begin, NOWHERE)
    other_begin = tl.where(other.begin < other.end, other.begin, NOWHERE)
    end = tl.where(hull.begin < hull.end, hull.end, 0)
    other_end = tl.where(other.begin < other.end, other.end, 0)
    entry = place.h * io.entries + block
    if seqs.cu_q is None:
        entry += place.b * io.blocks
    else:
        entry += place.seq.token_q // tile.BLOCK_M + place.b
    at = io.key_hulls + entry * 4
    tl.store(at, tl.minimum(begin, other_begin))
    tl.store(at + 1, hull.full_begin)
    tl.store(at + 2, hull.full_end)
    tl.store(at + 3, tl.maximum(end, other_end))
