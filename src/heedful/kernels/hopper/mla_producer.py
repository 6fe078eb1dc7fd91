"""The warp of the MLA decode that loads keys, box by box, as soon as a box is free."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from heedful.kernels.hopper.compat import reinterpret, tma_load
from heedful.kernels.hopper.decode_share import look
from heedful.kernels.hopper.mla_shared import (
    BLOCKS,
    BOXES,
    KEYS,
    VALUE_BOXES,
    WIDTH,
    box_in_turn,
)
from heedful.kernels.hopper.sequences import box, within


@gluon.jit
def rows_at(params, piece, batch, col):
    """Coordinates of keys from `col` on, but for the columns."""
    if params.kv_rows.IS_RAGGED:
        start = piece.token_k.to(gl.int32) + batch * params.kv_rows.k_rows
        return box(True, 0, piece.g, start, piece.len_k, col)
    else:
        return box(False, batch, piece.g, 0, 0, col)


@gluon.jit
def page_at(params, piece, page, place, col):
    """Coordinates of keys from `col` on, which are in this page, the sequence's `place`th, but for
    the columns. Past the keys in use they are past the end of the map."""
    first = place * params.kv.page_size
    used = gl.minimum(piece.len_k - first, params.kv.page_size)
    # Of a number that is no page's these bits are past the end of the map, or another page's.
    start = (page & (params.kv_rows.NO_PAGE - 1)) * params.kv_rows.k_rows
    return box(True, 0, piece.g, start, used, col - first)


@gluon.jit
def load_box(io, memory, full, params, piece, batch, col, pages, places, BOX: gl.constexpr):
    """Starts filling a box with 64 keys from `col` on; pages: their numbers, places: in the
    sequence, of each of the map's boxes."""
    HEIGHT: gl.constexpr = io.k.block_type.shape[-2]
    DOWN: gl.constexpr = KEYS // HEIGHT
    shape: gl.constexpr = io.k.block_type.shape
    mbarrier.expect(full, KEYS * WIDTH * 2)
    parts = reinterpret(memory, io.k.dtype, [DOWN] + shape, io.k.layout)
    for i in gl.static_range(DOWN):
        if params.kv.table is not None:
            at = page_at(params, piece, pages[i], places[i], col + i * HEIGHT)
        else:
            at = rows_at(params, piece, batch, col + i * HEIGHT)
        tma_load(io.k, at[:-1] + [BOX * WIDTH], full, parts.index(i))


@gluon.jit
def page_numbers(io, params, piece, col):
    """(numbers, places in the sequence) of the pages of 64 keys from `col` on, if there are
    pages."""
    HEIGHT: gl.constexpr = io.k.block_type.shape[-2]
    pages = ()
    places = ()
    if params.kv.table is not None:
        table = params.kv.table + piece.b.to(gl.int64) * params.kv.stride_tableb
        last = gl.maximum(piece.len_k - 1, 0)
        for i in gl.static_range(KEYS // HEIGHT):
            place = gl.minimum(col + i * HEIGHT, last) // params.kv.page_size
            pages = pages + (gl.load(table + place),)
            places = places + (place,)
    return pages, places


@gluon.jit
def entry_of(params, piece):
    """The cache's entry of a piece's sequence."""
    entry = piece.b
    if params.kv.batch_idx is not None:
        entry = within(gl.load(params.kv.batch_idx + entry), 0, params.kv.entries - 1)
    return entry


@gluon.jit
def load_block(io, shared, params, piece, batch, col, phase, BLOCK: gl.constexpr):
    """Loads 64 keys from `col` on, each part once it is free."""
    # Page numbers are on their way before there is room.
    pages, places = page_numbers(io, params, piece, col)
    EACH: gl.constexpr = params.tile.COLUMNS // WIDTH
    for turn in gl.static_range(BOXES):
        if turn % EACH == 0 and turn < VALUE_BOXES:
            mbarrier.wait(shared.empty(BLOCK, turn // EACH), phase ^ 1)
        load_box(
            io,
            shared.k_box(BLOCK, box_in_turn(BLOCK, turn)),
            shared.full(BLOCK, box_in_turn(BLOCK, turn)),
            params,
            piece,
            batch,
            col,
            pages,
            places,
            box_in_turn(BLOCK, turn),
        )


@gluon.jit
def mla_producer(io, shared, share, params):
    """Loads the keys of all pieces of a program."""
    visit = gl.to_tensor(0)
    while share.x < share.end:
        piece, share = look(share, params)
        batch = entry_of(params, piece)
        for number in range(piece.start, piece.stop):
            col = number * params.tile.BLOCK_N
            for block in gl.static_range(BLOCKS):
                load_block(io, shared, params, piece, batch, col + block * KEYS, visit & 1, block)
            visit += 1
