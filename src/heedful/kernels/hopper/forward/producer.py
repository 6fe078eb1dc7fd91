"""The producer warp of the forward: loads queries, keys and values of every work tile to shared
memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.args.hopper import HopperIO, HopperParams, TransposeV
from heedful.kernels.hopper.fp8.transpose_v import wait_for_v_t
from heedful.kernels.hopper.sm90.block_range import (
    first_key,
    n_block_at,
    n_block_count,
    program_n_block_range,
    turn_of,
)
from heedful.kernels.hopper.sm90.mma import ROWS
from heedful.kernels.hopper.sm90.pipeline import PipelineState
from heedful.kernels.hopper.sm90.sequences import load_k, load_k_and_v, load_v, queries_at
from heedful.kernels.hopper.sm90.tile_scheduler import (
    SCHEDULER_STAGES,
    commit_work_tile,
    next_part,
    work_tile_at,
)


@gluon.jit
def q_stage_of(params, place: gl.constexpr):
    """The consumer whose queries are loaded at this place, and also the place of a consumer's
    queries. In 16 bits without pingpong, the consumer that sees the last key tile comes first."""
    IN_ORDER: gl.constexpr = params.tile.PINGPONG or params.tile.V_TRANSPOSED
    return place if IN_ORDER else params.tile.CONSUMERS - 1 - place


@gluon.jit
def load_queries(io, q, tile, q_state, q_full_state, params):
    """Loads the queries of all consumers. Returns the next states of their stages."""
    for place in gl.static_range(params.tile.CONSUMERS):
        row = tile.row + q_stage_of(params, place) * ROWS
        q.load(io.q, queries_at(params, tile, row), q_state, q_full_state)
        q_state = q_state.next()
        q_full_state = q_full_state.next()
    return q_state, q_full_state


@gluon.jit
def producer(io: HopperIO, q, kv, scheduler, transpose: TransposeV, params: HopperParams):
    """Loads every tile's queries, and its keys and values in the order of visits."""
    q_state = PipelineState.start(params.stages.Q_STAGES)
    q_full_state = PipelineState.start(q.full.shape[0])
    kv_state = kv.start()
    scheduler_state = PipelineState.start(SCHEDULER_STAGES)
    IN_TURN: gl.constexpr = params.split.held is not None
    index = next_part(params, scheduler, gl.program_id(0))
    number = gl.to_tensor(0)
    while index < scheduler.count:
        tile, split = work_tile_at(params, scheduler, index)
        if IN_TURN:
            turn = turn_of(params, tile, number)
            split = turn.part
        commit_work_tile(params, scheduler, index, tile, split, scheduler_state)
        scheduler_state = scheduler_state.next()
        blocks = program_n_block_range(params, tile, split, ())
        steps = n_block_count(params, blocks)
        col = first_key(params, tile, blocks, n_block_at(params, blocks, 0))
        # Keys are one tile before values, in the order in which consumers take them.
        if steps > 0:
            load_k(io, kv, params, tile, col, kv_state)
            kv_state = kv_state.after_keys()
        if IN_TURN:
            if number == 0:
                q_state, q_full_state = load_queries(io, q, tile, q_state, q_full_state, params)
        else:
            q_state, q_full_state = load_queries(io, q, tile, q_state, q_full_state, params)
        for step in range(1, steps):
            wait_for_v_t(transpose, params, tile, blocks, step, col)
            next_col = first_key(params, tile, blocks, n_block_at(params, blocks, step))
            load_k_and_v(io, kv, params, tile, next_col, col, kv_state)
            kv_state = kv_state.next()
            col = next_col
        if steps > 0:
            wait_for_v_t(transpose, params, tile, blocks, steps, col)
            load_v(io, kv, params, tile, col, kv_state)
            kv_state = kv_state.after_values()
        if IN_TURN:
            number += 1
            if turn.is_last:
                number = number * 0
                index = scheduler.advance(index)
        else:
            index = next_part(params, scheduler, scheduler.advance(index))
    scheduler.producer_commit((scheduler.count,), scheduler_state, ())
