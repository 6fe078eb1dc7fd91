"""For the Hopper forward: the lists of a block mask without tiles that positions hide.

The kernel is `seen_lists`, launched before a forward in which positions or lengths hide keys of
listed tiles. Its lists are those of `Operands`, in the same order, but a tile that nobody sees is
left out, and one that is listed as seen whole is among those seen in part if a position hides any
of it. So tiles seen whole run the loop without a mask.
"""

import triton
import triton.language as tl

from heedful.kernels.args.hopper import SeenListsIO
from heedful.kernels.args.shared import Mask, Sequences, Shape
from heedful.kernels.common.block_lists import (
    CHUNK,
    WHOLE,
    by_position,
    entries_of,
    list_of,
    listed,
)
from heedful.kernels.common.sequences import place_of


@triton.jit
def seen_lists(io: SeenListsIO, seqs: Sequences, shape: Shape, mask: Mask):
    """Stores the lists. mask: with those of the call. The grid has a program for each tile of
    queries of each batch entry and query head that has lists of its own."""
    SIDE: tl.constexpr = mask.blocks.SIDE
    tile = tl.program_id(0) % io.tiles
    bh = tl.program_id(0) // io.tiles
    b = bh // io.heads
    h = bh % io.heads
    place = place_of(b, h, h, seqs, shape, mask, False)
    row = tile * SIDE
    base = list_of(place.b, place.h, row, mask.blocks)
    whole, part = listed(base, mask.blocks)
    length = tl.where((row < place.seq.len_q) & (place.seq.len_k > 0), whole + part, 0)
    last = tl.cdiv(place.seq.len_k, SIDE)
    at = io.seen + place.b * io.stride_b + place.h * io.stride_h + tile * io.stride_m
    taken = 0
    for needs_mask in tl.static_range(2):
        before = taken
        for first in range(0, length, CHUNK):
            keys, bits = entries_of(base, first + tl.arange(0, CHUNK), length, last, mask.blocks)
            takes, every = by_position(row, keys * SIDE, place, mask, SIDE, SIDE)
            every &= bits == WHOLE
            takes &= every == 0 if needs_mask else every
            entry = at + 2 * (taken + tl.cumsum(takes.to(tl.int32), 0))
            tl.store(entry, keys, mask=takes)
            tl.store(entry + 1, bits, mask=takes)
            taken += tl.sum(takes.to(tl.int32), 0)
        tl.store(at + needs_mask, taken - before)
