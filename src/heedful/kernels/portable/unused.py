"""Storage that belongs to no sequence: packed tokens past a sequence's used length, between
sequences and behind the last, and rows before a left-padded one.

The attention kernels write rows of their tiles alone, so that they need not keep addresses for
this alive through their loops. Shapes: B batch, H heads, N rows, D and E head dims.
"""

import triton
import triton.language as tl

from heedful.kernels.portable.sequences import key_sequence, store_rows, wide


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
    """Writes VALUE into rows [begin, end)."""
    tile = tl.full([ROWS, BLOCK], VALUE, tl.float32)
    for row0 in range(begin, end, ROWS):
        store_rows(base, tile, stride_row, row0, end, DIM, ROWS, BLOCK)


@triton.jit(do_not_specialize=["seqlen", "total", "batch", "heads"])
def clear_unused(
    cu_seqlens,
    seqused,
    leftpad,
    x,
    y,
    stride_xb,
    stride_xn,
    stride_xh,
    stride_yb,
    stride_yn,
    stride_yh,
    seqlen,
    total,
    batch,
    heads,
    DIM_X: tl.constexpr,
    DIM_Y: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    FILL_Y: tl.constexpr,
):
    """Zeros what no sequence uses of x (B, N, H, D) and writes FILL_Y there in y (B, N, H, E)."""
    b = wide(tl.program_id(0) // heads)
    h = wide(tl.program_id(0) % heads)
    token, used, room = key_sequence(b, cu_seqlens, seqused, leftpad, seqlen)
    if cu_seqlens is not None and b + 1 == batch:
        room = (total - token).to(tl.int32)
    x += b * stride_xb + h * stride_xh + token * stride_xn
    fill_rows(x, stride_xn, used, room, DIM_X, BLOCK_N, BLOCK_X, 0.0)
    if y is not None:
        y += b * stride_yb + h * stride_yh + token * stride_yn
        fill_rows(y, stride_yn, used, room, DIM_Y, BLOCK_N, BLOCK_Y, FILL_Y)
    if leftpad is not None:
        pad = tl.load(leftpad + b)
        fill_rows(x - pad * stride_xn, stride_xn, 0, pad, DIM_X, BLOCK_N, BLOCK_X, 0.0)
        if y is not None:
            fill_rows(y - pad * stride_yn, stride_yn, 0, pad, DIM_Y, BLOCK_N, BLOCK_Y, FILL_Y)
