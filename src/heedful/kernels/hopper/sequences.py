"""Which part of its storage a sequence uses, and where its keys lie: dense, packed, in pages."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from heedful.kernels.hopper.compat import aggregate, optional, reinterpret, tma_load
from heedful.kernels.hopper.schedule import Tile, box, within


@aggregate
class Storage:
    """Where sequences lie beyond dense and packed rows; what a call lacks is None.

    used_q, used_k, leftpad_k, kv_batch_idx, block_table: as in core.operands. entries: how many
    batch entries there are for kv_batch_idx. k_rows, v_rows: from one batch entry or page of K or V
    to the next, in rows of its map. IS_RAGGED: K and V are mapped as packed tokens, so that reads
    end with each sequence (see `schedule.box`). NO_PAGE: a power of two that no page reaches.

    Whatever values these arrays hold, what is read lies within the caller's tensors: lengths end
    with the storage, a batch entry that does not exist is the first or the last, and a page that
    does not exist is zeros or another page.
    """

    used_q: gl.tensor | gl.constexpr
    used_k: gl.tensor | gl.constexpr
    leftpad_k: gl.tensor | gl.constexpr
    kv_batch_idx: gl.tensor | gl.constexpr
    block_table: gl.tensor | gl.constexpr
    stride_table: gl.tensor | gl.constexpr
    page_size: gl.tensor | gl.constexpr
    entries: gl.tensor | gl.constexpr
    k_rows: gl.tensor | gl.constexpr
    v_rows: gl.tensor | gl.constexpr
    IS_RAGGED: gl.constexpr
    NO_PAGE: gl.constexpr

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
        entries,
        k_rows,
        v_rows,
        IS_RAGGED,
        NO_PAGE,
    ):
        self.used_q = optional(used_q)
        self.used_k = optional(used_k)
        self.leftpad_k = optional(leftpad_k)
        self.kv_batch_idx = optional(kv_batch_idx)
        self.block_table = optional(block_table)
        self.stride_table = optional(stride_table)
        self.page_size = optional(page_size)
        self.entries = optional(entries)
        self.k_rows = optional(k_rows)
        self.v_rows = optional(v_rows)
        self.IS_RAGGED = gl.constexpr(IS_RAGGED)
        self.NO_PAGE = gl.constexpr(NO_PAGE)


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
        len_q = within(gl.load(storage.used_q + tile.batch), 0, len_q)
    if storage.leftpad_k is not None:
        pad = within(gl.load(storage.leftpad_k + tile.batch), 0, len_k)
        start_k += pad
        len_k -= pad
    if storage.used_k is not None:
        len_k = within(gl.load(storage.used_k + tile.batch), 0, len_k)
    if storage.kv_batch_idx is not None:
        kv_batch = within(gl.load(storage.kv_batch_idx + tile.batch), 0, storage.entries - 1)
    if shape.terms.longest_k is not None:
        # A bias has no more rows and keys than that.
        len_q = gl.minimum(len_q, shape.seqlen_q)
        len_k = gl.minimum(len_k, shape.terms.longest_k)
    SAME_Q: gl.constexpr = storage.used_q is None
    SAME_K: gl.constexpr = storage.used_k is None and storage.leftpad_k is None
    if not (SAME_Q and SAME_K and shape.terms.longest_k is None):
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
    # All reads of the table are under way before the first is needed. Past the keys in use the last
    # page is read again: of it, too, those rows are past the end of the map.
    pages = ()
    firsts = ()
    table = storage.block_table + tile.batch.to(gl.int64) * storage.stride_table
    for i in gl.static_range(DOWN):
        place = gl.minimum(col + i * ROWS, tile.len_k - 1) // storage.page_size
        pages = pages + (gl.load(table + place),)
        firsts = firsts + (place * storage.page_size,)
    full = channel.full.index(at.slot)
    mbarrier.wait(channel.empty.index(at.slot), at.parity ^ 1)
    mbarrier.expect(full, channel.rows * channel.dim * (desc.dtype.primitive_bitwidth // 8))
    shape_of_boxes: gl.constexpr = [BOXES, 1, 1, 1, ROWS, WIDTH]
    layout: gl.constexpr = desc.layout
    dtype: gl.constexpr = desc.dtype
    boxes = reinterpret(channel.boxes, dtype, shape_of_boxes, layout)
    for i in gl.static_range(DOWN):
        used = gl.minimum(tile.len_k - firsts[i], storage.page_size)
        # Of a number that is no page's these bits are past the end of the map, or another page's. A
        # bound known to the compiler takes no register: the producer has few.
        start = (pages[i] & (storage.NO_PAGE - 1)) * rows_each
        where = box(True, 0, tile.kv_head, start, used, col + i * ROWS - firsts[i])
        for c in gl.static_range(ACROSS):
            index = (at.slot * ACROSS + c) * DOWN + i
            tma_load(
                desc,
                [where[0], where[1], where[2], where[3], c * WIDTH],
                full,
                boxes.index(index),
            )
