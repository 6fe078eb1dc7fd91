"""The producer warp of the Hopper decode: it loads keys and values, and appends new ones first."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.decode.append import append_rows, first_visit, rows_of_segment
from heedful.kernels.hopper.decode.keys import keys_of_segment
from heedful.kernels.hopper.decode.share import look
from heedful.kernels.hopper.sm90.pipeline import PipelineState
from heedful.kernels.hopper.sm90.sequences import keys_at, load_from_pages, page_numbers
from heedful.kernels.split_kv.work import block_of


@gluon.jit
def pages_at(io, params, keys, col):
    """The pages of a tile of keys from `col` on, if there are pages."""
    if params.kv.table is None:
        return ()
    else:
        ROWS_OF_BOX: gl.constexpr = io.k.block_type.shape[3]
        table = params.kv.table + keys.batch.to(gl.int64) * params.kv.stride_tableb
        DOWN: gl.constexpr = params.tile.BLOCK_N // ROWS_OF_BOX
        # Otherwise, sequences without keys have no work tiles.
        PACKED: gl.constexpr = params.seqs.cu_q is not None
        return page_numbers(table, params, keys.seq.len_k, col, ROWS_OF_BOX, DOWN, PACKED)


@gluon.jit
def load_tile(ring, desc, params, keys, rows_each, col, pages, state):
    """Waits for an empty stage and starts filling it with keys or values from `col` on."""
    if params.kv.table is None:
        ring.load(desc, keys_at(params, keys, rows_each, col), state)
    else:
        load_from_pages(ring, desc, params, keys, rows_each, col, pages, state)


@gluon.jit
def load_segment(io, k, v, segment, state, params, append):
    """Loads the keys and values of a segment, and appends new ones first. v: None if values share
    the ring of keys, and follow them."""
    keys = keys_of_segment(params, segment)
    start = gl.minimum(segment.start, segment.span.visits)
    stop = gl.minimum(segment.stop, segment.span.visits)
    new_visit = stop
    if append.io.cache_seqlens is not None:
        new = rows_of_segment(segment, params, append)
        new_visit = first_visit(new, segment, start, stop, params)
        if new_visit == stop:
            append_rows(new, segment, params, append)
    col = block_of(start, segment.span, params.mask) * params.tile.BLOCK_N
    pages = pages_at(io, params, keys, col)
    for visit in range(start, stop):
        if append.io.cache_seqlens is not None:  # noqa: SIM102  (known when compiling)
            if visit == new_visit:
                append_rows(new, segment, params, append)
        # The page numbers of the next tile are loaded while this warp waits for a stage.
        next_col = block_of(visit + 1, segment.span, params.mask) * params.tile.BLOCK_N
        next_pages = pages_at(io, params, keys, next_col)
        load_tile(k, io.k, params, keys, params.kv_rows.k_rows, col, pages, state)
        if v is None:
            state = state.next()
            load_tile(k, io.v, params, keys, params.kv_rows.v_rows, col, pages, state)
        else:
            load_tile(v, io.v, params, keys, params.kv_rows.v_rows, col, pages, state)
        col = next_col
        pages = next_pages
        state = state.next()
    return state


@gluon.jit
def decode_producer(io, k, v, share, params, append):
    """Loads the keys and values of all segments of this program. v: as of `load_segment`."""
    state = PipelineState.start(params.tile.STAGES)
    while share.x < share.end:
        segment, share = look(share, params)
        if segment.start < segment.stop:
            state = load_segment(io, k, v, segment, state, params, append)
