"""Clears storage that belongs to no sequence: packed tokens past a sequence's used length, between
sequences, before the first and after the last, and rows before a left-padded sequence.

The kernels are `clear_outside` and `clear_unused`, launched by `launch/bind/portable.py` beside the
attention kernels. Those write only rows of their tiles, so that they need not keep addresses for
this through their loops.

Shapes: B batch, H heads, N rows, D and E head dims.
"""

import triton
import triton.language as tl

from heedful.kernels.args.portable import ClearOutsideIO, ClearUnusedIO
from heedful.kernels.common.gaps import clear_gaps
from heedful.kernels.common.rows import row_base, store_rows, wide
from heedful.kernels.common.sequences import sequence, within


@triton.jit
def fill_rows(
    base,
    stride_row,
    begin,
    end,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE: tl.constexpr,
):
    """Stores VALUE in rows [begin, end)."""
    tile = tl.full([ROWS, BLOCK], VALUE, tl.float32)
    for row0 in range(begin, end, ROWS):
        store_rows(base, tile, stride_row, row0, end, DIM)


@triton.jit
def clear_outside(io: ClearOutsideIO, total, batch, heads, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """`clear_gaps` as a kernel, for attention kernels that do not call it."""
    share, shares = tl.program_id(0), tl.num_programs(0)
    clear_gaps(io.out, io.lse, 0, io.cu_seqlens, total, batch, heads, share, shares, DIM, BLOCK)


@triton.jit
def clear_unused(
    io: ClearUnusedIO,
    seqlen,
    batch,
    heads,
    DIM_X: tl.constexpr,
    DIM_Y: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    FILL_Y: tl.constexpr,
):
    """Stores 0 in all rows of x (B, N, H, D) that no sequence uses, and FILL_Y in those of y (B, N,
    H, E). There is one program for each sequence and head."""
    b = wide(tl.program_id(0) // heads)
    h = wide(tl.program_id(0) % heads)
    token, used, room = sequence(b, io.cu_seqlens, io.seqused, io.leftpad, seqlen)
    before = token
    if io.cu_seqlens is not None:
        if b > 0:
            before = token - within(tl.load(io.cu_seqlens + b), 0, seqlen)
        if b + 1 == batch:
            room = (seqlen - token).to(tl.int32)
    x = row_base(io.x, b, h, token)
    fill_rows(x, io.x.stride_n, used, room, DIM_X, BLOCK_N, BLOCK_X, 0.0)
    if io.y.ptr is not None:
        y = row_base(io.y, b, h, token)
        fill_rows(y, io.y.stride_n, used, room, DIM_Y, BLOCK_N, BLOCK_Y, FILL_Y)
    x -= before * io.x.stride_n
    fill_rows(x, io.x.stride_n, 0, before, DIM_X, BLOCK_N, BLOCK_X, 0.0)
    if io.y.ptr is not None:
        y -= before * io.y.stride_n
        fill_rows(y, io.y.stride_n, 0, before, DIM_Y, BLOCK_N, BLOCK_Y, FILL_Y)
