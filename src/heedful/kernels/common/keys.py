"""Loads tiles of keys or values from any storage: dense or packed rows, pages, a quantised cache.

The portable and CDNA kernels load their tiles here. Shapes: N key rows, D head dim.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from heedful.kernels.args.kinds import Rows
from heedful.kernels.args.shared import Descale, KVLayout
from heedful.kernels.common.rows import load_rows, wide
from heedful.kernels.common.sequences import within


class Keys(NamedTuple):
    """Where the keys, or values, of one KV head of a sequence lie.

    base: address of their first row; with pages, the address of this KV head in page 0. pages:
    where the sequence's row of the page table begins. groups: where the descales of the KV head
    begin. seq: the sequence's `Seqlens`.
    """

    base: Any
    pages: Any
    groups: Any
    seq: Any


@triton.jit
def cache_row(cache: KVLayout, b):
    """The batch entry of the cache that sequence b uses, as 64 bits. An index outside of the cache
    is clamped to an entry that exists."""
    row = b
    if cache.batch_idx is not None:
        row = within(tl.load(cache.batch_idx + b), 0, cache.entries - 1)
    return row.to(tl.int64)


@triton.jit
def keys_at_place(x: Rows, descale: Descale, place, params):
    """The `Keys` of a place's sequence and KV head. x: k or v. descale: k's or v's."""
    KV_GROUP: tl.constexpr = params.descales.KV_GROUP
    entry = cache_row(params.cache, place.b)
    base = x.ptr + place.g * x.stride_h
    pages = 0
    groups = 0
    if KV_GROUP > 0:
        groups = place.g * descale.stride_h
    if params.cache.table is not None:
        pages = entry * params.cache.stride_tableb
    else:
        base += entry * x.stride_b
        if KV_GROUP > 0:
            groups += entry * descale.stride_b
    return Keys(base, pages, groups, place.seq)


@triton.jit
def storage_rows(rows, keys, cache: KVLayout, stride_page, stride_row):
    """Element offsets of a sequence's rows in pages. A page number that does not exist is clamped
    to the first or the last page."""
    page = tl.load(cache.table + keys.pages + rows // cache.page_size)
    page = within(page, 0, cache.entries - 1).to(tl.int64)
    return page * stride_page + wide(rows % cache.page_size) * stride_row


@triton.jit
def gather_keys(
    keys, x: Rows, descale: Descale, params, row0, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """The tile of `load_keys` where each row needs an address of its own: in pages, or quantised
    with one scale for each group of dims."""
    KV_GROUP: tl.constexpr = params.descales.KV_GROUP
    rows = row0 + tl.arange(0, params.tile.BLOCK_N)
    dims = tl.arange(0, BLOCK)
    # Rows past the end are never loaded. Their address repeats that of the last row, whose page
    # exists.
    place = keys.seq.token_k + tl.minimum(rows, keys.seq.len_k - 1)
    if params.cache.table is None:
        offsets = wide(place) * x.stride_n
        if KV_GROUP > 0:
            d_offsets = wide(place) * descale.stride_n
    else:
        offsets = storage_rows(place, keys, params.cache, x.stride_b, x.stride_n)
        if KV_GROUP > 0:
            d_offsets = storage_rows(place, keys, params.cache, descale.stride_b, descale.stride_n)
    ok = (rows < keys.seq.len_k)[:, None] & (dims < DIM)[None, :]
    if params.descales.IS_INT4:
        packed = tl.load(keys.base + offsets[:, None] + (dims // 2)[None, :], mask=ok, other=0)
        nibble = (packed.to(tl.int32) >> ((dims % 2) * 4)[None, :]) & 15
        # The four bits are a two's complement.
        stored = ((nibble ^ 8) - 8).to(tl.float32)
    else:
        stored = tl.load(keys.base + offsets[:, None] + dims[None, :], mask=ok, other=0.0)
    if KV_GROUP > 0:
        groups = d_offsets[:, None] + (dims // KV_GROUP)[None, :]
        scale = tl.load(descale.ptr + keys.groups + groups, mask=ok, other=0.0)
        stored = stored.to(tl.float32) * scale
        if descale.shift is not None:
            stored += tl.load(descale.shift + keys.groups + groups, mask=ok, other=0.0)
    return stored


@triton.jit
def load_keys(
    keys,
    x: Rows,
    descale: Descale,
    params,
    row0,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """A tile of keys from row0 on, zeros past the sequence. It is in the stored dtype, or in
    float32 if groups of dims have descales. descale: k's or v's."""
    if params.cache.table is None and params.descales.KV_GROUP == 0:
        start, count = keys.base + keys.seq.token_k * x.stride_n, keys.seq.len_k
        N: tl.constexpr = params.tile.BLOCK_N
        return load_rows(start, x.stride_n, row0, count, DIM, N, BLOCK, IS_MASKED)
    else:
        return gather_keys(keys, x, descale, params, row0, DIM, BLOCK)
