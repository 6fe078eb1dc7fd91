"""Attention forward: one producer warp, and consumer warpgroups of 64 query rows each.

B batch, H query head, M query rows, N keys, D qk dim, E v dim, L lanes that share a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
)

from heedful.kernels.args import HopperIO, HopperParams
from heedful.kernels.hopper.block_range import (
    consumer_n_block_range,
    n_block_at,
    n_block_count,
    program_n_block_range,
)
from heedful.kernels.hopper.epilogue import Outputs, store_empty, store_rows
from heedful.kernels.hopper.kv_pipeline import KVPipeline
from heedful.kernels.hopper.mainloop import mainloop
from heedful.kernels.hopper.mma import ROWS, no_output
from heedful.kernels.hopper.pingpong import pingpong_arrive, skip, skip_all
from heedful.kernels.hopper.pipeline import Pipeline, PipelineState, allocate_boxes
from heedful.kernels.hopper.sequences import (
    load_keys,
    load_keys_and_values,
    queries_at,
    query_position,
)
from heedful.kernels.hopper.tile_scheduler import (
    SCHEDULER_STAGES,
    TileScheduler,
    commit_work_tile,
    current_work_tile,
    work_tile_at,
)


@gluon.jit
def q_stage_of(params, place: gl.constexpr):
    """Which consumer's queries come in this place, and the other way round: with ping-pong by
    number, else those that see the last key tile first."""
    return place if params.tile.PINGPONG else params.tile.CONSUMERS - 1 - place


@gluon.jit
def producer(io: HopperIO, q, kv, scheduler, params: HopperParams):
    """Feeds every tile's queries, and its keys and values from the last to the first."""
    q_state = PipelineState.start(params.stages.Q_STAGES)
    q_full_state = PipelineState.start(q.full.shape[0])
    kv_state = kv.start()
    k_rows = params.kv_rows.k_rows
    v_rows = params.kv_rows.v_rows
    scheduler_state = PipelineState.start(SCHEDULER_STAGES)
    index = gl.program_id(0)
    while index < scheduler.count:
        tile, split = work_tile_at(params, scheduler, index)
        commit_work_tile(params, scheduler, index, tile, split, scheduler_state)
        scheduler_state = scheduler_state.next()
        blocks = program_n_block_range(params, tile, split)
        steps = n_block_count(params, blocks)
        col = n_block_at(params, blocks, 0) * params.tile.BLOCK_N
        # Keys run one tile ahead of values, as the consumers take them.
        if steps > 0:
            load_keys(kv.k, io.k, params, tile, k_rows, col, kv_state.k)
            kv_state = kv_state.after_keys()
        for place in gl.static_range(params.tile.CONSUMERS):
            row = tile.row + q_stage_of(params, place) * ROWS
            q.load(io.q, queries_at(params, tile, row), q_state, q_full_state)
            q_state = q_state.next()
            q_full_state = q_full_state.next()
        for step in range(1, steps):
            next_col = n_block_at(params, blocks, step) * params.tile.BLOCK_N
            load_keys_and_values(kv, io.k, io.v, params, tile, next_col, col, kv_state)
            kv_state = kv_state.next()
            col = next_col
        if steps > 0:
            load_keys(kv.v, io.v, params, tile, v_rows, col, kv_state.values())
            kv_state = kv_state.after_values()
        index = scheduler.advance(index)
    scheduler.producer_commit((scheduler.count,), scheduler_state)


@gluon.jit
def consumer(outputs, q, kv, scheduler, params, CONSUMER: gl.constexpr):
    """Computes rows [64 CONSUMER, 64 CONSUMER + 64) of every tile of this program."""
    E: gl.constexpr = kv.v.dim
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    kv_state = kv.start()
    q_state = PipelineState(
        gl.to_tensor(q_stage_of(params, CONSUMER)), gl.to_tensor(0), params.stages.Q_STAGES
    )
    q_full_state = PipelineState(
        gl.to_tensor(q_stage_of(params, CONSUMER)), gl.to_tensor(0), q.full.shape[0]
    )
    scheduler_state = PipelineState.start(SCHEDULER_STAGES)
    if CONSUMER == params.tile.CONSUMERS - 1:
        pingpong_arrive(params, CONSUMER)
    index = scheduler.get_current_work(gl.program_id(0) - gl.num_programs(0), scheduler_state)
    while index < scheduler.count:
        tile, split = current_work_tile(params, scheduler, index, scheduler_state)
        row = tile.row + CONSUMER * ROWS
        program_blocks = program_n_block_range(params, tile, split)
        blocks = consumer_n_block_range(params, tile, row, program_blocks)
        place = q_state.index if params.tile.OUT_IN_Q else gl.to_tensor(CONSUMER)
        q.consumer_wait(q.barrier_state(q_state, q_full_state))
        if n_block_count(params, blocks) > 0:
            kv_state = skip(kv, kv_state, program_blocks.end - blocks.end, params, CONSUMER)
            acc, m_M, l_M, kv_state = mainloop(
                q, kv, q_state, kv_state, blocks, params, tile, row, CONSUMER
            )
            kv_state = skip(kv, kv_state, blocks.begin - program_blocks.begin, params, CONSUMER)
            m_M = gl.convert_layout(m_M, row_layout)
            l_M = gl.convert_layout(l_M, row_layout)
            store_rows(outputs, acc, m_M, l_M, tile, row, split, params, place)
        else:
            kv_state = skip_all(
                kv, kv_state, n_block_count(params, program_blocks), params, CONSUMER
            )
            if not params.tile.OUT_IN_Q:
                q.consumer_release(q_state)
            if query_position(params, row) < tile.stored_q:
                store_empty(outputs, no_output(kv.v), tile, row, split, params, place)
        if params.tile.OUT_IN_Q:
            tma.store_wait(0)
            q.consumer_release(q_state)
        q_state = q_state.ahead(params.tile.CONSUMERS)
        q_full_state = q_full_state.ahead(params.tile.CONSUMERS)
        scheduler_state = scheduler_state.next()
        index = scheduler.get_current_work(index, scheduler_state)
    tma.store_wait(0)


@gluon.jit
def forward(io: HopperIO, params: HopperParams):
    """out = softmax(scale q k^T + score mods + mask) v over (batch, head, row, dim) tensor maps.
    What a call lacks is None."""
    CONSUMERS: gl.constexpr = params.tile.CONSUMERS
    TAIL_D: gl.constexpr = params.tile.TAIL_D
    TAIL_E: gl.constexpr = params.tile.TAIL_E
    SHARES: gl.constexpr = params.stages.KV_SHARE_STAGES
    K_STAGES: gl.constexpr = params.stages.K_STAGES
    V_STAGES: gl.constexpr = params.stages.V_STAGES
    q = Pipeline.allocate(io.q, params.stages.Q_STAGES, 1, TAIL_D, CONSUMERS)
    if params.kv.table is None:
        k = Pipeline.allocate(io.k, K_STAGES, CONSUMERS, TAIL_D)
        if SHARES:
            gl.static_assert(K_STAGES == V_STAGES and not TAIL_E)
            v = Pipeline.beside(io.v, k)
        else:
            v = Pipeline.allocate(io.v, V_STAGES, CONSUMERS, TAIL_E)
    else:
        gl.static_assert(not SHARES)
        D: gl.constexpr = io.q.block_type.shape[-1]
        E: gl.constexpr = io.out.block_type.shape[-1]
        k = Pipeline.of_tiles(io.k.dtype, params.tile.BLOCK_N, D, K_STAGES, CONSUMERS)
        v = Pipeline.of_tiles(io.v.dtype, params.tile.BLOCK_N, E, V_STAGES, CONSUMERS)
    kv = KVPipeline.of(k, v, SHARES, params.tile.RESCALE == "speculative")
    o = None
    o_tails = None
    if params.tile.OUT_IN_Q:
        o = q.boxes
        if TAIL_E:
            o_tails = q.tails
    elif params.split.partials is None:
        each: gl.constexpr = kv.v.dim // io.out.block_type.shape[-1]
        o = allocate_boxes(io.out, each * CONSUMERS)
        if TAIL_E:
            o_tails = allocate_boxes(io.out, CONSUMERS)
    scheduler = TileScheduler.of(params)
    fence_async_shared()
    outputs = Outputs(io.out, o, o_tails, io.lse)
    CONSUMER_REGS: gl.constexpr = params.tile.CONSUMER_REGS
    PRODUCER_REGS: gl.constexpr = params.tile.PRODUCER_REGS
    # A partition is compiled on its own, so that each consumer must be spelled out.
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (consumer, (outputs, q, kv, scheduler, params, 0)),
                (producer, (io, q, kv, scheduler, params)),
            ],
            [1],
            [PRODUCER_REGS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consumer, (outputs, q, kv, scheduler, params, 0)),
                (consumer, (outputs, q, kv, scheduler, params, 1)),
                (producer, (io, q, kv, scheduler, params)),
            ],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (consumer, (outputs, q, kv, scheduler, params, 0)),
                (consumer, (outputs, q, kv, scheduler, params, 1)),
                (consumer, (outputs, q, kv, scheduler, params, 2)),
                (producer, (io, q, kv, scheduler, params)),
            ],
            [4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (outputs, q, kv, scheduler, params, 0)),
                (consumer, (outputs, q, kv, scheduler, params, 1)),
                (consumer, (outputs, q, kv, scheduler, params, 2)),
                (consumer, (outputs, q, kv, scheduler, params, 3)),
                (producer, (io, q, kv, scheduler, params)),
            ],
            [4, 4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )
