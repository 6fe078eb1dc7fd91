"""Where a sequence's rows lie and which key tiles its queries touch.

Shapes: B batch, H query heads, G kv heads, M query rows, N key rows, D head dim.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from heedful.kernels.args.kinds import Rows
from heedful.kernels.args.shared import KVLayout, Mask, Sequences, Shape, Tile, TileOrder
from heedful.kernels.common.key_range import key_bounds
from heedful.kernels.common.sequences import sequence, within


class Place(NamedTuple):
    """The work of a program: sequence b, query head h, kv head g as 64 bits; on both sides the
    first token, rows in use and rows in storage. off: how far the diagonal is moved."""

    b: Any
    h: Any
    g: Any
    token_q: Any
    len_q: Any
    stored_q: Any
    token_k: Any
    len_k: Any
    stored_k: Any
    off: Any


class TileRange(NamedTuple):
    """Tiles [begin, end) are visited; [full_begin, full_end) of them need no mask. first_end: tiles
    [0, first_end) before `begin` are visited, too."""

    first_end: Any
    begin: Any
    full_begin: Any
    full_end: Any
    end: Any


@triton.jit
def wide(index):
    """A 64-bit index, also from a loop counter that the interpreter keeps as a plain int."""
    return index + tl.cast(0, tl.int64)


@triton.jit
def head_of(pid, order: TileOrder, total, IS_LONGEST_LAST: tl.constexpr):
    """(tile, flat head) of a program: heads go in groups whose keys fit in L2 together, and in
    a group the tiles with most work start first."""
    per_group = order.l2_heads * order.tiles
    index = pid // per_group
    begin = index * order.l2_heads
    width = tl.minimum(order.l2_heads, total - begin)
    within = pid - index * per_group
    tile = within // width
    if IS_LONGEST_LAST:
        tile = order.tiles - 1 - tile
    return tile, begin + within % width


@triton.jit
def place_of(b, h, g, x: Sequences, shape: Shape, mask: Mask, IS_BOUNDED: tl.constexpr):
    """The place of heads h and g of sequence b. IS_BOUNDED: beside an array of scores, which has
    room for the longest sequences alone."""
    token_q, len_q, stored_q = sequence(b, x.cu_q, x.used_q, None, x.seqlen_q)
    token_k, len_k, stored_k = sequence(b, x.cu_k, x.used_k, x.leftpad_k, x.seqlen_k)
    if IS_BOUNDED:
        len_q = tl.minimum(len_q, shape.longest_q)
        len_k = tl.minimum(len_k, shape.longest_k)
    off = mask.bottom_right * (len_k - len_q) + mask.shift
    return Place(wide(b), wide(h), wide(g), token_q, len_q, stored_q, token_k, len_k, stored_k, off)


@triton.jit
def place_of_queries(bh, sequences: Sequences, shape: Shape, mask: Mask, IS_BOUNDED: tl.constexpr):
    """The place of a flat query head."""
    h = bh % shape.heads_q
    g = h // (shape.heads_q // shape.heads_k)
    return place_of(bh // shape.heads_q, h, g, sequences, shape, mask, IS_BOUNDED)


@triton.jit
def cache_row(cache: KVLayout, b):
    """Which of a cache's rows sequence b uses, as 64 bits: one that exists."""
    row = b
    if cache.batch_idx is not None:
        row = within(tl.load(cache.batch_idx + b), 0, cache.entries - 1)
    return row.to(tl.int64)


@triton.jit
def key_tiles(row, place, mask: Mask, tile: Tile):
    """Key tiles that a tile of queries from `row` on touches."""
    len_k = place.len_k
    last = tl.minimum(row + tile.BLOCK_M, place.len_q) - 1
    bounds = key_bounds(row, last, place.off, len_k, mask)
    first_end = 0
    begin = 0
    full_begin = 0
    end = tl.cdiv(bounds.stop_last, tile.BLOCK_N)
    full_end = bounds.stop_first // tile.BLOCK_N
    if mask.HAS_LEFT:
        begin = tl.minimum(bounds.start_first // tile.BLOCK_N, end)
        full_begin = tl.cdiv(bounds.start_last, tile.BLOCK_N)
        full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
        seen = tl.minimum(mask.first, bounds.stop_last)
        first_end = tl.minimum(tl.cdiv(seen, tile.BLOCK_N), begin)
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    if last < row:
        first_end = 0
        begin = 0
        full_begin = 0
        full_end = 0
        end = 0
    if mask.tree is not None:
        # The tree is over the last keys.
        full_end = tl.minimum(full_end, tl.maximum(len_k - place.len_q, 0) // tile.BLOCK_N)
        full_end = tl.maximum(full_end, full_begin)
    return TileRange(first_end, begin, full_begin, full_end, end)


@triton.jit
def masked_count(tiles):
    """How many tiles are visited that need a mask."""
    return tiles.first_end + (tiles.full_begin - tiles.begin) + (tiles.end - tiles.full_end)


@triton.jit
def visited_tile(visit, tiles, HAS_LEFT: tl.constexpr, IS_MASKED: tl.constexpr):
    """The key tile of a visit, of those that need a mask or of those that do not."""
    if not IS_MASKED:
        return visit + tiles.full_begin
    elif HAS_LEFT:
        return masked_tile(visit, tiles)
    else:
        return visit + tiles.full_end


@triton.jit
def masked_tile(index, tiles):
    """The index-th of the visited key tiles that need a mask."""
    before = tiles.full_begin - tiles.begin
    tile = index
    if index >= tiles.first_end + before:
        tile = index - tiles.first_end - before + tiles.full_end
    elif index >= tiles.first_end:
        tile = index - tiles.first_end + tiles.begin
    return tile


@triton.jit
def query_tiles(col, place, mask: Mask, tile: Tile):
    """Query tiles that see any of a tile of keys from `col` on; the full ones' rows all exist and
    see every one of these keys."""
    off, len_q = place.off, place.len_q
    last = tl.minimum(col + tile.BLOCK_N, place.len_k) - 1
    begin = 0
    full_begin = 0
    end = tl.cdiv(len_q, tile.BLOCK_M)
    full_end = len_q // tile.BLOCK_M
    if mask.HAS_RIGHT:
        begin = tl.minimum(tl.maximum(col - off - mask.right, 0) // tile.BLOCK_M, end)
        full_begin = tl.cdiv(tl.maximum(last - off - mask.right, 0), tile.BLOCK_M)
        full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    if mask.HAS_LEFT:
        if col >= mask.first:
            stop = tl.maximum(tl.minimum(len_q, last - off + mask.left + 1), 0)
            end = tl.cdiv(stop, tile.BLOCK_M)
        if last >= mask.first:
            stop = tl.maximum(tl.minimum(len_q, col - off + mask.left + 1), 0)
            full_end = stop // tile.BLOCK_M
        end = tl.maximum(end, begin)
        full_begin = tl.minimum(full_begin, end)
    if last < col:
        begin = 0
        full_begin = 0
        full_end = 0
        end = 0
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    if mask.tree is not None:
        full_end = tl.where(last >= place.len_k - len_q, full_begin, full_end)
    return TileRange(0, begin, full_begin, full_end, end)


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
