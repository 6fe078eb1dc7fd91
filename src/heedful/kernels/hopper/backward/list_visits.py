"""For the Hopper backward: which query tiles visit a key tile by their block mask.

The kernel is `list_visits`, launched before the prologue. A key tile has one list. It
begins with how many query tiles visit, and how many of them need a mask: these come first. Each
visit is a query tile of the backward, of BLOCK_M queries, times the query heads that the list is
of, plus which of them; then, for each tile of the mask's keys in the key tile, the index of bits,
WHOLE or HIDDEN. So two lists of 64 keys become their union. No visit begins past the last query:
sums of dQ have no room there.
"""

import triton
import triton.language as tl

from heedful.kernels.args.hopper_backward import ListVisitsIO
from heedful.kernels.args.shared import BlockLists, Mask, Sequences, Shape
from heedful.kernels.common.block_lists import (
    CHUNK,
    WHOLE,
    by_position,
    entries_of,
    list_of,
    listed,
)
from heedful.kernels.common.sequences import place_of

# In place of an index of bits.
HIDDEN = tl.constexpr(-2)


@triton.jit
def length_of(base, col, place, blocks: BlockLists):
    """How many tiles a list has, none if no key from `col` on is in use."""
    whole, part = listed(base, blocks)
    return tl.where((col < place.seq.len_k) & (place.seq.len_q > 0), whole + part, 0)


@triton.jit
def bits_of(tiles, base, length, last, blocks: BlockLists):
    """The index of bits of each of these tiles of the mask's queries in another list."""
    indices = tl.full(tiles.shape, HIDDEN, tl.int32)
    for first in range(0, length, CHUNK):
        others, bits = entries_of(base, first + tl.arange(0, CHUNK), length, last, blocks)
        same = tiles[:, None] == others[None, :]
        indices = tl.maximum(indices, tl.max(tl.where(same, bits[None, :], HIDDEN), 1))
    return indices


@triton.jit
def list_visits(
    io: ListVisitsIO,
    seqs: Sequences,
    shape: Shape,
    mask: Mask,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Stores the lists. mask: with the lists of key tiles. The grid has a program for each key tile
    of each batch entry and KV head that has lists of its own."""
    SIDE: tl.constexpr = mask.blocks.SIDE
    STEPS: tl.constexpr = SIDE // BLOCK_M
    HALVES: tl.constexpr = 2 if BLOCK_N > SIDE else 1
    NUMBERS: tl.constexpr = 1 + HALVES
    block = tl.program_id(0) % io.blocks
    bg = tl.program_id(0) // io.blocks
    b = bg // io.heads
    g = bg % io.heads
    place = place_of(b, g, g, seqs, shape, mask, False)
    col = block * BLOCK_N
    last = tl.cdiv(place.seq.len_q, SIDE)
    at = io.visits + place.b * io.stride_b + place.g * io.stride_h + block * io.stride_n
    visits = 0
    masked = 0
    for needs_mask in tl.static_range(1, -1, -1):
        for r in range(0, io.list_heads):
            base = list_of(place.b, place.g * io.list_heads + r, col, mask.blocks)
            length = length_of(base, col, place, mask.blocks)
            for half in tl.static_range(HALVES):
                mine = base
                count = length
                other = base
                other_count = length
                if HALVES == 2:
                    beside = tl.where(col + SIDE < place.seq.len_k, mask.blocks.stride_m, 0)
                    later = length_of(base + beside, col + SIDE, place, mask.blocks)
                    if half == 0:
                        other = base + beside
                        other_count = later
                    else:
                        mine = base + beside
                        count = later
                for first in range(0, count * STEPS, CHUNK):
                    steps = first + tl.arange(0, CHUNK)
                    tiles, bits = entries_of(mine, steps // STEPS, count, last, mask.blocks)
                    queries = tiles * STEPS + steps % STEPS
                    takes, every = by_position(
                        queries * BLOCK_M, col, place, mask, BLOCK_M, BLOCK_N
                    )
                    every &= bits == WHOLE
                    if HALVES == 2:
                        beside_bits = bits_of(tiles, other, other_count, last, mask.blocks)
                        every &= beside_bits == WHOLE
                        if half == 1:
                            takes &= beside_bits == HIDDEN
                    takes &= every if needs_mask == 0 else every == 0
                    before = tl.cumsum(takes.to(tl.int32), 0) - takes.to(tl.int32)
                    entry = at + 2 + (visits + before) * NUMBERS
                    tl.store(entry, queries * io.list_heads + r, mask=takes)
                    if HALVES == 2:
                        tl.store(entry + 1 + half, bits, mask=takes)
                        tl.store(entry + 2 - half, beside_bits, mask=takes)
                    else:
                        tl.store(entry + 1, bits, mask=takes)
                    visits += tl.sum(takes.to(tl.int32), 0)
        if needs_mask == 1:
            masked = visits
    tl.store(at, visits)
    tl.store(at + 1, masked)
