"""The tiles of packed sequences, those of the longest sequence first, for queries of one head.

Lengths are known on the device alone. A tile of the attention kernel finds its sequence here, so
that no tile is empty, and those that end last are short. B sequences.
"""

import triton
import triton.language as tl


@triton.jit
def lengths(cu_seqlens, sequence_B, batch):
    """Tokens of each sequence, 0 past the last."""
    inside_B = sequence_B < batch
    ends_B = tl.load(cu_seqlens + sequence_B + 1, mask=inside_B, other=0)
    return ends_B - tl.load(cu_seqlens + sequence_B, mask=inside_B, other=0)


@triton.jit(do_not_specialize=["batch"])
def order_tiles(cu_q, cu_k, order, drawn, batch, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """order: how many tiles of ROWS queries there are, then two numbers for each: its sequence, and
    which tile is that sequence's first. drawn: of all pieces of work none yet (see deal.py).

    A program a sequence, which all look at all lengths: keys decide, or queries if keys are dense.
    """
    mine = tl.program_id(0)
    cu_size = cu_q if cu_k is None else cu_k
    size = lengths(cu_size, mine, batch)
    before_B = tl.zeros([BLOCK], tl.int32)
    all_B = tl.zeros([BLOCK], tl.int32)
    for start in range(0, batch, BLOCK):
        other_B = start + tl.arange(0, BLOCK)
        tiles_B = tl.cdiv(lengths(cu_q, other_B, batch), ROWS)
        size_B = lengths(cu_size, other_B, batch)
        is_before_B = (size_B > size) | ((size_B == size) & (other_B < mine))
        before_B += tl.where(is_before_B, tiles_B, 0)
        all_B += tiles_B
    first = tl.sum(before_B, 0)
    if mine == 0:
        tl.store(order, tl.sum(all_B, 0))
        tl.store(drawn, 0)
    tiles = tl.cdiv(lengths(cu_q, mine, batch), ROWS)
    entries = order + 1 + 2 * first.to(tl.int64)
    for start in range(0, tiles, BLOCK):
        tile_B = start + tl.arange(0, BLOCK)
        tl.store(entries + 2 * tile_B, mine, mask=tile_B < tiles)
        tl.store(entries + 2 * tile_B + 1, first, mask=tile_B < tiles)
