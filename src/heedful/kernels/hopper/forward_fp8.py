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

from heedful.kernels.hopper.block_range import n_block_range, visited_n_block, visits_last_second
from heedful.kernels.hopper.compat import reinterpret
from heedful.kernels.hopper.descale import Scales
from heedful.kernels.hopper.epilogue_fp8 import Outputs, store_rows
from heedful.kernels.hopper.kv_pipeline import KVPipeline
from heedful.kernels.hopper.mainloop_fp8 import finish, mainloop
from heedful.kernels.hopper.mma import ROWS
from heedful.kernels.hopper.pingpong import pingpong_arrive, skip, skip_all
from heedful.kernels.hopper.pipeline import Pipeline, PipelineState
from heedful.kernels.hopper.promotion import allocate_sums
from heedful.kernels.hopper.sequences import packed_keys_at, packed_rows_at
from heedful.kernels.hopper.shape_fp8 import Fp8Shape, values_at
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
    VTranspose,
    transpose_v,
    wait_for_v_t,
)


@gluon.jit
def producer(q_desc, k_desc, v_t_desc, q, kv, scheduler, transpose, shape):
    """Feeds every tile's queries, and its keys and values in the order of visits."""
    q_state = PipelineState.start(shape.Q_STAGES)
    kv_state = kv.start()
    scheduler_state = PipelineState.start(SCHEDULER_STAGES)
    index = gl.program_id(0)
    while index < scheduler.count:
        tile, split = work_tile_at(shape, index)
        commit_work_tile(shape, scheduler, index, tile, split, scheduler_state)
        scheduler_state = scheduler_state.next()
        blocks = n_block_range(shape, tile, tile.row, shape.CONSUMERS * ROWS)
        last_second = visits_last_second(shape, blocks)
        steps = blocks.end - blocks.begin
        col = visited_n_block(blocks, 0, last_second) * shape.BLOCK_N
        if steps > 0:
            kv.k.load(k_desc, packed_keys_at(shape, tile, col), kv_state.k)
            kv_state = kv_state.after_keys()
        for w in gl.static_range(shape.CONSUMERS):
            q.load(q_desc, packed_rows_at(shape, tile, tile.row + w * ROWS), q_state)
            q_state = q_state.next()
        for step in range(1, steps):
            is_first = (step == 1) | (last_second & (step == 2))
            wait_for_v_t(transpose, tile, col, is_first, shape.BLOCK_N)
            next_col = visited_n_block(blocks, step, last_second) * shape.BLOCK_N
            k_at, v_at = packed_keys_at(shape, tile, next_col), values_at(shape, tile, col)
            kv.load(k_desc, k_at, v_t_desc, v_at, kv_state)
            kv_state = kv_state.next()
            col = next_col
        if steps > 0:
            is_first = (steps == 1) | (last_second & (steps == 2))
            wait_for_v_t(transpose, tile, col, is_first, shape.BLOCK_N)
            kv.v.load(v_t_desc, values_at(shape, tile, col), kv_state.values())
            kv_state = kv_state.after_values()
        index = scheduler.advance(index)
    scheduler.producer_commit((scheduler.count,), scheduler_state)


@gluon.jit
def consumer(outputs, scales, all_sums, q, kv, scheduler, shape, CONSUMER: gl.constexpr):
    """Computes rows [64 CONSUMER, 64 CONSUMER + 64) of every tile of this program."""
    E: gl.constexpr = kv.v.rows
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 32])
    row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    kv_state = kv.start()
    q_state = PipelineState(gl.to_tensor(CONSUMER), gl.to_tensor(0), shape.Q_STAGES)
    sums = all_sums.index(CONSUMER)
    # Sums are done with when the output takes their place.
    o_smem = reinterpret(
        sums, outputs.desc.dtype, outputs.desc.block_type.shape, outputs.desc.layout
    )
    if CONSUMER == shape.CONSUMERS - 1:
        pingpong_arrive(shape, CONSUMER)
    scheduler_state = PipelineState.start(SCHEDULER_STAGES)
    index = scheduler.get_current_work(gl.program_id(0) - gl.num_programs(0), scheduler_state)
    if shape.PREFETCHES_TILE:
        tile, _ = current_work_tile(shape, scheduler, index, scheduler_state)
    while index < scheduler.count:
        if not shape.PREFETCHES_TILE:
            tile, _ = current_work_tile(shape, scheduler, index, scheduler_state)
        row = tile.row + CONSUMER * ROWS
        program_blocks = n_block_range(shape, tile, tile.row, shape.CONSUMERS * ROWS)
        blocks = n_block_range(shape, tile, row, ROWS)
        factors = scales.of_scores(tile, shape.HAS_SOFTCAP)
        v_scale = scales.of_values(tile)
        q.consumer_wait(q_state)
        if blocks.end > blocks.begin:
            kv_state = skip(kv, kv_state, program_blocks.end - blocks.end, shape, CONSUMER)
            last_second = visits_last_second(shape, program_blocks)
            rest, m_M, l_ML, kv_state = mainloop(
                q,
                kv,
                sums,
                q_state,
                kv_state,
                blocks,
                last_second,
                shape,
                tile,
                row,
                factors,
                CONSUMER,
            )
            if shape.PREFETCHES_TILE:
                # The last product runs meanwhile.
                scheduler_state = scheduler_state.next()
                index, next_tile = next_work_tile(shape, scheduler, index, scheduler_state)
            acc_ME = finish(q, kv, sums, q_state, kv_state, rest, m_M, blocks, shape)
            l_M = gl.sum(l_ML, 1)
            kv_state = kv_state.after_values()
            kv_state = skip(kv, kv_state, blocks.begin - program_blocks.begin, shape, CONSUMER)
            m_M = gl.convert_layout(m_M, row_layout)
            l_M = gl.convert_layout(l_M, row_layout)
            store_rows(outputs, o_smem, acc_ME, m_M, l_M, tile, row, shape, v_scale)
            if shape.PREFETCHES_TILE:
                tile = next_tile
        else:
            kv_state = skip_all(
                kv, kv_state, program_blocks.end - program_blocks.begin, shape, CONSUMER
            )
            q.consumer_release(q_state)
            if row < tile.len_q:
                none_M = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
                zero_M = gl.zeros([ROWS], gl.float32, row_layout)
                zero_ME = gl.zeros([ROWS, E], gl.float32, o_layout)
                store_rows(outputs, o_smem, zero_ME, none_M, zero_M, tile, row, shape, v_scale)
            if shape.PREFETCHES_TILE:
                scheduler_state = scheduler_state.next()
                index, tile = next_work_tile(shape, scheduler, index, scheduler_state)
        q_state = q_state.ahead(shape.CONSUMERS)
        if not shape.PREFETCHES_TILE:
            scheduler_state = scheduler_state.next()
            index = scheduler.get_current_work(index, scheduler_state)
    tma.store_wait(0)


@gluon.jit
def forward(
    q_desc,
    k_desc,
    v_t_desc,
    q_descale,
    k_descale,
    v_descale,
    sink_ptr,
    cu_q,
    cu_k,
    varlen_tiles,
    tile_counter,
    v_desc,
    v_t,
    v_t_counts,
    out_desc,
    lse_ptr,
    scale_log2,
    softcap_scale,
    stride_qdb,
    stride_qdh,
    stride_kdb,
    stride_kdh,
    stride_vdb,
    stride_vdh,
    heads,
    group,
    seqlen_q,
    seqlen_k,
    total_q,
    row_blocks,
    tiles,
    l2_heads,
    l2_groups,
    left,
    right,
    shift,
    align,
    heads_k,
    dim_v,
    padded_k,
    v_tiles,
    BLOCK_N: gl.constexpr,
    CONSUMERS: gl.constexpr,
    Q_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
    PROMOTION_INTERVAL: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
    RESCALE: gl.constexpr,
    VOTES_LAST: gl.constexpr,
    PREFETCHES_TILE: gl.constexpr,
    SUMS_IN_REGS: gl.constexpr,
    PINGPONG: gl.constexpr,
    TRANSPOSES_V: gl.constexpr,
    IS_RIGHT: gl.constexpr,
    IS_LEFT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
):
    """out = softmax(scale q k^T + mask) v over tensor maps (batch, head, row, dim); of V
    transposed: (batch, head, dim, position)."""
    if varlen_tiles is not None:
        tiles = gl.load(varlen_tiles) * heads
    shape = Fp8Shape(
        heads,
        group,
        seqlen_q,
        seqlen_k,
        total_q,
        row_blocks,
        tiles,
        l2_heads,
        l2_groups,
        left,
        right,
        shift,
        align,
        cu_q,
        cu_k,
        varlen_tiles,
        BLOCK_N,
        CONSUMERS,
        Q_STAGES,
        PROMOTION_INTERVAL,
        RESCALE,
        VOTES_LAST,
        PREFETCHES_TILE,
        SUMS_IN_REGS,
        PINGPONG,
        IS_RIGHT,
        IS_LEFT,
        HAS_SOFTCAP,
    )
    scales = Scales(
        scale_log2,
        softcap_scale,
        q_descale,
        k_descale,
        v_descale,
        stride_qdb,
        stride_qdh,
        stride_kdb,
        stride_kdh,
        stride_vdb,
        stride_vdh,
    )
    # Each consumer has stages of its own, see `pipeline.full_barriers`.
    gl.static_assert(Q_STAGES % CONSUMERS == 0)
    q = Pipeline.allocate(q_desc, Q_STAGES, 1)
    # At D256 keys are looked at no more once their scores are there, and memory holds two stages:
    # too few to keep keys as long as values.
    k = Pipeline.allocate(k_desc, STAGES, CONSUMERS)
    SPECULATIVE: gl.constexpr = RESCALE == "speculative"
    if SPECULATIVE:
        v = Pipeline.beside(v_t_desc, k)
    else:
        v = Pipeline.allocate(v_t_desc, STAGES, CONSUMERS)
    kv = KVPipeline.of(k, v, SPECULATIVE, SPECULATIVE)
    kept: gl.constexpr = out_desc.dtype if SUMS_IN_REGS else gl.float32
    sums = allocate_sums(CONSUMERS, kv.v.rows, kept)
    scheduler = TileScheduler.of(shape.tiles, tile_counter, CONSUMERS)
    outputs = Outputs(out_desc, lse_ptr, sink_ptr)
    transpose: gl.constexpr = None
    if TRANSPOSES_V:
        l2_heads_k = gl.maximum(l2_heads // group, 1)
        l2_groups_k = l2_heads * l2_groups // group // l2_heads_k
        sizes = (heads_k, l2_heads_k, l2_groups_k, dim_v, padded_k, v_tiles)
        transpose = VTranspose(v_t, v_t_counts, *sizes, kv.v.rows)
        raw = Pipeline.allocate(v_desc, RAW_STAGES, 1)
    feed = (q_desc, k_desc, v_t_desc, q, kv, scheduler, transpose, shape)
    fence_async_shared()
    # A partition is compiled on its own, so that each consumer must be spelled out.
    if CONSUMERS == 2:
        gl.warp_specialize(
            (
                (consumer, (outputs, scales, sums, q, kv, scheduler, shape, 0)),
                (consumer, (outputs, scales, sums, q, kv, scheduler, shape, 1)),
                (producer, feed),
            )
            + (((transpose_v, (v_desc, transpose, raw)),) if TRANSPOSES_V else ()),
            (4, 1) + ((TRANSPOSE_WARPS,) if TRANSPOSES_V else ()),
            (CONSUMER_REGS, PRODUCER_REGS) + ((PRODUCER_REGS,) if TRANSPOSES_V else ()),
        )
    else:
        gl.warp_specialize(
            (
                (consumer, (outputs, scales, sums, q, kv, scheduler, shape, 0)),
                (consumer, (outputs, scales, sums, q, kv, scheduler, shape, 1)),
                (consumer, (outputs, scales, sums, q, kv, scheduler, shape, 2)),
                (producer, feed),
            )
            + (((transpose_v, (v_desc, transpose, raw)),) if TRANSPOSES_V else ()),
            (4, 4, 1) + ((TRANSPOSE_WARPS,) if TRANSPOSES_V else ()),
            (CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS)
            + ((PRODUCER_REGS,) if TRANSPOSES_V else ()),
        )
