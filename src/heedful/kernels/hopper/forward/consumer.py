"""A consumer warpgroup of the forward: it computes 64 query rows of every work tile of
its program."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from heedful.kernels.args.hopper import HopperParams
from heedful.kernels.hopper.forward.conversion import score_factors_of
from heedful.kernels.hopper.forward.epilogue import store_empty, store_rows
from heedful.kernels.hopper.forward.mainloop import mainloop
from heedful.kernels.hopper.forward.producer import q_stage_of
from heedful.kernels.hopper.fp8.descale import score_factors, value_factor
from heedful.kernels.hopper.fp8.mainloop import finish_fp8, mainloop_fp8
from heedful.kernels.hopper.sm90.block_range import (
    consumer_n_block_range,
    n_block_count,
    program_n_block_range,
    turn_of,
)
from heedful.kernels.hopper.sm90.mma import ROWS, no_output
from heedful.kernels.hopper.sm90.pingpong import pingpong_arrive, skip, skip_all
from heedful.kernels.hopper.sm90.pipeline import PipelineState
from heedful.kernels.hopper.sm90.sequences import query_position
from heedful.kernels.hopper.sm90.tile_scheduler import (
    SCHEDULER_STAGES,
    current_hulls,
    current_work_tile,
    next_work_tile,
)


@gluon.jit
def release_queries(q, q_state, params):
    """Frees a work tile's queries, which finished products have read, unless results pass through
    their memory."""
    if not params.tile.OUT_IN_Q:
        q.consumer_release_after_mma(q_state)


@gluon.jit
def consumer(outputs, q, kv, scheduler, params: HopperParams, CONSUMER: gl.constexpr):
    """Computes rows [64 CONSUMER, 64 CONSUMER + 64) of every work tile.

    outputs, q, kv: the shared memory of results, queries, and keys and values. For each tile it
    waits for the queries, passes over key tiles that only other consumers see, runs the mainloop,
    and stores the rows.
    """
    IS_FP8: gl.constexpr = params.tile.V_TRANSPOSED
    CONVERTS: gl.constexpr = params.stages.STORED_STAGES > 0
    PREFETCHES: gl.constexpr = params.tile.PREFETCHES_TILE
    IN_TURN: gl.constexpr = params.split.held is not None
    number = gl.to_tensor(0)
    kv_state = kv.start()
    stage = gl.to_tensor(q_stage_of(params, CONSUMER))
    q_state = PipelineState(stage, gl.to_tensor(0), params.stages.Q_STAGES)
    q_full_state = PipelineState(stage, gl.to_tensor(0), q.full.shape[0])
    scheduler_state = PipelineState.start(SCHEDULER_STAGES)
    if CONSUMER == params.tile.CONSUMERS - 1:
        pingpong_arrive(params, CONSUMER)
    index = scheduler.get_current_work(gl.program_id(0) - gl.num_programs(0), scheduler_state)
    if PREFETCHES:
        tile, split = current_work_tile(params, scheduler, index, scheduler_state)
    while index < scheduler.count:
        hulls = current_hulls(params, scheduler, scheduler_state, CONSUMER)
        if not PREFETCHES:
            tile, split = current_work_tile(params, scheduler, index, scheduler_state)
        if IN_TURN:
            turn = turn_of(params, tile, number)
            split = turn.part
        else:
            turn = None
        row = tile.row + CONSUMER * ROWS
        program_blocks = program_n_block_range(params, tile, split, hulls)
        blocks = consumer_n_block_range(params, tile, row, program_blocks, hulls)
        place = q_state.index if params.tile.OUT_IN_Q else gl.to_tensor(CONSUMER)
        v_factor = value_factor(params, tile) if IS_FP8 or CONVERTS else gl.to_tensor(1.0)
        if IS_FP8:
            factors = score_factors(params, tile)
        elif CONVERTS:
            factors = score_factors_of(params, tile)
        else:
            factors = (params.mods.scale_log2, params.mods.softcap_scale, params.mods.unit)
        q.consumer_wait(q.barrier_state(q_state, q_full_state))
        if n_block_count(params, blocks) > 0:
            kv_state = skip(kv, kv_state, program_blocks.end - blocks.end, params, CONSUMER)
            if IS_FP8:
                sums = outputs.sums.index(CONSUMER)
                rest, m_M, l_ML, kv_state = mainloop_fp8(
                    q, kv, sums, q_state, kv_state, blocks, params, tile, row, factors, CONSUMER
                )
                if PREFETCHES:
                    # Meanwhile the last product runs.
                    scheduler_state = scheduler_state.next()
                    index, next_tile = next_work_tile(params, scheduler, index, scheduler_state)
                acc = finish_fp8(q, kv, sums, q_state, kv_state, rest, m_M, blocks, params)
                kv_state = kv_state.after_values()
            else:
                acc, m_M, l_ML, kv_state = mainloop(
                    q, kv, q_state, kv_state, blocks, params, tile, row, factors, CONSUMER
                )
            if IN_TURN:  # noqa: SIM102  (known when compiling, and `and` is not)
                # All its parts share the queries.
                if turn.is_last:
                    release_queries(q, q_state, params)
            l_M = gl.sum(l_ML, 1)
            kv_state = skip(kv, kv_state, blocks.begin - program_blocks.begin, params, CONSUMER)
            row_layout: gl.constexpr = gl.SliceLayout(1, acc[0].type.layout)
            m_M = gl.convert_layout(m_M, row_layout)
            l_M = gl.convert_layout(l_M, row_layout)
            store_rows(
                outputs, acc, m_M, l_M, tile, row, split, params, place, v_factor, turn, CONSUMER
            )
            if PREFETCHES:
                tile = next_tile
        else:
            kv_state = skip_all(
                kv, kv_state, n_block_count(params, program_blocks), params, CONSUMER
            )
            if not params.tile.OUT_IN_Q:
                if IN_TURN:
                    if turn.is_last:
                        q.consumer_release(q_state)
                else:
                    q.consumer_release(q_state)
            if query_position(params, row) < tile.seq.stored_q:
                zeros = no_output(kv.v, params)
                store_empty(
                    outputs, zeros, tile, row, split, params, place, v_factor, turn, CONSUMER
                )
            if PREFETCHES:
                scheduler_state = scheduler_state.next()
                index, tile = next_work_tile(params, scheduler, index, scheduler_state)
        if IN_TURN:
            if turn.is_last:
                if params.tile.OUT_IN_Q:
                    tma.store_wait(0)
                    q.consumer_release(q_state)
                q_state = q_state.ahead(params.tile.CONSUMERS)
                q_full_state = q_full_state.ahead(params.tile.CONSUMERS)
        else:
            if params.tile.OUT_IN_Q:
                tma.store_wait(0)
                q.consumer_release(q_state)
            q_state = q_state.ahead(params.tile.CONSUMERS)
            q_full_state = q_full_state.ahead(params.tile.CONSUMERS)
        if not PREFETCHES:
            scheduler_state = scheduler_state.next()
            next_index = scheduler.get_current_work(index, scheduler_state)
            if IN_TURN:
                if scheduler.tile_counter is None:
                    next_index = gl.where(turn.is_last, next_index, index)
                number = gl.where(turn.is_last, 0, number + 1)
            index = next_index
    tma.store_wait(0)
