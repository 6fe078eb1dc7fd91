"""A KV cache before attention: new keys and values go in, and rotary positions are applied (Su et
al. 2021). Shapes: B batch, S new tokens, G kv heads, N rows of a tile, D head dim.
"""

import triton
import triton.language as tl

from heedful.kernels.portable.sequences import load_rows, store_rows, wide, within


@triton.jit
def rotated_rows(
    base,
    stride_row,
    row0,
    count,
    cos,
    sin,
    positions,
    stride_pos,
    half,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    """Rows [row0, row0 + ROWS) with their first 2 * half dims turned, in float32."""
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK)
    if IS_INTERLEAVED:
        partner = dims ^ 1
        angle = dims // 2
        is_first = dims % 2 == 0
    else:
        partner = tl.where(dims < half, dims + half, dims - half)
        angle = tl.where(dims < half, dims, dims - half)
        is_first = dims < half
    turns = (rows < count - row0)[:, None] & (dims < 2 * half)[None, :]
    x_ND = load_rows(base, stride_row, row0, count, DIM, ROWS, BLOCK, True).to(tl.float32)
    base += wide(row0) * stride_row
    other_ND = tl.load(
        base + rows[:, None] * stride_row + partner[None, :], mask=turns, other=0.0
    ).to(tl.float32)
    angles = wide(positions)[:, None] * stride_pos + angle[None, :]
    c_ND = tl.load(cos + angles, mask=turns, other=1.0).to(tl.float32)
    s_ND = tl.load(sin + angles, mask=turns, other=0.0).to(tl.float32)
    return x_ND * c_ND + tl.where(is_first[None, :], -other_ND, other_ND) * s_ND


@triton.jit
def scatter_rows(base, tile, offsets, exists, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Stores a tile's first DIM columns at one element offset per row."""
    dims = tl.arange(0, BLOCK)
    mask = exists[:, None] & (dims < DIM)[None, :]
    tl.store(base + offsets[:, None] + dims[None, :], tile.to(base.dtype.element_ty), mask=mask)


SIZES = ["seqlen", "heads", "tiles", "capacity", "entries", "page_size"]
ROTARY = ["half", "positions", "position0"]


@triton.jit(do_not_specialize=[*SIZES, *ROTARY])
def append_keys(
    k_new,
    v_new,
    rotary_cos,
    rotary_sin,
    cache_seqlens,
    block_table,
    kv_batch_idx,
    leftpad_k,
    k,
    v,
    seqused,
    stride_knb,
    stride_knn,
    stride_knh,
    stride_vnb,
    stride_vnn,
    stride_vnh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_posn,
    stride_tableb,
    seqlen,
    heads,
    tiles,
    capacity,
    entries,
    page_size,
    half,
    positions,
    position0,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    """Writes k_new (B, S, G, D), rotated if there are rotary tables, and v_new (B, S, G, E) into
    the caches behind the cache_seqlens (B,) rows that each sequence has, and into seqused (B,) the
    keys that it has then.

    A negative length is that of no sequence: nothing is written and there are no keys. Neither is
    anything written past a sequence's `capacity` rows, nor into one of the cache's `entries` pages
    or batch entries that it does not have.
    position0: added to a key's place in the cache to make its rotary position, one of `positions`.
    """
    row0 = (tl.program_id(0) % tiles) * BLOCK_N
    b = wide(tl.program_id(0) // tiles // heads)
    g = wide(tl.program_id(0) // tiles % heads)
    rows_N = row0 + tl.arange(0, BLOCK_N)
    start = tl.load(cache_seqlens + b)
    # Rows past the last repeat it, and are never stored.
    place_N = tl.where(start < 0, -1, start + tl.minimum(rows_N, seqlen - 1))
    exists_N = (rows_N < seqlen) & (place_N >= 0) & (place_N < capacity)
    place_N = tl.maximum(tl.minimum(place_N, capacity - 1), 0)
    if row0 + g == 0:
        used = start + seqlen
        if leftpad_k is not None:
            used -= tl.load(leftpad_k + b)
        tl.store(seqused + b, tl.where(start < 0, 0, used))
    k_new += b * stride_knb + g * stride_knh
    v_new += b * stride_vnb + g * stride_vnh
    if rotary_cos is None:
        k_ND = load_rows(k_new, stride_knn, row0, seqlen, HEAD_DIM, BLOCK_N, BLOCK_D, True)
    else:
        k_ND = rotated_rows(
            k_new,
            stride_knn,
            row0,
            seqlen,
            rotary_cos,
            rotary_sin,
            within(place_N + position0, 0, positions - 1),
            stride_posn,
            half,
            HEAD_DIM,
            BLOCK_N,
            BLOCK_D,
            IS_INTERLEAVED,
        )
    v_NE = load_rows(v_new, stride_vnn, row0, seqlen, HEAD_DIM_V, BLOCK_N, BLOCK_E, True)
    k += g * stride_kh
    v += g * stride_vh
    entry_N = tl.zeros([BLOCK_N], tl.int64)
    if block_table is not None:
        entry_N += tl.load(block_table + b * stride_tableb + place_N // page_size)
        place_N = place_N % page_size
    elif kv_batch_idx is not None:
        entry_N += tl.load(kv_batch_idx + b)
    else:
        entry_N += b
    exists_N &= (entry_N >= 0) & (entry_N < entries)
    row_N = wide(place_N)
    k_offsets_N = entry_N * stride_kb + row_N * stride_kn
    v_offsets_N = entry_N * stride_vb + row_N * stride_vn
    scatter_rows(k, k_ND, k_offsets_N, exists_N, HEAD_DIM, BLOCK_D)
    scatter_rows(v, v_NE, v_offsets_N, exists_N, HEAD_DIM_V, BLOCK_E)


@triton.jit(do_not_specialize=["seqlen", "heads", "tiles", *ROTARY, "advance"])
def rotate_queries(
    q,
    rotary_cos,
    rotary_sin,
    cache_seqlens,
    rotated,
    stride_qb,
    stride_qm,
    stride_qh,
    stride_rb,
    stride_rm,
    stride_rh,
    stride_posn,
    seqlen,
    heads,
    tiles,
    half,
    positions,
    position0,
    advance,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    """rotated = q (B, S, H, D) at positions cache_seqlens + position0 + advance * row."""
    row0 = (tl.program_id(0) % tiles) * BLOCK_M
    b = wide(tl.program_id(0) // tiles // heads)
    h = wide(tl.program_id(0) // tiles % heads)
    rows_M = tl.minimum(row0 + tl.arange(0, BLOCK_M), seqlen - 1)
    x_MD = rotated_rows(
        q + b * stride_qb + h * stride_qh,
        stride_qm,
        row0,
        seqlen,
        rotary_cos,
        rotary_sin,
        within(tl.load(cache_seqlens + b) + position0 + advance * rows_M, 0, positions - 1),
        stride_posn,
        half,
        HEAD_DIM,
        BLOCK_M,
        BLOCK_D,
        IS_INTERLEAVED,
    )
    base = rotated + b * stride_rb + h * stride_rh
    store_rows(base, x_MD, stride_rm, row0, seqlen, HEAD_DIM, BLOCK_M, BLOCK_D)
