"""Which part of its storage a sequence uses, and where its keys lie: dense, packed, in pages."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from heedful.kernels.hopper.compat import aggregate, optional, reinterpret, tma_load
from heedful.kernels.hopper.schedule import Tile, box


@aggregate
class Storage:
    """Where sequences lie beyond dense and packed rows; what a call lacks is None.

    used_q, used_k, leftpad_k, kv_batch_idx, block_table: as in core.operands. k_rows, v_rows: from
    one batch entry or page of K or V to the next, in rows of its map. IS_RAGGED: K and V are mapped
    as packed tokens, so that reads end with each sequence (see `schedule.box`).
    """

    used_q: gl.tensor | gl.constexpr
    used_k: gl.tensor | gl.constexpr
    leftpad_k: gl.tensor | gl.constexpr
    kv_batch_idx: gl.tensor | gl.constexpr
    block_table: gl.tensor | gl.constexpr
    stride_table: gl.tensor | gl.constexpr
    page_size: gl.tensor | gl.constexpr
    k_rows: gl.tensor | gl.constexpr
    v_rows: gl.tensor | gl.constexpr
    IS_RAGGED: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        used_q,
        used_k,
        leftpad_k,
        kv_batch_idx,
        block_table,
        stride_table,
        page_size,
        k_rows,
        v_rows,
        IS_RAGGED,
    ):
        self.used_q = optional(used_q)
        self.used_k = optional(used_k)
        self.leftpad_k = optional(leftpad_k)
        self.kv_batch_idx = optional(kv_batch_idx)
        self.block_table = optional(block_table)
        self.stride_table = optional(stride_table)
        self.page_size = optional(page_size)
        self.k_rows = optional(k_rows)
        self.v_rows = optional(v_rows)
        self.IS_RAGGED = gl.constexpr(IS_RAGGED)


@gluon.jit
def trim(shape, tile):
    """The tile with the lengths that its sequence uses, and where these keys begin."""
    if shape.storage is None:
        return tile
    else:
        return trim_to_storage(shape, shape.storage, tile)


@gluon.jit
def trim_to_storage(shape, storage, tile):
    len_q = tile.len_q
    len_k = tile.len_k
    start_k = tile.start_k
    kv_batch = tile.batch
    off = tile.off
    if storage.used_q is not None:
        len_q = gl.minimum(len_q, gl.load(storage.used_q + tile.batch))
    if storage.leftpad_k is not None:
        pad = gl.load(storage.leftpad_k + tile.batch)
        start_k += pad
        len_k -= pad
    if storage.used_k is not None:
        len_k = gl.minimum(len_k, gl.load(storage.used_k + tile.batch))
    if storage.kv_batch_idx is not None:
        kv_batch = gl.load(storage.kv_batch_idx + tile.batch)
    if storage.used_q is not None or storage.used_k is not None or storage.leftpad_k is not None:
        off = shape.shift + shape.align * (len_k - len_q)
    return Tile(
        tile.batch,
        tile.head,
        tile.kv_head,
        tile.row,
        tile.start_q,
        start_k,
        len_q,
        len_k,
        off,
        tile.stored_q,
        kv_batch,
    )


@gluon.jit
def position(shape, row):
    """Which query of its sequence a row of a tile is."""
    if shape.PACK == 1:
        return row
    else:
        return row // shape.PACK


@gluon.jit
def queries_at(shape, tile, row):
    """Coordinates of query or output rows, those that are not in use among them."""
    if shape.PACK > 1:
        return [tile.batch, tile.head, row // shape.PACK, 0, 0]
    else:
        packed: gl.constexpr = shape.cu_q is not None
        return box(packed, tile.batch, tile.head, tile.start_q, tile.stored_q, row)


@gluon.jit
def keys_at(shape, tile, rows_each, col):
    """Coordinates of keys or values from `col` on, in a map that has `rows_each` rows a batch
    entry."""
    if shape.storage.IS_RAGGED:
        start = tile.start_k + tile.kv_batch * rows_each
        return box(True, 0, tile.kv_head, start, tile.len_k, col)
    else:
        return box(False, tile.kv_batch, tile.kv_head, 0, 0, col)


@gluon.jit
def load_keys(channel, desc, shape, tile, rows_each, col, at):
    """Waits until slot `at` is free and starts filling it with keys or values from `col` on."""
    if shape.storage.block_table is None:
        channel.load(desc, keys_at(shape, tile, rows_each, col), at)
    else:
        load_pages(channel, desc, shape, tile, rows_each, col, at)


@gluon.jit
def load_keys_and_values(slots, k_desc, v_desc, shape, tile, k_col, v_col, at):
    """As load_keys, keys from `k_col` and values from `v_col` on."""
    storage = shape.storage
    if storage.block_table is None:
        k_at = keys_at(shape, tile, storage.k_rows, k_col)
        slots.load(k_desc, k_at, v_desc, keys_at(shape, tile, storage.v_rows, v_col), at)
    else:
        load_pages(slots.k, k_desc, shape, tile, storage.k_rows, k_col, at.k)
        load_pages(slots.v, v_desc, shape, tile, storage.v_rows, v_col, at.values())


@gluon.jit
def load_pages(channel, desc, shape, tile, rows_each, col, at):
    """As load_keys, from pages: boxes of as many rows as the map has, 64 columns wide each.

    Rows past the keys in use are past the end of the map, which fills them with zeros.
    """
    storage = shape.storage
    ROWS: gl.constexpr = desc.block_type.shape[3]
    WIDTH: gl.constexpr = desc.block_type.shape[4]
    DOWN: gl.constexpr = channel.rows // ROWS
    ACROSS: gl.constexpr = channel.dim // WIDTH
    BOXES: gl.constexpr = channel.boxes.shape[0] * ACROSS * DOWN
    # All reads of the table are under way before the first is needed.
    pages = ()
    table = storage.block_table + tile.batch.to(gl.int64) * storage.stride_table
    for i in gl.static_range(DOWN):
        row = col + i * ROWS
        place = gl.minimum(row, gl.maximum(tile.len_k - 1, 0)) // storage.page_size
        pages = pages + (gl.load(table + place),)
    full = channel.full.index(at.slot)
    mbarrier.wait(channel.empty.index(at.slot), at.parity ^ 1)
    mbarrier.expect(full, channel.rows * channel.dim * (desc.dtype.primitive_bitwidth // 8))
    shape_of_boxes: gl.constexpr = [BOXES, 1, 1, 1, ROWS, WIDTH]
    layout: gl.constexpr = desc.layout
    dtype: gl.constexpr = desc.dtype
    boxes = reinterpret(channel.boxes, dtype, shape_of_boxes, layout)
    for i in gl.static_range(DOWN):
        row = col + i * ROWS
        first = row - row % storage.page_size
        used = gl.minimum(gl.maximum(tile.len_k - first, 0), storage.page_size)
        for c in gl.static_range(ACROSS):
            where = box(True, 0, tile.kv_head, pages[i] * rows_each, used, row - first)
            index = (at.slot * ACROSS + c) * DOWN + i
            tma_load(
                desc,
                [where[0], where[1], where[2], where[3], c * WIDTH],
                full,
                boxes.index(index),
            )
