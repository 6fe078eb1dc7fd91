"""Which rows of its storage a sequence uses, and where its keys lie: dense, packed, or in pages.

The producers of all Hopper kernels load tiles from here.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from heedful.kernels.common.sequences import Seqlens, diagonal_offset, within
from heedful.kernels.hopper.sm90.compat import reinterpret, tma_load

# In the transposed V, packed sequences begin at multiples of this.
V_T_BLOCK: gl.constexpr = gl.constexpr(128)


class WorkTile(NamedTuple):
    """One block of query rows of one head of a sequence (`Seqlens`). All its rows in storage get a
    result. kv_batch: the batch entry of its keys."""

    batch: Any
    head: Any
    kv_head: Any
    row: Any
    seq: Any
    kv_batch: Any


@gluon.jit
def sequence(cu_seqlens, batch, seqlen):
    """(first token, length) of a sequence. Without cu_seqlens this is 0 and `seqlen`. Else `seqlen`
    counts all packed tokens, and both numbers are clamped to it."""
    if cu_seqlens is None:
        return gl.to_tensor(0), seqlen
    else:
        start = within(gl.load(cu_seqlens + batch), 0, seqlen)
        return start, within(gl.load(cu_seqlens + batch + 1), start, seqlen) - start


@gluon.jit
def box(IS_PACKED: gl.constexpr, batch, head, start, length, row):
    """Coordinates of rows from `row` on of one head, in a tensor map that ends with the sequence.

    Dense: (batch, head, row, 0). Packed sequences share one map, and yet rows past the end of each
    must be zeros when read and dropped when written. This takes a dimension that ends at 2^30, and
    one whose stride wraps around 2^64 bytes (see heedful.launch.bind.hopper_maps).
    """
    if IS_PACKED:
        return [1 << 30, start + length, head, (1 << 30) - length + row, 0]
    else:
        return [batch, head, row, 0]


@gluon.jit
def trim(params, tile):
    """The tile with the lengths that its sequence uses, and with the first token of its keys.

    Whatever lengths and indices the arrays hold, reads stay within the caller's tensors. Lengths
    are clamped to the storage, and batch entries to those that exist. A page that does not exist
    gives zeros or another page.
    """
    seq = tile.seq
    len_q, token_k, len_k, off = seq.len_q, seq.token_k, seq.len_k, seq.off
    kv_batch = tile.batch
    if params.seqs.used_q is not None:
        len_q = within(gl.load(params.seqs.used_q + tile.batch), 0, len_q)
    if params.seqs.leftpad_k is not None:
        pad = within(gl.load(params.seqs.leftpad_k + tile.batch), 0, len_k)
        token_k += pad
        len_k -= pad
    if params.seqs.used_k is not None:
        len_k = within(gl.load(params.seqs.used_k + tile.batch), 0, len_k)
    if params.kv.batch_idx is not None:
        kv_batch = within(gl.load(params.kv.batch_idx + tile.batch), 0, params.kv.entries - 1)
    # A bias has only so many rows and keys.
    if params.mods.longest_q is not None:
        len_q = gl.minimum(len_q, params.mods.longest_q)
    if params.mods.longest_k is not None:
        len_k = gl.minimum(len_k, params.mods.longest_k)
    SAME_Q: gl.constexpr = params.seqs.used_q is None and params.mods.longest_q is None
    SAME_K: gl.constexpr = params.seqs.used_k is None and params.seqs.leftpad_k is None
    if not (SAME_Q and SAME_K and params.mods.longest_k is None):
        off = diagonal_offset(tile.batch, len_q, len_k, params.mask)
    seq = Seqlens(
        token_q=seq.token_q,
        len_q=len_q,
        stored_q=seq.stored_q,
        token_k=token_k,
        len_k=len_k,
        stored_k=seq.stored_k,
        off=off,
    )
    return WorkTile(
        batch=tile.batch,
        head=tile.head,
        kv_head=tile.kv_head,
        row=tile.row,
        seq=seq,
        kv_batch=kv_batch,
    )


@gluon.jit
def query_position(params, row):
    """The query of its sequence that a row of a tile belongs to."""
    if params.gqa.PACK_GQA == 1:
        return row
    else:
        return row // params.gqa.PACK_GQA


@gluon.jit
def queries_at(params, tile, row):
    """Coordinates of query or output rows; these include rows that are not in use."""
    if params.gqa.PACK_GQA > 1:
        return [tile.batch, tile.head, row // params.gqa.PACK_GQA, 0, 0]
    else:
        packed: gl.constexpr = params.seqs.cu_q is not None
        return box(packed, tile.batch, tile.head, tile.seq.token_q, tile.seq.stored_q, row)


@gluon.jit
def keys_at(params, tile, rows_each, col):
    """Coordinates of keys or values from `col` on. rows_each: rows of a batch entry in the tensor
    map."""
    if params.kv_rows.IS_RAGGED:
        start = tile.seq.token_k.to(gl.int32) + tile.kv_batch * rows_each
        return box(True, 0, tile.kv_head, start, tile.seq.len_k, col)
    else:
        return box(False, tile.kv_batch, tile.kv_head, 0, 0, col)


@gluon.jit
def values_at(params, tile, col):
    """Coordinates of values from `col` on; in transposed values, (batch, kv_head,
    dim, position)."""
    if not params.tile.V_TRANSPOSED:
        return keys_at(params, tile, params.kv_rows.v_rows, col)
    elif params.seqs.cu_k is None:
        return [tile.batch, tile.kv_head, 0, col]
    else:
        return [0, tile.kv_head, 0, (tile.seq.token_k // V_T_BLOCK + tile.batch) * V_T_BLOCK + col]


@gluon.jit
def load_k(io, kv, params, tile, col, kv_state):
    """Waits for an empty stage and starts filling it with keys from `col` on."""
    rows = params.kv_rows.k_rows
    if params.kv.table is None:
        kv.k.load(io.k, keys_at(params, tile, rows, col), kv_state.k)
    else:
        load_pages(kv.k, io.k, params, tile, rows, col, kv_state.k)


@gluon.jit
def load_v(io, kv, params, tile, col, kv_state):
    """As `load_k`, for values."""
    if params.kv.table is None:
        kv.v.load(io.v, values_at(params, tile, col), kv_state.values())
    else:
        load_pages(kv.v, io.v, params, tile, params.kv_rows.v_rows, col, kv_state.values())


@gluon.jit
def load_k_and_v(io, kv, params, tile, k_col, v_col, kv_state):
    """As `load_k` and `load_v`, which may share a stage."""
    if params.kv.table is None:
        k_at = keys_at(params, tile, params.kv_rows.k_rows, k_col)
        kv.load(io.k, k_at, io.v, values_at(params, tile, v_col), kv_state)
    else:
        load_k(io, kv, params, tile, k_col, kv_state)
        load_v(io, kv, params, tile, v_col, kv_state)


@gluon.jit
def page_numbers(
    table,
    params,
    len_k,
    col,
    ROWS: gl.constexpr,
    DOWN: gl.constexpr,
    MAY_BE_EMPTY: gl.constexpr = False,
):
    """(page, its first key) of each of DOWN boxes of ROWS keys from `col` on.

    Past the keys in use this is the last page again, whose rows there are past the end of the map.
    All loads are issued before the first result is needed. MAY_BE_EMPTY: a sequence without keys
    may have no page; it gets page 0, of which no row is in use.
    """
    pages = ()
    for i in gl.static_range(DOWN):
        place = gl.minimum(col + i * ROWS, len_k - 1) // params.kv.page_size
        if MAY_BE_EMPTY:
            page = gl.load(table + place, mask=len_k > 0, other=0)
        else:
            page = gl.load(table + place)
        pages = pages + ((page, place * params.kv.page_size),)
    return pages


@gluon.jit
def page_at(params, tile, numbered, rows_each, col):
    """Coordinates of keys or values from `col` on, which lie in this page. numbered: (page, its
    first key). Rows past the keys in use are past the end of the map."""
    page, first = numbered
    used = gl.minimum(tile.seq.len_k - first, params.kv.page_size)
    # ptxas: a bound that the compiler knows takes no register. A number that is no page's becomes,
    # by these bits, one past the end of the map or that of another page.
    start = (page & (params.kv_rows.NO_PAGE - 1)) * rows_each
    return box(True, 0, tile.kv_head, start, used, col - first)


@gluon.jit
def load_pages(pipeline, desc, params, tile, rows_each, col, state):
    """Waits until stage `state` is empty and starts filling it with keys or values from `col` on,
    from pages."""
    ROWS: gl.constexpr = desc.block_type.shape[3]
    table = params.kv.table + tile.batch.to(gl.int64) * params.kv.stride_tableb
    pages = page_numbers(table, params, tile.seq.len_k, col, ROWS, pipeline.rows // ROWS)
    load_from_pages(pipeline, desc, params, tile, rows_each, col, pages, state)


@gluon.jit
def load_from_pages(pipeline, desc, params, tile, rows_each, col, pages, state):
    """As `load_pages`, with known page numbers. It loads boxes of the map's shape: rows that divide
    a page, and as many columns as the swizzle has bytes for. Rows past the keys in use are past
    the end of the map, which fills them with zeros."""
    ROWS: gl.constexpr = desc.block_type.shape[3]
    WIDTH: gl.constexpr = desc.block_type.shape[4]
    DOWN: gl.constexpr = pipeline.rows // ROWS
    ACROSS: gl.constexpr = pipeline.dim // WIDTH
    BOXES: gl.constexpr = pipeline.boxes.shape[0] * ACROSS * DOWN
    full = pipeline.producer_acquire(state, state)
    mbarrier.expect(full, pipeline.rows * pipeline.dim * (desc.dtype.primitive_bitwidth // 8))
    shape_of_boxes: gl.constexpr = [BOXES, 1, 1, 1, ROWS, WIDTH]
    layout: gl.constexpr = desc.layout
    dtype: gl.constexpr = desc.dtype
    boxes = reinterpret(pipeline.boxes, dtype, shape_of_boxes, layout)
    for i in gl.static_range(DOWN):
        where = page_at(params, tile, pages[i], rows_each, col + i * ROWS)
        for c in gl.static_range(ACROSS):
            index = (state.index * ACROSS + c) * DOWN + i
            tma_load(
                desc, [where[0], where[1], where[2], where[3], c * WIDTH], full, boxes.index(index)
            )
