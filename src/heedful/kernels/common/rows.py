"""Loads and stores tiles of rows of a (.., row, head, dim) tensor in global memory."""

import triton
import triton.language as tl

from heedful.kernels.args.kinds import Rows


@triton.jit
def wide(index):
    """The index as 64 bits. It may be a loop counter, which the interpreter keeps as a Python
    int."""
    return index + tl.cast(0, tl.int64)


@triton.jit
def row_base(x: Rows, b, h, token):
    """The address where the rows of one head of a sequence begin. token: the sequence's
    first row."""
    return x.ptr + (b * x.stride_b + h * x.stride_h + token * x.stride_n)


@triton.jit
def load_rows(
    base,
    stride_row,
    row0,
    count,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Tile [ROWS, BLOCK] from row `row0` on. Columns past DIM are 0, and rows past `count` too if
    IS_MASKED."""
    # The tile's base takes the 64-bit part, so that offsets within the tile stay 32-bit.
    base += wide(row0) * stride_row
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK)
    ptrs = base + rows[:, None] * stride_row + dims[None, :]
    if IS_MASKED and DIM != BLOCK:
        tile = tl.load(ptrs, mask=(rows < count - row0)[:, None] & (dims < DIM)[None, :], other=0.0)
    elif IS_MASKED:
        tile = tl.load(ptrs, mask=(rows < count - row0)[:, None], other=0.0)
    elif DIM != BLOCK:
        tile = tl.load(ptrs, mask=(dims < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def load_head_rows(
    x: Rows,
    b,
    h,
    token,
    row0,
    count,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`load_rows` of one head of a sequence, whose first row is `token`; zeros past `count`."""
    base = row_base(x, b, h, token)
    return load_rows(base, x.stride_n, row0, count, DIM, ROWS, BLOCK, True)


@triton.jit
def store_rows(base, tile, stride_row, row0, count, DIM: tl.constexpr):
    """Stores the first DIM columns of a tile at rows [row0, count)."""
    base += wide(row0) * stride_row
    rows = tl.arange(0, tile.shape[0])
    dims = tl.arange(0, tile.shape[1])
    ptrs = base + rows[:, None] * stride_row + dims[None, :]
    mask = (rows < count - row0)[:, None] & (dims < DIM)[None, :]
    tl.store(ptrs, tile.to(base.dtype.element_ty), mask=mask)
