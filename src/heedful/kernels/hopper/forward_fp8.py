"""fp8 attention forward: e4m3 products, one producer warp, consumer warpgroups of 64 query rows.

The roles are those of forward.py. What differs: V comes transposed (transpose_v.py), P is rounded
to e4m3 in registers (softmax_fp8.py, speculative_softmax_fp8.py), and output sums leave the matrix
unit's accumulators, which keep some 14 bits, for float32 ones every PROMOTION_INTERVAL key tiles
(promotion.py).

B batch, H query head, G kv head, M query rows, N keys, D qk dim, E v dim, L lanes that share a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
)

from heedful.kernels.args import HopperIO, HopperParams, TransposeV
from heedful.kernels.hopper.block_range import n_block_range, visited_n_block, visits_last_second
from heedful.kernels.hopper.compat import reinterpret
from heedful.kernels.hopper.descale import score_factors, value_factor
from heedful.kernels.hopper.epilogue_fp8 import Outputs, store_rows
from heedful.kernels.hopper.kv_pipeline import KVPipeline
from heedful.kernels.hopper.mainloop_fp8 import finish, mainloop
from heedful.kernels.hopper.mma import ROWS
from heedful.kernels.hopper.pingpong import pingpong_arrive, skip, skip_all
from heedful.kernels.hopper.pipeline import Pipeline, PipelineState
from heedful.kernels.hopper.promotion import allocate_sums
from heedful.kernels.hopper.sequences import packed_keys_at, packed_rows_at, values_at
from heedful.kernels.hopper.tile_scheduler import (
    SCHEDULER_STAGES,
    TileScheduler,
    commit_work_tile,
    current_work_tile,
    next_work_tile,
    work_tile_at,
)
from heedful.kernels.hopper.transpose_v import (
    RAW_STAGES,
    TRANSPOSE_WARPS,
    transpose_v,
    wait_for_v_t,
)


@gluon.jit
def producer(io: HopperIO, q, kv, scheduler, transpose: TransposeV, params: HopperParams):
    """Feeds every tile's queries, and its keys and values in the order of visits."""
    q_state = PipelineState.start(params.stages.Q_STAGES)
    kv_state = kv.start()
    scheduler_state = PipelineState.start(SCHEDULER_STAGES)
    index = gl.program_id(0)
    while index < scheduler.count:
        tile, split = work_tile_at(params, scheduler, index)
        commit_work_tile(params, scheduler, index, tile, split, scheduler_state)
        scheduler_state = scheduler_state.next()
        blocks = n_block_range(params, tile, tile.row, params.tile.CONSUMERS * ROWS)
        last_second = visits_last_second(params, blocks)
        steps = blocks.end - blocks.begin
        col = visited_n_block(blocks, 0, last_second) * params.tile.BLOCK_N
        if steps > 0:
            kv.k.load(io.k, packed_keys_at(params, tile, col), kv_state.k)
            kv_state = kv_state.after_keys()
        for w in gl.static_range(params.tile.CONSUMERS):
            q.load(io.q, packed_rows_at(params, tile, tile.row + w * ROWS), q_state)
            q_state = q_state.next()
        for step in range(1, steps):
            is_first = (step == 1) | (last_second & (step == 2))
            wait_for_v_t(transpose, tile, col, is_first, params.tile.BLOCK_N)
            next_col = visited_n_block(blocks, step, last_second) * params.tile.BLOCK_N
            k_at, v_at = packed_keys_at(params, tile, next_col), values_at(params, tile, col)
            kv.load(io.k, k_at, io.v, v_at, kv_state)
            kv_state = kv_state.next()
            col = next_col
        if steps > 0:
            is_first = (steps == 1) | (last_second & (steps == 2))
            wait_for_v_t(transpose, tile, col, is_first, params.tile.BLOCK_N)
            kv.v.load(io.v, values_at(params, tile, col), kv_state.values())
            kv_state = kv_state.after_values()
        index = scheduler.advance(index)
    scheduler.producer_commit((scheduler.count,), scheduler_state)


@gluon.jit
def consumer(outputs, all_sums, q, kv, scheduler, params, CONSUMER: gl.constexpr):
    """Computes rows [64 CONSUMER, 64 CONSUMER + 64) of every tile of this program."""
    E: gl.constexpr = kv.v.rows
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 32])
    row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    kv_state = kv.start()
    q_state = PipelineState(gl.to_tensor(CONSUMER), gl.to_tensor(0), params.stages.Q_STAGES)
    sums = all_sums.index(CONSUMER)
    # Sums are done with when the output takes their place.
    o_smem = reinterpret(
        sums, outputs.desc.dtype, outputs.desc.block_type.shape, outputs.desc.layout
    )
    if CONSUMER == params.tile.CONSUMERS - 1:
        pingpong_arrive(params, CONSUMER)
    scheduler_state = PipelineState.start(SCHEDULER_STAGES)
    index = scheduler.get_current_work(gl.program_id(0) - gl.num_programs(0), scheduler_state)
    if params.fp8.PREFETCHES_TILE:
        tile, _ = current_work_tile(params, scheduler, index, scheduler_state)
    while index < scheduler.count:
        if not params.fp8.PREFETCHES_TILE:
            tile, _ = current_work_tile(params, scheduler, index, scheduler_state)
        row = tile.row + CONSUMER * ROWS
        program_blocks = n_block_range(params, tile, tile.row, params.tile.CONSUMERS * ROWS)
        blocks = n_block_range(params, tile, row, ROWS)
        factors = score_factors(params, tile)
        v_scale = value_factor(params, tile)
        q.consumer_wait(q_state)
        if blocks.end > blocks.begin:
            kv_state = skip(kv, kv_state, program_blocks.end - blocks.end, params, CONSUMER)
            last_second = visits_last_second(params, program_blocks)
            rest, m_M, l_ML, kv_state = mainloop(
                q,
                kv,
                sums,
                q_state,
                kv_state,
                blocks,
                last_second,
                params,
                tile,
                row,
                factors,
                CONSUMER,
            )
            if params.fp8.PREFETCHES_TILE:
                # The last product runs meanwhile.
                scheduler_state = scheduler_state.next()
                index, next_tile = next_work_tile(params, scheduler, index, scheduler_state)
            acc_ME = finish(q, kv, sums, q_state, kv_state, rest, m_M, blocks, params)
            l_M = gl.sum(l_ML, 1)
            kv_state = kv_state.after_values()
            kv_state = skip(kv, kv_state, blocks.begin - program_blocks.begin, params, CONSUMER)
            m_M = gl.convert_layout(m_M, row_layout)
            l_M = gl.convert_layout(l_M, row_layout)
            store_rows(outputs, o_smem, acc_ME, m_M, l_M, tile, row, params, v_scale)
            if params.fp8.PREFETCHES_TILE:
                tile = next_tile
        else:
            kv_state = skip_all(
                kv, kv_state, program_blocks.end - program_blocks.begin, params, CONSUMER
            )
            q.consumer_release(q_state)
            if row < tile.len_q:
                none_M = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
                zero_M = gl.zeros([ROWS], gl.float32, row_layout)
                zero_ME = gl.zeros([ROWS, E], gl.float32, o_layout)
                store_rows(outputs, o_smem, zero_ME, none_M, zero_M, tile, row, params, v_scale)
            if params.fp8.PREFETCHES_TILE:
                scheduler_state = scheduler_state.next()
                index, tile = next_work_tile(params, scheduler, index, scheduler_state)
        q_state = q_state.ahead(params.tile.CONSUMERS)
        if not params.fp8.PREFETCHES_TILE:
            scheduler_state = scheduler_state.next()
            index = scheduler.get_current_work(index, scheduler_state)
    tma.store_wait(0)


@gluon.jit
def forward(io: HopperIO, params: HopperParams, transpose: TransposeV):
    """out = softmax(scale q k^T + mask) v over tensor maps (batch, head, row, dim); of V
    transposed: (batch, head, dim, position). transpose: None if another kernel did it ahead."""
    CONSUMERS: gl.constexpr = params.tile.CONSUMERS
    SPECULATIVE: gl.constexpr = params.tile.RESCALE == "speculative"
    # Each consumer has stages of its own, see `pipeline.full_barriers`.
    gl.static_assert(params.stages.Q_STAGES % CONSUMERS == 0)
    q = Pipeline.allocate(io.q, params.stages.Q_STAGES, 1)
    k = Pipeline.allocate(io.k, params.stages.K_STAGES, CONSUMERS)
    if params.stages.KV_SHARE_STAGES:
        v = Pipeline.beside(io.v, k)
    else:
        v = Pipeline.allocate(io.v, params.stages.V_STAGES, CONSUMERS)
    kv = KVPipeline.of(k, v, params.stages.KV_SHARE_STAGES, SPECULATIVE)
    kept: gl.constexpr = io.out.dtype if params.fp8.SUMS_IN_REGS else gl.float32
    sums = allocate_sums(CONSUMERS, kv.v.rows, kept)
    scheduler = TileScheduler.of(params)
    outputs = Outputs(io.out, io.lse)
    TRANSPOSES: gl.constexpr = transpose is not None
    if TRANSPOSES:
        raw = Pipeline.allocate(transpose.v, RAW_STAGES, 1)
    fence_async_shared()
    CONSUMER_REGS: gl.constexpr = params.tile.CONSUMER_REGS
    PRODUCER_REGS: gl.constexpr = params.tile.PRODUCER_REGS
    # A partition is compiled on its own, so that each consumer must be spelled out.
    if CONSUMERS == 2 and TRANSPOSES:
        gl.warp_specialize(
            [
                (consumer, (outputs, sums, q, kv, scheduler, params, 0)),
                (consumer, (outputs, sums, q, kv, scheduler, params, 1)),
                (producer, (io, q, kv, scheduler, transpose, params)),
                (transpose_v, (transpose, raw)),
            ],
            [4, 1, TRANSPOSE_WARPS],
            [CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consumer, (outputs, sums, q, kv, scheduler, params, 0)),
                (consumer, (outputs, sums, q, kv, scheduler, params, 1)),
                (producer, (io, q, kv, scheduler, transpose, params)),
            ],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
    elif TRANSPOSES:
        gl.warp_specialize(
            [
                (consumer, (outputs, sums, q, kv, scheduler, params, 0)),
                (consumer, (outputs, sums, q, kv, scheduler, params, 1)),
                (consumer, (outputs, sums, q, kv, scheduler, params, 2)),
                (producer, (io, q, kv, scheduler, transpose, params)),
                (transpose_v, (transpose, raw)),
            ],
            [4, 4, 1, TRANSPOSE_WARPS],
            [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (outputs, sums, q, kv, scheduler, params, 0)),
                (consumer, (outputs, sums, q, kv, scheduler, params, 1)),
                (consumer, (outputs, sums, q, kv, scheduler, params, 2)),
                (producer, (io, q, kv, scheduler, transpose, params)),
            ],
            [4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )
