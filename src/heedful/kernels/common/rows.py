"""Tiles of rows of a (.., row, head, dim) tensor in global memory."""

import triton
import triton.language as tl

from heedful.kernels.args.kinds import Rows


@triton.jit
def wide(index):
    """A 64-bit index, also from a loop counter that the interpreter keeps as a plain int."""
    return index + tl.cast(0, tl.int64)


@triton.jit
def row_base(x: Rows, b, h, token):
    """Where the rows of a head of a sequence begin."""
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
    """Tile [ROWS, BLOCK] from row `row0` on; zeros past `count` rows (if masked) and past DIM."""
    # The tile's base takes the 64-bit part, so that offsets within it stay 32-bit.
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
def store_rows(base, tile, stride_row, row0, count, DIM: tl.constexpr):
    """Stores a tile's first DIM columns at rows [row0, count)."""
    base += wide(row0) * stride_row
    rows = tl.arange(0, tile.shape[0])
    dims = tl.arange(0, tile.shape[1])
    ptrs = base + rows[:, None] * stride_row + dims[None, :]
    mask = (rows < count - row0)[:, None] & (dims < DIM)[None, :]
    tl.store(ptrs, tile.to(base.dtype.element_ty), mask=mask)
