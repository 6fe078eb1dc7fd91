"""Where a sequence's rows lie and which key tiles its queries touch.

Shapes: B batch, H query heads, G kv heads, M query rows, N key rows, D head dim.
"""

import triton
import triton.language as tl


@triton.jit
def wide(index):
    """A 64-bit index, also from a loop counter that the interpreter keeps as a plain int."""
    return index + tl.zeros([], tl.int64)


@triton.jit
def head_of(pid, tiles, l2_heads, total, IS_LONGEST_LAST: tl.constexpr):
    """(tile, flat head) of a program: heads go in groups whose keys fit in L2 together, and in
    a group the tiles with most work start first."""
    per_group = l2_heads * tiles
    index = pid // per_group
    begin = index * l2_heads
    width = tl.minimum(l2_heads, total - begin)
    within = pid - index * per_group
    tile = within // width
    if IS_LONGEST_LAST:
        tile = tiles - 1 - tile
    return tile, begin + within % width


@triton.jit
def within(value, low, high):
    """The value, or the bound beyond which it is."""
    return tl.minimum(tl.maximum(value, low), high)


@triton.jit
def query_sequence(b, cu_seqlens, seqused, seqlen):
    """(first token, used length, stored length) of sequence b on the query side.

    seqlen: rows that each sequence has in storage, or packed tokens of all. Whatever values the
    arrays hold, a sequence lies within these: what is read and written through it exists.
    """
    token = tl.zeros([], tl.int64)
    stored = seqlen
    if cu_seqlens is not None:
        begin = within(tl.load(cu_seqlens + b), 0, seqlen)
        stored = within(tl.load(cu_seqlens + b + 1), begin, seqlen) - begin
        token += begin
    used = stored
    if seqused is not None:
        used = within(tl.load(seqused + b), 0, stored)
    return token, used, stored


@triton.jit
def key_sequence(b, cu_seqlens, seqused, leftpad, seqlen):
    """(first row, used length, rows from there on) of sequence b's storage on the key side."""
    token, used, stored = query_sequence(b, cu_seqlens, seqused, seqlen)
    if leftpad is not None:
        pad = within(tl.load(leftpad + b), 0, stored)
        token += pad
        stored -= pad
        used = tl.minimum(used, stored)
    return token, used, stored


@triton.jit
def cache_row(kv_batch_idx, b, entries):
    """Which of a cache's `entries` rows sequence b uses, as 64 bits: one that exists."""
    row = b
    if kv_batch_idx is not None:
        row = within(tl.load(kv_batch_idx + b), 0, entries - 1)
    return row.to(tl.int64)


@triton.jit
def key_tiles(
    row,
    last,
    off,
    len_k,
    left,
    right,
    first,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Key tiles that queries [row, last] touch, as MaskSpec.key_range gives them: tiles
    [0, first_end) and [begin, end), of which [full_begin, full_end) need no mask."""
    first_end = 0
    begin = 0
    full_begin = 0
    end = tl.cdiv(len_k, BLOCK_N)
    full_end = len_k // BLOCK_N
    if HAS_RIGHT:
        hi_min = tl.maximum(tl.minimum(len_k, row + off + right + 1), 0)
        hi_max = tl.maximum(tl.minimum(len_k, last + off + right + 1), 0)
        end = tl.cdiv(hi_max, BLOCK_N)
        full_end = hi_min // BLOCK_N
    if HAS_LEFT:
        begin = tl.minimum(tl.maximum(row + off - left, 0) // BLOCK_N, end)
        full_begin = tl.cdiv(tl.maximum(last + off - left, 0), BLOCK_N)
        full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
        seen = tl.minimum(first, len_k)
        if HAS_RIGHT:
            seen = tl.minimum(seen, hi_max)
        first_end = tl.minimum(tl.cdiv(seen, BLOCK_N), begin)
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    if last < row:
        first_end = 0
        begin = 0
        full_begin = 0
        full_end = 0
        end = 0
    return first_end, begin, full_begin, full_end, end


@triton.jit
def masked_tile(index, first_end, begin, full_begin, full_end):
    """The index-th of the visited key tiles that need a mask."""
    before = full_begin - begin
    tile = index
    if index >= first_end + before:
        tile = index - first_end - before + full_end
    elif index >= first_end:
        tile = index - first_end + begin
    return tile


@triton.jit
def query_tiles(
    col,
    last,
    off,
    len_q,
    left,
    right,
    first,
    BLOCK_M: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Query tiles [begin, end) that see any of keys [col, last], and [full_begin, full_end) of
    them whose rows all exist and see every one of these keys."""
    begin = 0
    full_begin = 0
    end = tl.cdiv(len_q, BLOCK_M)
    full_end = len_q // BLOCK_M
    if HAS_RIGHT:
        begin = tl.minimum(tl.maximum(col - off - right, 0) // BLOCK_M, end)
        full_begin = tl.cdiv(tl.maximum(last - off - right, 0), BLOCK_M)
        full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    if HAS_LEFT:
        if col >= first:
            end = tl.cdiv(tl.maximum(tl.minimum(len_q, last - off + left + 1), 0), BLOCK_M)
        if last >= first:
            full_end = tl.maximum(tl.minimum(len_q, col - off + left + 1), 0) // BLOCK_M
        end = tl.maximum(end, begin)
        full_begin = tl.minimum(full_begin, end)
    if last < col:
        begin = 0
        full_begin = 0
        full_end = 0
        end = 0
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    return begin, full_begin, full_end, end


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
def store_rows(
    base,
    tile,
    stride_row,
    row0,
    count,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores a tile's first DIM columns at rows [row0, count)."""
    base += wide(row0) * stride_row
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK)
    ptrs = base + rows[:, None] * stride_row + dims[None, :]
    mask = (rows < count - row0)[:, None] & (dims < DIM)[None, :]
    tl.store(ptrs, tile.to(base.dtype.element_ty), mask=mask)
