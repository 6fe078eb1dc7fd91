"""Updates a KV cache before attention: appends new keys and values, and applies rotary embeddings.

The kernels are `append_keys`, `append_and_rotate` and `append_slots`, launched by
`launch/bind/portable_cache.py`.
Each program has one tile of rows of one head. Decodes call `append_rows` in their own kernels.

Shapes: B batch, S new tokens, G KV heads, N rows of a tile, D qk dim, E v dim.
"""

import triton
import triton.language as tl

from heedful.kernels.args.kinds import Rows
from heedful.kernels.args.portable import (
    AppendIO,
    CacheAppend,
    CacheTile,
    GroupScale,
    Quantization,
    Rotary,
    RotateIO,
    RowTiles,
    Slots,
)
from heedful.kernels.args.shared import Descale, KVLayout
from heedful.kernels.common.rows import load_rows, row_base, store_rows, wide
from heedful.kernels.portable.cache.quantize import scaled_by_group, scaled_by_head, stored_codes
from heedful.kernels.portable.cache.rotary import rotated


@triton.jit
def rotated_rows(
    base,
    x: Rows,
    row0,
    count,
    places,
    rotary: Rotary,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows [row0, row0 + ROWS) from `base` on, in float32, with their first 2 * half dims rotated.
    places: the rows' positions in the cache."""
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK)
    exists_ND = (rows < count - row0)[:, None] & (dims < DIM)[None, :]
    row_N = base + wide(row0) * x.stride_n + rows * x.stride_n
    return rotated(row_N, dims, exists_ND, places, rotary)


@triton.jit
def scatter_rows(base, tile, offsets, exists, DIM: tl.constexpr):
    """Stores the first DIM columns of a tile; each row has an element offset of its own."""
    dims = tl.arange(0, tile.shape[1])
    mask = exists[:, None] & (dims < DIM)[None, :]
    tl.store(base + offsets[:, None] + dims[None, :], tile.to(base.dtype.element_ty), mask=mask)


@triton.constexpr_function
def stored_dims(dim, storage):
    """Elements of a row of the cache: two int4 are one element."""
    return dim // 2 if storage == "int4" else dim


@triton.jit
def quantized(
    x_ND,
    base,
    head: Descale,
    groups: GroupScale,
    places,
    quantization: Quantization,
    DIM: tl.constexpr,
):
    """A tile's values as the cache at `base` stores them. places: (batch entry or page of each row,
    its row there, whether it exists, batch entry, KV head)."""
    entry_N, row_N, exists_N, b, g = places
    x_ND = x_ND.to(tl.float32)
    if groups.ptr is not None:
        at_N = entry_N * groups.stride_b + row_N * groups.stride_n + g * groups.stride_h
        x_ND = scaled_by_group(
            x_ND, groups, at_N, exists_N, DIM, quantization.GROUP, quantization.LIMIT
        )
    elif head.ptr is not None:
        x_ND = scaled_by_head(x_ND, head, b, g)
    return stored_codes(x_ND, base, quantization.STORAGE, quantization.LIMIT)


@triton.jit
def tile_of(task, tiles: RowTiles, ROWS: tl.constexpr):
    """(first row, batch entry, head) of tile number `task`."""
    head = task // tiles.tiles
    return (task % tiles.tiles) * ROWS, wide(head // tiles.heads), wide(head % tiles.heads)


@triton.constexpr_function
def first_column(dim, block, storage):
    """The first column of new keys that is stored: rows of latent vectors have the ones before as
    values."""
    return dim - block if storage == "fp8_ds_mla" else 0


@triton.jit
def store_latent(rest_ND, v_NE, cache: Rows, places, quantization: Quantization):
    """Stores a tile of new rows of latent vectors, in bytes: values of float8, float32 scales of
    their groups, and the columns past the values in bfloat16."""
    entry_N, row_N, exists_N, _, g = places
    E: tl.constexpr = v_NE.shape[1]
    GROUP: tl.constexpr = quantization.GROUP
    at_N = entry_N * cache.stride_b + row_N * cache.stride_n + g * cache.stride_h
    scales = cache.ptr.to(tl.pointer_type(tl.float32)) + E // 4
    rest = cache.ptr.to(tl.pointer_type(tl.bfloat16)) + E // 2 + 2 * (E // GROUP)
    groups = GroupScale(scales, None, 0, 0, 0)
    x_ND = scaled_by_group(
        v_NE.to(tl.float32), groups, at_N // 4, exists_N, E, GROUP, quantization.LIMIT
    )
    codes_NE = stored_codes(x_ND, cache.ptr, "float8_e4m3fn", quantization.LIMIT)
    scatter_rows(cache.ptr, codes_NE, at_N, exists_N, E)
    scatter_rows(rest, rest_ND, at_N // 2, exists_N, rest_ND.shape[1])


@triton.jit
def store_new(
    k_ND,
    v_NE,
    places,
    io: AppendIO,
    quantization: Quantization,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
):
    """Stores a tile of new keys and values in the caches, as these store values. places: as
    `quantized` has them."""
    if quantization.STORAGE == "fp8_ds_mla":
        # Both caches are one, unless the framework copied it.
        store_latent(k_ND, v_NE, io.k, places, quantization)
        store_latent(k_ND, v_NE, io.v, places, quantization)
    else:
        entry_N, row_N, exists_N, _, g = places
        k = io.k.ptr + g * io.k.stride_h
        v = io.v.ptr + g * io.v.stride_h
        BYTES_D: tl.constexpr = stored_dims(DIM, quantization.STORAGE)
        BYTES_E: tl.constexpr = stored_dims(DIM_V, quantization.STORAGE)
        if quantization.STORAGE is not None:
            # Keys are rounded to their own dtype, as if they had been rotated before the call.
            k_ND = k_ND.to(io.k_new.ptr.dtype.element_ty)
            k_ND = quantized(
                k_ND, k, io.k_descale, quantization.k_groups, places, quantization, DIM
            )
            v_NE = quantized(
                v_NE, v, io.v_descale, quantization.v_groups, places, quantization, DIM_V
            )
        k_offsets_N = entry_N * io.k.stride_b + row_N * io.k.stride_n
        v_offsets_N = entry_N * io.v.stride_b + row_N * io.v.stride_n
        scatter_rows(k, k_ND, k_offsets_N, exists_N, BYTES_D)
        scatter_rows(v, v_NE, v_offsets_N, exists_N, BYTES_E)


@triton.jit
def append_rows(row0, low, high, b, g, append: CacheAppend, count, cache: KVLayout):
    """Copies rows [row0, row0 + ROWS) of k_new (B, S, G, D) and of v_new (B, S, G, E) into the
    caches, after the first cache_seqlens (B,) rows of each sequence. Keys are rotated if there are
    rotary tables. count: S. quantization: how the caches store values.

    A negative length stands for an entry without a sequence: nothing is written. Nor is anything
    written outside of a sequence's rows [low, high), or to a page or batch entry that does not
    exist (`cache.entries`).
    """
    DIM: tl.constexpr = append.tile.HEAD_DIM
    DIM_V: tl.constexpr = append.tile.HEAD_DIM_V
    ROWS: tl.constexpr = append.tile.BLOCK_N
    BLOCK_D: tl.constexpr = append.tile.BLOCK_D
    BLOCK_E: tl.constexpr = append.tile.BLOCK_E
    rows_N = row0 + tl.arange(0, ROWS)
    start = tl.load(append.io.cache_seqlens + b)
    # Rows past the last one repeat it. They are never stored.
    place_N = tl.where(start < 0, -1, start + tl.minimum(rows_N, count - 1))
    exists_N = (rows_N < count) & (place_N >= low) & (place_N < high)
    place_N = tl.maximum(tl.minimum(place_N, high - 1), 0)
    k_new = row_base(append.io.k_new, b, g, 0)
    v_new = row_base(append.io.v_new, b, g, 0)
    if append.rotary.cos is None:
        FIRST: tl.constexpr = first_column(DIM, BLOCK_D, append.quantization.STORAGE)
        WIDTH: tl.constexpr = DIM - FIRST
        k_ND = load_rows(
            k_new + FIRST, append.io.k_new.stride_n, row0, count, WIDTH, ROWS, BLOCK_D, True
        )
    else:
        k_ND = rotated_rows(
            k_new, append.io.k_new, row0, count, place_N, append.rotary, DIM, ROWS, BLOCK_D
        )
    v_NE = load_rows(v_new, append.io.v_new.stride_n, row0, count, DIM_V, ROWS, BLOCK_E, True)
    entry_N = tl.zeros([ROWS], tl.int64)
    if cache.table is not None:
        entry_N += tl.load(cache.table + b * cache.stride_tableb + place_N // cache.page_size)
        place_N = place_N % cache.page_size
    elif cache.batch_idx is not None:
        entry_N += tl.load(cache.batch_idx + b)
    else:
        entry_N += b
    exists_N &= (entry_N >= 0) & (entry_N < cache.entries)
    places = entry_N, wide(place_N), exists_N, b, g
    store_new(k_ND, v_NE, places, append.io, append.quantization, DIM, DIM_V)


@triton.jit
def append_tile(task, append: CacheAppend, tiles: RowTiles, cache: KVLayout, capacity):
    """Appends a tile of new rows by `append_rows`. Stores in seqused (B,) the count of keys that a
    sequence has afterwards; 0 if its length is negative. capacity: rows of a sequence."""
    row0, b, g = tile_of(task, tiles, append.tile.BLOCK_N)
    if row0 + g == 0:
        start = tl.load(append.io.cache_seqlens + b)
        used = start + tiles.seqlen
        if append.io.leftpad_k is not None:
            used -= tl.load(append.io.leftpad_k + b)
        tl.store(append.io.seqused + b, tl.where(start < 0, 0, used))
    append_rows(row0, 0, capacity, b, g, append, tiles.seqlen, cache)


@triton.jit
def rotate_tile(task, io: RotateIO, tiles: RowTiles, rotary: Rotary, advance, tile: CacheTile):
    """Stores a tile of rotated = q (B, S, H, D), with positions cache_seqlens + position0 + advance
    * row."""
    DIM: tl.constexpr = tile.HEAD_DIM
    M: tl.constexpr = tile.BLOCK_M
    row0, b, h = tile_of(task, tiles, M)
    rows_M = tl.minimum(row0 + tl.arange(0, M), tiles.seqlen - 1)
    places_M = tl.load(io.cache_seqlens + b) + advance * rows_M
    q = row_base(io.q, b, h, 0)
    x_MD = rotated_rows(q, io.q, row0, tiles.seqlen, places_M, rotary, DIM, M, tile.BLOCK_D)
    rotated = row_base(io.rotated, b, h, 0)
    store_rows(rotated, x_MD, io.rotated.stride_n, row0, tiles.seqlen, DIM)


@triton.jit
def append_keys(
    new: AppendIO,
    new_tiles: RowTiles,
    cache: KVLayout,
    rotary: Rotary,
    quantization: Quantization,
    capacity,
    tile: CacheTile,
):
    """Each program appends one tile of new keys and values."""
    append_tile(
        tl.program_id(0),
        CacheAppend(rotary, new, quantization, 0, tile),
        new_tiles,
        cache,
        capacity,
    )


@triton.jit
def append_and_rotate(
    new: AppendIO,
    new_tiles: RowTiles,
    queries: RotateIO,
    query_tiles: RowTiles,
    cache: KVLayout,
    rotary: Rotary,
    quantization: Quantization,
    capacity,
    advance,
    appends,
    tile: CacheTile,
):
    """Each of the first `appends` programs appends one tile of new keys and values; each other
    program rotates one tile of queries. Neither kind needs the results of the other."""
    task = tl.program_id(0)
    if task < appends:
        append_tile(
            task, CacheAppend(rotary, new, quantization, 0, tile), new_tiles, cache, capacity
        )
    else:
        rotate_tile(task - appends, queries, query_tiles, rotary, advance, tile)


@triton.jit
def append_slots(
    new: AppendIO,
    slots: Slots,
    new_tiles: RowTiles,
    cache: KVLayout,
    quantization: Quantization,
    tile: CacheTile,
):
    """Each program stores a tile of new tokens (1, S, G, dim) of one KV head in their slots of a
    cache of pages. Tokens of a negative slot, or of one that no page has, are dropped."""
    DIM: tl.constexpr = tile.HEAD_DIM
    DIM_V: tl.constexpr = tile.HEAD_DIM_V
    ROWS: tl.constexpr = tile.BLOCK_N
    row0, b, g = tile_of(tl.program_id(0), new_tiles, ROWS)
    count, size = new_tiles.seqlen, wide(slots.page_size)
    k_new = row_base(new.k_new, b, g, 0)
    v_new = row_base(new.v_new, b, g, 0)
    k_ND = load_rows(k_new, new.k_new.stride_n, row0, count, DIM, ROWS, tile.BLOCK_D, True)
    v_NE = load_rows(v_new, new.v_new.stride_n, row0, count, DIM_V, ROWS, tile.BLOCK_E, True)
    rows_N = row0 + tl.arange(0, ROWS)
    slot_N = tl.load(slots.ptr + rows_N, mask=rows_N < count, other=-1)
    exists_N = (slot_N >= 0) & (slot_N < size * cache.entries)
    slot_N = tl.maximum(slot_N, 0)
    places = wide(slot_N // size), wide(slot_N % size), exists_N, b, g
    store_new(k_ND, v_NE, places, new, quantization, DIM, DIM_V)
