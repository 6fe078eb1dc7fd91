"""The warp of the Hopper decode that loads keys and values, and appends new ones first."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.decode_append import append_rows, first_visit, rows_of_piece
from heedful.kernels.hopper.decode_share import look
from heedful.kernels.hopper.pipeline import PipelineState
from heedful.kernels.hopper.sequences import (
    WorkTile,
    keys_at,
    load_from_pages,
    page_numbers,
    within,
)


@gluon.jit
def block_at(params, span, visit):
    """The key tile of a visit: all in turn, or first leading ones, then those of a window."""
    if params.mask.HAS_LEFT:
        return gl.where(visit < span.first_end, visit, visit - span.first_end + span.begin)
    else:
        return visit


@gluon.jit
def pages_at(io, params, tile, col):
    """The numbers of the pages of a tile of keys from `col` on, if there are pages."""
    if params.kv.table is None:
        return ()
    else:
        ROWS_OF_BOX: gl.constexpr = io.k.block_type.shape[3]
        table = params.kv.table + tile.batch.to(gl.int64) * params.kv.stride_tableb
        DOWN: gl.constexpr = params.tile.BLOCK_N // ROWS_OF_BOX
        return page_numbers(table, params, tile.len_k, col, ROWS_OF_BOX, DOWN)


@gluon.jit
def load_tile(ring, desc, params, tile, rows_each, col, pages, state):
    """Waits until there is room and starts filling it with keys or values from `col` on."""
    if params.kv.table is None:
        ring.load(desc, keys_at(params, tile, rows_each, col), state)
    else:
        load_from_pages(ring, desc, params, tile, rows_each, col, pages, state)


@gluon.jit
def tile_of(params, piece):
    """Where a piece's keys lie."""
    batch = piece.b
    if params.kv.batch_idx is not None:
        batch = within(gl.load(params.kv.batch_idx + batch), 0, params.kv.entries - 1)
    return WorkTile(
        piece.b,
        piece.g,
        piece.g,
        piece.row0,
        piece.token_k,
        piece.token_k.to(gl.int32),
        piece.len_q,
        piece.len_k,
        piece.off,
        piece.stored_q,
        batch,
    )


@gluon.jit
def load_piece(io, k, v, piece, state, params, append):
    """Loads the keys and values of a piece, and appends new ones first."""
    tile = tile_of(params, piece)
    start = gl.minimum(piece.start, piece.span.visits)
    stop = gl.minimum(piece.stop, piece.span.visits)
    new_visit = stop
    if append.io.cache_seqlens is not None:
        new = rows_of_piece(piece, params, append)
        new_visit = first_visit(new, piece, start, stop, params)
        if new_visit == stop:
            append_rows(new, piece, params, append)
    col = block_at(params, piece.span, start) * params.tile.BLOCK_N
    pages = pages_at(io, params, tile, col)
    for visit in range(start, stop):
        if append.io.cache_seqlens is not None:  # noqa: SIM102  (known when compiling)
            if visit == new_visit:
                append_rows(new, piece, params, append)
        # Page numbers of the next tile are under way while there is no room.
        next_col = block_at(params, piece.span, visit + 1) * params.tile.BLOCK_N
        next_pages = pages_at(io, params, tile, next_col)
        load_tile(k, io.k, params, tile, params.kv_rows.k_rows, col, pages, state)
        load_tile(v, io.v, params, tile, params.kv_rows.v_rows, col, pages, state)
        col = next_col
        pages = next_pages
        state = state.next()
    return state


@gluon.jit
def decode_producer(io, k, v, share, params, append):
    """Loads the keys and values of all pieces of a program."""
    state = PipelineState.start(params.tile.STAGES)
    while share.x < share.end:
        piece, share = look(share, params)
        if piece.start < piece.stop:
            state = load_piece(io, k, v, piece, state, params, append)
