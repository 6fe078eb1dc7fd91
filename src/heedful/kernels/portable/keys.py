"""Tiles of keys and values from whatever storage they live in: dense or packed rows, pages, a
quantised cache. Shapes: N key rows, D head dim.
"""

import triton
import triton.language as tl

from heedful.kernels.portable.sequences import load_rows, wide, within


@triton.jit
def storage_rows(rows, block_table, page_size, entries, stride_page, stride_row):
    """Element offsets of storage rows `rows` of the sequence whose page list `block_table` is.

    A number that none of the `entries` pages has stands for the first or the last page.
    """
    page = within(tl.load(block_table + rows // page_size), 0, entries - 1).to(tl.int64)
    return page * stride_page + wide(rows % page_size) * stride_row


@triton.jit
def gather_keys(
    base,
    stride_page,
    stride_row,
    block_table,
    page_size,
    entries,
    token,
    row0,
    count,
    descale,
    shift,
    stride_dpage,
    stride_drow,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    KV_GROUP: tl.constexpr,
    IS_INT4: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """`load_keys` of rows found one by one: in pages, or quantised in groups of dims."""
    rows = row0 + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK)
    # Rows past the end are never loaded; their address repeats the last row's, a page that exists.
    place = token + tl.minimum(rows, count - 1)
    if block_table is None:
        offsets = wide(place) * stride_row
        d_offsets = wide(place) * stride_drow
    else:
        offsets = storage_rows(place, block_table, page_size, entries, stride_page, stride_row)
        d_offsets = offsets
        if KV_GROUP > 0:
            d_offsets = storage_rows(
                place, block_table, page_size, entries, stride_dpage, stride_drow
            )
    ok = (rows < count)[:, None] & (dims < DIM)[None, :]
    if IS_INT4:
        packed = tl.load(base + offsets[:, None] + (dims // 2)[None, :], mask=ok, other=0)
        nibble = (packed.to(tl.int32) >> ((dims % 2) * 4)[None, :]) & 15
        # Two's complement of four bits.
        stored = ((nibble ^ 8) - 8).to(tl.float32)
    else:
        stored = tl.load(base + offsets[:, None] + dims[None, :], mask=ok, other=0.0)
    if KV_GROUP > 0:
        groups = d_offsets[:, None] + (dims // KV_GROUP)[None, :]
        value = stored.to(tl.float32) * tl.load(descale + groups, mask=ok, other=0.0)
        if shift is not None:
            value += tl.load(shift + groups, mask=ok, other=0.0)
        stored = value
    return stored.to(DTYPE)


@triton.jit
def load_keys(
    base,
    stride_page,
    stride_row,
    block_table,
    page_size,
    entries,
    token,
    row0,
    count,
    descale,
    shift,
    stride_dpage,
    stride_drow,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    KV_GROUP: tl.constexpr,
    IS_INT4: tl.constexpr,
    IS_MASKED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Keys (or values) [row0, row0 + ROWS) of a sequence in DTYPE, zeros past `count`.

    base, descale, shift: already at the kv head, and at the sequence unless paged.
    token: the sequence's first row in its storage. entries: pages that there are.
    """
    if block_table is None and KV_GROUP == 0:
        start = base + token * stride_row
        tile = load_rows(start, stride_row, row0, count, DIM, ROWS, BLOCK, IS_MASKED)
        return tile.to(DTYPE)
    else:
        return gather_keys(
            base,
            stride_page,
            stride_row,
            block_table,
            page_size,
            entries,
            token,
            row0,
            count,
            descale,
            shift,
            stride_dpage,
            stride_drow,
            DIM,
            ROWS,
            BLOCK,
            KV_GROUP,
            IS_INT4,
            DTYPE,
        )
