"""Attention forward: one producer warp, and consumer warpgroups of 64 query rows each.

B batch, H query head, M query rows, N keys, D qk dim, E v dim, L lanes that share a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
)

from heedful.kernels.hopper.block_range import (
    consumer_n_block_range,
    n_block_at,
    n_block_count,
    program_n_block_range,
)
from heedful.kernels.hopper.compat import HAS_INLINE_ASM
from heedful.kernels.hopper.dropout import Dropout
from heedful.kernels.hopper.epilogue import Outputs, store_empty, store_rows
from heedful.kernels.hopper.kv_pipeline import KVPipeline
from heedful.kernels.hopper.mainloop import mainloop
from heedful.kernels.hopper.mma import ROWS, no_output
from heedful.kernels.hopper.pingpong import pingpong_arrive, skip, skip_all
from heedful.kernels.hopper.pipeline import Pipeline, PipelineState, allocate_boxes
from heedful.kernels.hopper.score_mods import ScoreMods
from heedful.kernels.hopper.sequences import (
    Storage,
    load_keys,
    load_keys_and_values,
    queries_at,
    query_position,
)
from heedful.kernels.hopper.shape import Shape
from heedful.kernels.hopper.tile_scheduler import (
    SCHEDULER_STAGES,
    TileScheduler,
    commit_work_tile,
    count_work_tiles,
    current_work_tile,
    work_tile_at,
)


@gluon.jit
def q_stage_of(shape, place: gl.constexpr):
    """Which consumer's queries come in this place, and the other way round: with ping-pong by
    number, else those that see the last key tile first."""
    return place if shape.PINGPONG else shape.CONSUMERS - 1 - place


@gluon.jit
def producer(q_desc, k_desc, v_desc, q, kv, scheduler, shape):
    """Feeds every tile's queries, and its keys and values from the last to the first."""
    q_state = PipelineState.start(shape.Q_STAGES)
    q_full_state = PipelineState.start(q.full.shape[0])
    kv_state = kv.start()
    k_rows = shape.storage.k_rows
    v_rows = shape.storage.v_rows
    scheduler_state = PipelineState.start(SCHEDULER_STAGES)
    index = gl.program_id(0)
    while index < scheduler.count:
        tile, split = work_tile_at(shape, index)
        commit_work_tile(shape, scheduler, index, tile, split, scheduler_state)
        scheduler_state = scheduler_state.next()
        blocks = program_n_block_range(shape, tile, split)
        steps = n_block_count(shape, blocks)
        col = n_block_at(shape, blocks, 0) * shape.BLOCK_N
        # Keys run one tile ahead of values, as the consumers take them.
        if steps > 0:
            load_keys(kv.k, k_desc, shape, tile, k_rows, col, kv_state.k)
            kv_state = kv_state.after_keys()
        for place in gl.static_range(shape.CONSUMERS):
            row = tile.row + q_stage_of(shape, place) * ROWS
            q.load(q_desc, queries_at(shape, tile, row), q_state, q_full_state)
            q_state = q_state.next()
            q_full_state = q_full_state.next()
        for step in range(1, steps):
            next_col = n_block_at(shape, blocks, step) * shape.BLOCK_N
            load_keys_and_values(kv, k_desc, v_desc, shape, tile, next_col, col, kv_state)
            kv_state = kv_state.next()
            col = next_col
        if steps > 0:
            load_keys(kv.v, v_desc, shape, tile, v_rows, col, kv_state.values())
            kv_state = kv_state.after_values()
        index = scheduler.advance(index)
    scheduler.producer_commit((scheduler.count,), scheduler_state)


@gluon.jit
def consumer(outputs, q, kv, scheduler, shape, CONSUMER: gl.constexpr):
    """Computes rows [64 CONSUMER, 64 CONSUMER + 64) of every tile of this program."""
    E: gl.constexpr = kv.v.dim
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    kv_state = kv.start()
    q_state = PipelineState(
        gl.to_tensor(q_stage_of(shape, CONSUMER)), gl.to_tensor(0), shape.Q_STAGES
    )
    q_full_state = PipelineState(
        gl.to_tensor(q_stage_of(shape, CONSUMER)), gl.to_tensor(0), q.full.shape[0]
    )
    scheduler_state = PipelineState.start(SCHEDULER_STAGES)
    if CONSUMER == shape.CONSUMERS - 1:
        pingpong_arrive(shape, CONSUMER)
    index = scheduler.get_current_work(gl.program_id(0) - gl.num_programs(0), scheduler_state)
    while index < scheduler.count:
        tile, split = current_work_tile(shape, scheduler, index, scheduler_state)
        row = tile.row + CONSUMER * ROWS
        program_blocks = program_n_block_range(shape, tile, split)
        blocks = consumer_n_block_range(shape, tile, row, program_blocks)
        place = q_state.index if shape.OUT_IN_Q else gl.to_tensor(CONSUMER)
        q.consumer_wait(q.barrier_state(q_state, q_full_state))
        if n_block_count(shape, blocks) > 0:
            kv_state = skip(kv, kv_state, program_blocks.end - blocks.end, shape, CONSUMER)
            acc, m_M, l_M, kv_state = mainloop(
                q, kv, q_state, kv_state, blocks, shape, tile, row, CONSUMER
            )
            kv_state = skip(kv, kv_state, blocks.begin - program_blocks.begin, shape, CONSUMER)
            m_M = gl.convert_layout(m_M, row_layout)
            l_M = gl.convert_layout(l_M, row_layout)
            store_rows(outputs, acc, m_M, l_M, tile, row, split, shape, place)
        else:
            kv_state = skip_all(kv, kv_state, n_block_count(shape, program_blocks), shape, CONSUMER)
            if not shape.OUT_IN_Q:
                q.consumer_release(q_state)
            if query_position(shape, row) < tile.stored_q:
                store_empty(outputs, no_output(kv.v), tile, row, split, shape, place)
        if shape.OUT_IN_Q:
            tma.store_wait(0)
            q.consumer_release(q_state)
        q_state = q_state.ahead(shape.CONSUMERS)
        q_full_state = q_full_state.ahead(shape.CONSUMERS)
        scheduler_state = scheduler_state.next()
        index = scheduler.get_current_work(index, scheduler_state)
    tma.store_wait(0)


@gluon.constexpr_function
def _rescale(wanted, is_plain):
    """RESCALE of a variant: both votes are inline assembly, and speculation wants plain scores."""
    if not HAS_INLINE_ASM:
        return "exact"
    return "threshold" if wanted == "speculative" and not is_plain else wanted


@gluon.jit
def forward(
    q_desc,
    k_desc,
    v_desc,
    bias_ptr,
    alibi_ptr,
    sink_ptr,
    seed_ptr,
    cu_q,
    cu_k,
    varlen_tiles,
    tile_counter,
    used_q,
    used_k,
    leftpad_k,
    kv_batch_idx,
    block_table,
    out_desc,
    lse_ptr,
    partial_ptr,
    scale_log2,
    softcap_scale,
    per_unit,
    drop_threshold,
    drop_scale,
    origin_b,
    origin_h,
    origin_m,
    origin_n,
    stride_biasb,
    stride_biash,
    stride_biasm,
    stride_biasn,
    stride_alibib,
    stride_table,
    k_rows,
    v_rows,
    page_size,
    entries,
    dim_v,
    packed_heads,
    heads,
    group,
    seqlen_q,
    seqlen_k,
    total_q,
    longest_k,
    row_blocks,
    tiles,
    l2_heads,
    l2_groups,
    left,
    right,
    shift,
    align,
    first,
    splits,
    BLOCK_N: gl.constexpr,
    TAIL_D: gl.constexpr,
    TAIL_E: gl.constexpr,
    PACK_GQA: gl.constexpr,
    CONSUMERS: gl.constexpr,
    Q_STAGES: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    KV_SHARE_STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
    OUT_IN_Q: gl.constexpr,
    PINGPONG: gl.constexpr,
    RESCALE: gl.constexpr,
    IS_RIGHT: gl.constexpr,
    IS_LEFT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    IS_RAGGED: gl.constexpr,
    NO_PAGE: gl.constexpr,
):
    """out = softmax(scale q k^T + score mods + mask) v over (batch, head, row, dim) tensor maps.

    TAIL_D, TAIL_E: whether a tile of queries or keys, of values or results is 192 columns.
    KV_SHARE_STAGES: see kv_pipeline.py.
    RESCALE: "exact" moves a row's maximum with every tile; "threshold" looks at scores first,
    "speculative" at sums afterwards. What a call lacks is None. partial_ptr: split-KV partials of
    each of `splits` splits, which then go there and to an lse with a leading split, and `out` is
    left alone.
    """
    storage = Storage(
        used_q,
        used_k,
        leftpad_k,
        kv_batch_idx,
        block_table,
        stride_table,
        page_size,
        entries,
        k_rows,
        v_rows,
        IS_RAGGED,
        NO_PAGE,
    )
    score_mods = ScoreMods(
        alibi_ptr,
        stride_alibib,
        bias_ptr,
        stride_biasb,
        stride_biash,
        stride_biasm,
        stride_biasn,
        per_unit,
        longest_k,
    )
    # Speculation may need scores again: cheap to have only where nothing is loaded for them, and
    # seldom only where they do not grow from tile to tile, as ALiBi makes them up to the diagonal.
    ALIKE: gl.constexpr = bias_ptr is None and alibi_ptr is None
    PLAIN: gl.constexpr = ALIKE and seed_ptr is None and not TAIL_D
    RESCALE_AS: gl.constexpr = _rescale(RESCALE, PLAIN)
    dropout = Dropout(seed_ptr, drop_threshold, drop_scale, origin_b, origin_h, origin_m, origin_n)
    if varlen_tiles is not None:
        tiles = gl.load(varlen_tiles) * heads
    shape = Shape(
        scale_log2,
        softcap_scale,
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
        first,
        splits,
        dim_v,
        packed_heads,
        cu_q,
        cu_k,
        varlen_tiles,
        storage,
        score_mods,
        dropout,
        BLOCK_N,
        PACK_GQA,
        CONSUMERS,
        Q_STAGES,
        OUT_IN_Q,
        PINGPONG,
        RESCALE_AS,
        IS_RIGHT,
        IS_LEFT,
        HAS_SOFTCAP,
    )
    q = Pipeline.allocate(q_desc, Q_STAGES, 1, TAIL_D, CONSUMERS)
    if block_table is None:
        k = Pipeline.allocate(k_desc, K_STAGES, CONSUMERS, TAIL_D)
        if KV_SHARE_STAGES:
            gl.static_assert(K_STAGES == V_STAGES and not TAIL_E)
            v = Pipeline.beside(v_desc, k)
        else:
            v = Pipeline.allocate(v_desc, V_STAGES, CONSUMERS, TAIL_E)
    else:
        gl.static_assert(not KV_SHARE_STAGES)
        D: gl.constexpr = q_desc.block_type.shape[-1]
        E: gl.constexpr = out_desc.block_type.shape[-1]
        k = Pipeline.of_tiles(k_desc.dtype, BLOCK_N, D, K_STAGES, CONSUMERS)
        v = Pipeline.of_tiles(v_desc.dtype, BLOCK_N, E, V_STAGES, CONSUMERS)
    kv = KVPipeline.of(k, v, KV_SHARE_STAGES, RESCALE_AS == "speculative")
    o = None
    o_tails = None
    if OUT_IN_Q:
        o = q.boxes
        if TAIL_E:
            o_tails = q.tails
    elif partial_ptr is None:
        each: gl.constexpr = kv.v.dim // out_desc.block_type.shape[-1]
        o = allocate_boxes(out_desc, each * CONSUMERS)
        if TAIL_E:
            o_tails = allocate_boxes(out_desc, CONSUMERS)
    scheduler = TileScheduler.of(count_work_tiles(shape), tile_counter, CONSUMERS)
    fence_async_shared()
    outputs = Outputs(out_desc, o, o_tails, lse_ptr, sink_ptr, partial_ptr)
    feed = (q_desc, k_desc, v_desc, q, kv, scheduler, shape)
    # A partition is compiled on its own, so that each consumer must be spelled out.
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(consumer, (outputs, q, kv, scheduler, shape, 0)), (producer, feed)],
            [1],
            [PRODUCER_REGS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consumer, (outputs, q, kv, scheduler, shape, 0)),
                (consumer, (outputs, q, kv, scheduler, shape, 1)),
                (producer, feed),
            ],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (consumer, (outputs, q, kv, scheduler, shape, 0)),
                (consumer, (outputs, q, kv, scheduler, shape, 1)),
                (consumer, (outputs, q, kv, scheduler, shape, 2)),
                (producer, feed),
            ],
            [4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (outputs, q, kv, scheduler, shape, 0)),
                (consumer, (outputs, q, kv, scheduler, shape, 1)),
                (consumer, (outputs, q, kv, scheduler, shape, 2)),
                (consumer, (outputs, q, kv, scheduler, shape, 3)),
                (producer, feed),
            ],
            [4, 4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )
