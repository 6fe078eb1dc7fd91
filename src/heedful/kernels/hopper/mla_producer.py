"""The warp of the MLA decode that loads keys, box by box, as soon as a box is free."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import CachePolicy, FractionalEvictionPolicy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from heedful.kernels.hopper.compat import inline_asm, reinterpret, tma_load
from heedful.kernels.hopper.mla_shared import (
    BLOCKS,
    BOXES,
    KEYS,
    VALUE_BOXES,
    WIDTH,
    box_in_turn,
    look,
)
from heedful.kernels.hopper.sequences import box, within

FIRST_TO_LEAVE: gl.constexpr = gl.constexpr(
    CachePolicy(l2=FractionalEvictionPolicy("evict_first", 1.0))
)


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
def load_box(
    io,
    shared,
    params,
    piece,
    batch,
    col,
    pages,
    places,
    BLOCK: gl.constexpr,
    BOX: gl.constexpr,
):
    """Starts filling a box with 64 keys from `col` on; pages: their numbers, places: in the
    sequence, of each of the map's boxes."""
    HEIGHT: gl.constexpr = io.k.block_type.shape[-2]
    DOWN: gl.constexpr = KEYS // HEIGHT
    shape: gl.constexpr = io.k.block_type.shape
    full = shared.full(BLOCK, BOX)
    mbarrier.expect(full, KEYS * WIDTH * 2)
    parts = reinterpret(shared.k_box(BLOCK, BOX), io.k.dtype, [DOWN] + shape, io.k.layout)
    for i in gl.static_range(DOWN):
        if params.kv.table is not None:
            at = page_at(params, piece, pages[i], places[i], col + i * HEIGHT)
        else:
            at = rows_at(params, piece, batch, col + i * HEIGHT)
        if params.tile.EVICT_FIRST:
            place = at[:-1] + [BOX * WIDTH]
            tma_load(io.k, place, full, parts.index(i), cache_policy=FIRST_TO_LEAVE)
        else:
            tma_load(io.k, at[:-1] + [BOX * WIDTH], full, parts.index(i))


@gluon.jit
def pages_of(io, params, piece, col):
    """(numbers, places in the sequence) of the pages of 64 keys from `col` on, if there are any."""
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
def load_block(io, shared, params, piece, batch, col, phase, found, BLOCK: gl.constexpr):
    """Loads 64 keys from `col` on, each part once it is free. found: their pages."""
    pages, places = found
    EACH: gl.constexpr = params.tile.COLUMNS // WIDTH
    for turn in gl.static_range(BOXES):
        if turn % EACH == 0 and turn < VALUE_BOXES:
            mbarrier.wait(shared.empty(BLOCK, turn // EACH), phase ^ 1)
        load_box(
            io, shared, params, piece, batch, col, pages, places, BLOCK, box_in_turn(BLOCK, turn)
        )


@gluon.jit
def fetch_block(io, params, piece, batch, col, found):
    """Starts fetching 64 keys from `col` on into L2, where each page's lie side by side."""
    HEIGHT: gl.constexpr = io.k.block_type.shape[-2]
    ROW_BYTES: gl.constexpr = params.tile.HEAD_DIM * 2
    pages, places = found
    for i in gl.static_range(KEYS // HEIGHT):
        row = col + i * HEIGHT
        rows = gl.minimum(piece.len_k - row, HEIGHT)
        if rows > 0:
            entry = batch
            at = piece.token_k.to(gl.int32) + row
            if params.kv.table is not None:
                entry = within(pages[i], 0, params.kv.entries - 1)
                at = row - places[i] * params.kv.page_size
            start = entry.to(gl.int64) * io.k_rows.stride_b + at.to(gl.int64) * io.k_rows.stride_n
            inline_asm(
                "{ .reg .pred first; .reg .b32 t; mov.u32 t, %laneid; setp.eq.u32 first, t, 0;\n"
                "@first cp.async.bulk.prefetch.L2.global [$0], $1; }",
                "l,r,~{memory}",
                [(io.k_rows.ptr + start).to(gl.int64), rows * ROW_BYTES],
            )


@gluon.jit
def load_piece(io, shared, params, piece, batch, visit):
    """Loads the keys of a piece, a step after their pages were looked up."""
    now_0 = pages_of(io, params, piece, piece.start * params.tile.BLOCK_N)
    now_1 = pages_of(io, params, piece, piece.start * params.tile.BLOCK_N + KEYS)
    mine = gl.program_id(0) // params.shape.heads_k % params.work.tiles % 2
    for number in range(piece.start, piece.stop):
        col = number * params.tile.BLOCK_N
        later = col + params.tile.BLOCK_N
        next_0 = pages_of(io, params, piece, later)
        next_1 = pages_of(io, params, piece, later + KEYS)
        load_block(io, shared, params, piece, batch, col, visit & 1, now_0, 0)
        load_block(io, shared, params, piece, batch, col + KEYS, visit & 1, now_1, 1)
        if params.tile.FETCH > 1:  # noqa: SIM102  (known when compiling, and `and` is not)
            if number + 1 < piece.stop:
                if mine == 0:
                    fetch_block(io, params, piece, batch, later, next_0)
                else:
                    fetch_block(io, params, piece, batch, later + KEYS, next_1)
        now_0 = next_0
        now_1 = next_1
        visit += 1


@gluon.jit
def mla_producer(io, shared, share, params):
    """Loads the keys of all pieces of a program."""
    visit = gl.to_tensor(0)
    while share.x < share.end:
        piece, share = look(share, params)
        batch = piece.b
        if params.kv.batch_idx is not None:
            batch = within(gl.load(params.kv.batch_idx + batch), 0, params.kv.entries - 1)
        if params.tile.FETCH > 0:
            if piece.start < piece.stop:
                load_piece(io, shared, params, piece, batch, visit)
            visit += piece.stop - piece.start
        else:
            for number in range(piece.start, piece.stop):
                for block in gl.static_range(BLOCKS):
                    col = number * params.tile.BLOCK_N + block * KEYS
                    # Page numbers are on their way before there is room.
                    found = pages_of(io, params, piece, col)
                    load_block(io, shared, params, piece, batch, col, visit & 1, found, block)
                visit += 1
