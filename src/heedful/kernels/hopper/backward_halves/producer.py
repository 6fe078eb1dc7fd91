"""The producer warp of the backward of halves: loads a program's half of the columns."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from heedful.kernels.hopper.backward.far_rows import any_far, scale_rows
from heedful.kernels.hopper.backward.producer import dout_scale, keys_at, queries_of
from heedful.kernels.hopper.backward.tile import key_tile, m_block_range, visit_range
from heedful.kernels.hopper.backward_halves.shared import HALVES
from heedful.kernels.hopper.forward_wide.cluster import (
    arrive_each_warp,
    meet,
    place_in_cluster,
    wait,
)
from heedful.kernels.hopper.sm90.compat import tma_load
from heedful.kernels.hopper.sm90.pipeline import PipelineState
from heedful.kernels.hopper.sm90.sequences import box


@gluon.jit
def load_keys(desc, memory, full, rows_each, params, tile, column):
    """Loads columns from `column` on of a work tile's keys or values."""
    at = keys_at(rows_each, params, tile, tile.col)
    mbarrier.expect(full, desc.block_type.nbytes)
    tma_load(desc, at[:-1] + [column], full, memory)


@gluon.jit
def rows_at(params, tile, head, row, column):
    """Coordinates of columns from `column` on of query rows from `row` on."""
    PACKED: gl.constexpr = params.seqs.cu_q is not None
    seq = tile.seq
    return box(PACKED, tile.batch, head, seq.token_q, seq.len_q, row)[:-1] + [column]


@gluon.jit
def load_queries(io, shared, params, tile, numbers, column, state, base):
    """Loads a visit's queries once their stage is empty, and stores lse beside them."""
    head, row, lse_M, _delta_M, _bounds = numbers
    ring = shared.q
    wait(ring.empty.index(state.index), state.phase ^ 1, base)
    full = ring.full.index(state.index)
    shared.lse.index(state.index).store(lse_M)
    mbarrier.expect(full, io.q.block_type.nbytes)
    tma_load(io.q, rows_at(params, tile, head, row, column), full, ring.boxes.index(state.index))


@gluon.jit
def load_dout(io, shared, params, tile, blocks, numbers, following, column, state, far_phase, base):
    """As `hopper.backward.producer.load_dout`."""
    head, row, lse_M, delta_M, _bounds = numbers
    ring, factors = shared.do, shared.delta.index(state.stages)
    is_far_tile = any_far(lse_M)
    wait(ring.empty.index(state.index), state.phase ^ 1, base)
    full = ring.full.index(state.index)
    if is_far_tile:
        scale_M = dout_scale(io, params, tile, head, row, lse_M)
        delta_M = delta_M * scale_M
        factors.store(scale_M)
    shared.delta.index(state.index).store(delta_M)
    rows = ring.boxes.index(state.index)
    loaded = ring.full.index(gl.where(is_far_tile, state.stages, state.index))
    mbarrier.expect(loaded, io.dout.block_type.nbytes)
    tma_load(io.dout, rows_at(params, tile, head, row, column), loaded, rows)
    numbers = queries_of(io, params, tile, blocks, following, False)
    if is_far_tile:
        wait(loaded, far_phase, base)
        scale_rows(rows, factors, base)
        arrive_each_warp(full, base)
        far_phase ^= 1
    return numbers, far_phase


@gluon.jit
def load_tile(io, shared, params, tile, blocks, first, end, place):
    """Loads half of a work tile's keys and values, and of its queries in the order of visits."""
    base = place << 24
    column = place * (params.tile.D // HALVES)
    column_v = place * (params.tile.E // HALVES)
    q_state = PipelineState.start(params.tile.Q_STAGES)
    do_state = PipelineState.start(params.tile.DO_STAGES)
    far_phase = gl.to_tensor(0)
    load_keys(io.k, shared.k.index(0), shared.k_full.index(0), io.k_rows, params, tile, column)
    numbers = queries_of(io, params, tile, blocks, first, True)
    for visit in range(first, end):
        load_queries(io, shared, params, tile, numbers, column, q_state, base)
        if visit == first:
            memory, full = shared.v.index(0), shared.v_full.index(0)
            load_keys(io.v, memory, full, io.v_rows, params, tile, column_v)
        following = gl.minimum(visit + 1, end - 1)
        numbers, far_phase = load_dout(
            *(io, shared, params, tile, blocks, numbers, following),
            *(column_v, do_state, far_phase, base),
        )
        q_state = q_state.next()
        do_state = do_state.next()


@gluon.jit
def halves_producer(io, shared, params, count):
    """Loads the inputs of a program's work tile, if there is one. count: of work tiles."""
    meet(HALVES)
    place = place_in_cluster(HALVES)
    index = gl.program_id(0) // HALVES
    if index < count:
        tile = key_tile(params, index)
        blocks = m_block_range(params, tile)
        first, end = visit_range(params, tile, blocks)
        if end > first:
            load_tile(io, shared, params, tile, blocks, first, end, place)
    meet(HALVES)
