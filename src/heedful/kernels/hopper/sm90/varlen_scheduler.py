"""Lists the work tiles of packed sequences, those of the longest sequence first.

Only the device knows the lengths. The attention kernel's tiles find their sequences in this list,
so that no tile is empty, and the tiles that end last are short. Tokens of no sequence have no tile;
this kernel clears their results. Short sequences have no tile if another kernel handles them.

The kernel is `schedule_varlen_tiles`, launched before a Hopper forward or backward. B sequences.
"""

import triton
import triton.language as tl

from heedful.kernels.args.hopper import VarlenIO, VarlenSizes
from heedful.kernels.args.kinds import SplitRows, SplitRowVector
from heedful.kernels.common.gaps import clear_gaps
from heedful.kernels.common.sequences import within


@triton.jit
def lengths(cu_seqlens, sequence_B, batch, total):
    """Tokens of each sequence, as `sequences.sequence` computes them; 0 past the last."""
    inside_B = sequence_B < batch
    starts_B = within(tl.load(cu_seqlens + sequence_B, mask=inside_B, other=0), 0, total)
    ends_B = tl.load(cu_seqlens + sequence_B + 1, mask=inside_B, other=0)
    return within(ends_B, starts_B, total) - starts_B


@triton.jit
def tiles_of(length, sizes: VarlenSizes, ROWS: tl.constexpr):
    """Tiles of a sequence of so many queries, or of a tensor of lengths."""
    tiles = tl.cdiv(length, ROWS)
    if sizes.short_q is not None:
        tiles = tl.where(length > sizes.short_q, tiles, 0)
    return tiles


@triton.jit
def schedule_varlen_tiles(
    io: VarlenIO,
    sizes: VarlenSizes,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Stores varlen_tiles, sets tile_counter to 0 (tile_scheduler.py; may be None), and clears out
    and lse (`clear_gaps`).

    varlen_tiles holds the count of tiles of ROWS queries, then two numbers for each tile: its
    sequence, and the first tile of that sequence. The grid has a program for each sequence, each of
    which reads all lengths, and some more programs, which clear. Sequences are ordered by their
    count of keys, or of queries if keys are dense.
    """
    mine = tl.program_id(0)
    batch, total_q = sizes.batch, sizes.total_q
    if mine >= batch:
        clear_gaps(
            SplitRows(io.out, 0, 0, io.stride_om, io.stride_oh),
            SplitRowVector(io.lse, 0, 0, total_q),
            0,
            io.cu_q,
            total_q,
            batch,
            sizes.heads,
            mine - batch,
            tl.num_programs(0) - batch,
            DIM,
            BLOCK_E,
        )
        return
    cu_size = io.cu_q if io.cu_k is None else io.cu_k
    total = total_q if io.cu_k is None else sizes.total_k
    size = lengths(cu_size, mine, batch, total)
    before_B = tl.zeros([BLOCK], tl.int32)
    all_B = tl.zeros([BLOCK], tl.int32)
    for start in range(0, batch, BLOCK):
        other_B = start + tl.arange(0, BLOCK)
        tiles_B = tiles_of(lengths(io.cu_q, other_B, batch, total_q), sizes, ROWS)
        size_B = lengths(cu_size, other_B, batch, total)
        is_before_B = (size_B > size) | ((size_B == size) & (other_B < mine))
        before_B += tl.where(is_before_B, tiles_B, 0)
        all_B += tiles_B
    first = tl.sum(before_B.to(tl.int64), 0)
    if mine == 0:
        tl.store(io.varlen_tiles, tl.minimum(tl.sum(all_B.to(tl.int64), 0), sizes.capacity))
        if io.tile_counter is not None:
            tl.store(io.tile_counter, 0)
    tiles = tiles_of(lengths(io.cu_q, mine, batch, total_q), sizes, ROWS)
    tiles = tl.minimum(tiles, tl.maximum(sizes.capacity - first, 0))
    entries = io.varlen_tiles + 1 + 2 * first
    for start in range(0, tiles, BLOCK):
        tile_B = start + tl.arange(0, BLOCK)
        tl.store(entries + 2 * tile_B, mine, mask=tile_B < tiles)
        tl.store(entries + 2 * tile_B + 1, first, mask=tile_B < tiles)
