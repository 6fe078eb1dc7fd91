"""The mainloop of one consumer of the Hopper backward: 64 keys, past which queries stream.

Scores are made transposed, so that P and dS are left operands from registers in dV and dK. dS goes
through shared memory for dQ alone, which each consumer makes a half of. The scores of a step are
made under dK and dQ of the step before, and its exponentials under these.

M query rows, N keys (64), D qk dim, E v dim.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from heedful.kernels.hopper import barrier
from heedful.kernels.hopper.backward_scores import (
    kept_probabilities,
    queued_probabilities,
    score_gradients,
)
from heedful.kernels.hopper.backward_shared import CONSUMERS, adders
from heedful.kernels.hopper.backward_sums import put_dq
from heedful.kernels.hopper.backward_tile import is_masked, visit_range
from heedful.kernels.hopper.compat import inline_asm, opaque
from heedful.kernels.hopper.mma import ROWS, scores_layout
from heedful.kernels.hopper.pairs import from_pairs, lane_place, store_pairs, to_pairs
from heedful.kernels.hopper.pipeline import PipelineState, matrix


@gluon.jit
def keys_of(boxes, CONSUMER: gl.constexpr):
    """One consumer's keys or values as (N, D). The compiler is not to know where they are: it would
    work out ahead of the loop what each product is told of it, and keep it in registers."""
    return matrix(boxes.index(opaque(gl.to_tensor(CONSUMER))), ROWS, boxes.shape[-1])


@gluon.jit
def queue_rows(boxes, ring, state, CONSUMER: gl.constexpr, BLOCK_M: gl.constexpr):
    """Starts k q^T or v do^T of one consumer's keys and a tile of queries."""
    layout: gl.constexpr = scores_layout(boxes.dtype, BLOCK_M)
    x_NM = gl.zeros([ROWS, BLOCK_M], gl.float32, layout)
    right = ring.tile(state).permute((1, 0))
    return warpgroup_mma(keys_of(boxes, CONSUMER), right, x_NM, use_acc=False, is_async=True)


@gluon.jit
def queue_dq(shared, ds_state, CONSUMER: gl.constexpr):
    """Starts one consumer's share of dQ: half of the columns, or of 128 queries the half of the
    rows."""
    M: gl.constexpr = shared.ds.shape[2]
    D: gl.constexpr = shared.k.shape[-1]
    COLS: gl.constexpr = D if M > ROWS else D // CONSUMERS
    layout: gl.constexpr = scores_layout(shared.k.dtype, COLS)
    dq = gl.zeros([ROWS, COLS], gl.float32, layout)
    for i in gl.static_range(CONSUMERS):
        left = shared.ds.index(i * ds_state.stages + ds_state.index)
        right = keys_of(shared.k, i)
        if M > ROWS:
            left = left.slice(CONSUMER * ROWS, ROWS, dim=1)
        else:
            right = right.slice(CONSUMER * COLS, COLS, dim=1)
        dq = warpgroup_mma(left.permute((1, 0)), right, dq, use_acc=i > 0, is_async=True)
    return dq


@gluon.jit
def stage_of(visit, stages: gl.constexpr):
    """Where a ring of a power of two stages is in a visit: all advance with each. One number takes
    less registers than a state of each ring."""
    return PipelineState(visit % stages, (visit // stages) & 1, stages)


@gluon.jit
def queue_dp(shared, visit, params, CONSUMER: gl.constexpr):
    """Starts a visit's dP."""
    do_state = stage_of(visit, params.tile.DO_STAGES)
    shared.do.consumer_wait(do_state)
    return queue_rows(shared.v, shared.do, do_state, CONSUMER, params.tile.BLOCK_M)


@gluon.jit
def first_probabilities(shared, visit, blocks, params, tile, number, CONSUMER: gl.constexpr):
    """What is queued of a work tile's first visit, and its dP."""
    BLOCK_M: gl.constexpr = params.tile.BLOCK_M
    dtype: gl.constexpr = shared.k.dtype
    q_state = stage_of(visit, params.tile.Q_STAGES)
    shared.q.consumer_wait(q_state)
    s_NM = queue_rows(shared.k, shared.q, q_state, CONSUMER, BLOCK_M)
    lse_M = shared.lse.index(q_state.index).load(gl.SliceLayout(0, scores_layout(dtype, BLOCK_M)))
    s_NM = warpgroup_mma_wait(0, deps=[s_NM])
    queued = queued_probabilities(s_NM, lse_M, blocks, params, tile, number, dtype, CONSUMER, True)
    dp_NM = queue_dp(shared, visit, params, CONSUMER)
    return queued, warpgroup_mma_wait(0, deps=[dp_NM])


@gluon.jit
def queue_dv(shared, queued, dp_NM, dv, visit, params, CONSUMER: gl.constexpr):
    """Starts a visit's dV, and makes its dS meanwhile, which is stored for dQ."""
    dtype: gl.constexpr = shared.k.dtype
    layout: gl.constexpr = dp_NM.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    do_state = stage_of(visit, params.tile.DO_STAGES)
    ds_state = stage_of(visit, params.tile.DS_STAGES)
    left = kept_probabilities(queued, params, dtype, operand)
    dv = warpgroup_mma(left, shared.do.tile(do_state), dv, is_async=True)
    delta_M = shared.delta.index(do_state.index).load(gl.SliceLayout(0, layout))
    ds_NM = score_gradients(queued, dp_NM, delta_M, params, dtype).to(dtype)
    # Who stores in this stage has waited for the other's dS of the visit before, which came behind
    # the other's dQ of the visit before that.
    shared.ds.index(CONSUMER * ds_state.stages + ds_state.index).store(ds_NM)
    fence_async_shared()
    barrier.arrive_each_warp(shared.ds_full.index(ds_state.index))
    return ds_NM, dv


@gluon.jit
def send_dq(shared, dq, visit, params, CONSUMER: gl.constexpr):
    """Hands a consumer's share of dQ to the warp that adds it."""
    ADDERS: gl.constexpr = adders(params)
    barrier.wait(shared.dq_empty.index(CONSUMER), (visit & 1) ^ 1)
    put_dq(dq, shared.dq.index(CONSUMER))
    barrier.arrive_each_warp(shared.dq_full.index(visit % ADDERS * CONSUMERS + CONSUMER))


@gluon.jit
def step(
    shared,
    visit,
    queued,
    dp_NM,
    dk,
    dv,
    blocks,
    params,
    tile,
    number,
    CONSUMER: gl.constexpr,
    MASKED: gl.constexpr,
):
    """One visit, whose probabilities and dP are there, and those of the next: that of this number
    in the work tile, which MASKED hides in part."""
    dtype: gl.constexpr = shared.k.dtype
    operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    q_state = stage_of(visit, params.tile.Q_STAGES)
    next_q = stage_of(visit + 1, params.tile.Q_STAGES)
    ds_state = stage_of(visit, params.tile.DS_STAGES)
    ds_NM, dv = queue_dv(shared, queued, dp_NM, dv, visit, params, CONSUMER)
    shared.q.consumer_wait(next_q)
    s_NM = queue_rows(shared.k, shared.q, next_q, CONSUMER, params.tile.BLOCK_M)
    dv = warpgroup_mma_wait(1, deps=[dv])
    shared.do.consumer_release_after_mma(stage_of(visit, params.tile.DO_STAGES))
    left = gl.convert_layout(ds_NM, operand)
    dk = warpgroup_mma(left, shared.q.tile(q_state), dk, is_async=True)
    lse_M = shared.lse.index(next_q.index).load(gl.SliceLayout(0, dp_NM.type.layout))
    s_NM = warpgroup_mma_wait(1, deps=[s_NM])
    queued = queued_probabilities(
        s_NM, lse_M, blocks, params, tile, number, dtype, CONSUMER, MASKED
    )
    barrier.wait(shared.ds_full.index(ds_state.index), ds_state.phase)
    dq = queue_dq(shared, ds_state, CONSUMER)
    dk = warpgroup_mma_wait(CONSUMERS, deps=[dk])
    shared.q.consumer_release_after_mma(q_state)
    dp_NM = queue_dp(shared, visit + 1, params, CONSUMER)
    dq = warpgroup_mma_wait(1, deps=[dq])
    send_dq(shared, dq, visit, params, CONSUMER)
    # What is under way at the end of a loop's turn would be copied, which takes waiting for it.
    dp_NM = warpgroup_mma_wait(0, deps=[dp_NM])
    return queued, dp_NM, dk, dv


@gluon.jit
def last_step(shared, visit, queued, dp_NM, dk, dv, params, CONSUMER: gl.constexpr):
    """The last visit of a work tile."""
    operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    q_state = stage_of(visit, params.tile.Q_STAGES)
    ds_state = stage_of(visit, params.tile.DS_STAGES)
    barrier.arrive_after_mma(shared.v_empty.index(0))
    ds_NM, dv = queue_dv(shared, queued, dp_NM, dv, visit, params, CONSUMER)
    dv = warpgroup_mma_wait(0, deps=[dv])
    shared.do.consumer_release_after_mma(stage_of(visit, params.tile.DO_STAGES))
    left = gl.convert_layout(ds_NM, operand)
    dk = warpgroup_mma(left, shared.q.tile(q_state), dk, is_async=True)
    barrier.wait(shared.ds_full.index(ds_state.index), ds_state.phase)
    dq = queue_dq(shared, ds_state, CONSUMER)
    dq, dk = warpgroup_mma_wait(0, deps=[dq, dk])
    shared.q.consumer_release_after_mma(q_state)
    send_dq(shared, dq, visit, params, CONSUMER)
    return dk, dv


@gluon.jit
def sync(params, CONSUMER: gl.constexpr):
    if params.tile.PINGPONG:
        TEXT: gl.constexpr = f"bar.sync {8 + CONSUMER}, 256;"
        inline_asm(TEXT, "~{memory}", [])


@gluon.jit
def arrive(params, CONSUMER: gl.constexpr):
    if params.tile.PINGPONG:
        TEXT: gl.constexpr = f"bar.arrive {9 - CONSUMER}, 256;"
        inline_asm(TEXT, "~{memory}", [])


@gluon.jit
def step_beside(
    shared,
    visit,
    queued,
    dk,
    dv,
    blocks,
    params,
    tile,
    number,
    lane,
    CONSUMER: gl.constexpr,
    MASKED: gl.constexpr,
    LAST: gl.constexpr,
):
    """One visit, whose probabilities are there, and those of the next; dQ is made elsewhere."""
    dtype: gl.constexpr = shared.k.dtype
    operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    layout: gl.constexpr = scores_layout(dtype, params.tile.BLOCK_M)
    q_state = stage_of(visit, params.tile.Q_STAGES)
    next_q = stage_of(visit + 1, params.tile.Q_STAGES)
    do_state = stage_of(visit, params.tile.DO_STAGES)
    ds_state = stage_of(visit, params.tile.DS_STAGES)
    dp_NM = queue_dp(shared, visit, params, CONSUMER)
    dp_NM = warpgroup_mma_wait(0, deps=[dp_NM])
    if LAST:
        barrier.arrive_after_mma(shared.v_empty.index(0))
    delta_M = shared.delta.index(do_state.index).load(gl.SliceLayout(0, layout))
    ds_NJ = to_pairs(score_gradients(queued, dp_NM, delta_M, params, dtype), dtype)
    left = kept_probabilities(queued, params, dtype, operand)
    dv = warpgroup_mma(left, shared.do.tile(do_state), dv, is_async=True)
    barrier.wait(shared.ds_empty.index(ds_state.index), ds_state.phase ^ 1)
    place = shared.ds.index(CONSUMER * ds_state.stages + ds_state.index)
    if params.tile.STORE == 1:
        store_pairs(place, ds_NJ, lane)
    else:
        place.store(from_pairs(ds_NJ, dtype, layout))
        if params.tile.STORE == 0:
            fence_async_shared()
        else:
            inline_asm("fence.proxy.async.shared::cta;", "~{memory}", [])
    barrier.arrive_each_warp(shared.ds_full.index(ds_state.index))
    if not LAST:
        shared.q.consumer_wait(next_q)
    EARLY: gl.constexpr = params.tile.ORDER == 2
    if not LAST and EARLY:
        s_NM = queue_rows(shared.k, shared.q, next_q, CONSUMER, params.tile.BLOCK_M)
        dv = warpgroup_mma_wait(1, deps=[dv])
    else:
        dv = warpgroup_mma_wait(0, deps=[dv])
    if not LAST and not EARLY:
        s_NM = queue_rows(shared.k, shared.q, next_q, CONSUMER, params.tile.BLOCK_M)
    shared.do.consumer_release_after_mma(do_state)
    left = from_pairs(ds_NJ, dtype, operand)
    dk = warpgroup_mma(left, shared.q.tile(q_state), dk, is_async=True)
    if not LAST:
        if params.tile.ORDER != 1:
            s_NM = warpgroup_mma_wait(1, deps=[s_NM])
        else:
            s_NM, dk = warpgroup_mma_wait(0, deps=[s_NM, dk])
            shared.q.consumer_release_after_mma(q_state)
        sync(params, CONSUMER)
        lse_M = shared.lse.index(next_q.index).load(gl.SliceLayout(0, layout))
        queued = queued_probabilities(
            s_NM, lse_M, blocks, params, tile, number, dtype, CONSUMER, MASKED
        )
        arrive(params, CONSUMER)
    if LAST or params.tile.ORDER != 1:
        dk = warpgroup_mma_wait(0, deps=[dk])
        shared.q.consumer_release_after_mma(q_state)
    return queued, dk, dv


@gluon.jit
def mainloop_beside(shared, visit, blocks, params, tile, CONSUMER: gl.constexpr):
    """dK and dV, not scaled, of one consumer's keys: of a work tile's visits, at least one.
    visit: how many came before, in all work tiles."""
    D: gl.constexpr = shared.k.shape[-1]
    E: gl.constexpr = shared.v.shape[-1]
    dtype: gl.constexpr = shared.k.dtype
    dk = gl.zeros([ROWS, D], gl.float32, scores_layout(dtype, D))
    dv = gl.zeros([ROWS, E], gl.float32, scores_layout(dtype, E))
    first, end = visit_range(params, tile, blocks)
    q_state = stage_of(visit, params.tile.Q_STAGES)
    shared.q.consumer_wait(q_state)
    s_NM = queue_rows(shared.k, shared.q, q_state, CONSUMER, params.tile.BLOCK_M)
    layout: gl.constexpr = scores_layout(dtype, params.tile.BLOCK_M)
    lse_M = shared.lse.index(q_state.index).load(gl.SliceLayout(0, layout))
    s_NM = warpgroup_mma_wait(0, deps=[s_NM])
    sync(params, CONSUMER)
    queued = queued_probabilities(
        s_NM, lse_M, blocks, params, tile, first, dtype, CONSUMER, True
    )
    arrive(params, CONSUMER)
    last = end - 1
    lane = lane_place()
    number = first
    while number < last:
        # Masked visits are outside of the loop.
        run = full_run(blocks, number + 1, last)
        for _ in range(run):
            number += 1
            queued, dk, dv = step_beside(
                shared, visit, queued, dk, dv, blocks, params, tile, number, lane, CONSUMER, False, False
            )
            visit += 1
        if run == 0:
            number += 1
            queued, dk, dv = step_beside(
                shared, visit, queued, dk, dv, blocks, params, tile, number, lane, CONSUMER, True, False
            )
            visit += 1
    queued, dk, dv = step_beside(
        shared, visit, queued, dk, dv, blocks, params, tile, number, lane, CONSUMER, False, True
    )
    return dk, dv, visit + 1


@gluon.jit
def full_run(blocks, number, last):
    """How many visits from this number to the last need no mask."""
    count = blocks.end - blocks.begin
    block = blocks.begin + number % count
    run = gl.where(is_masked(blocks, block), 0, blocks.full_end - block)
    return gl.minimum(run, last - number + 1)


@gluon.jit
def backward_mainloop(shared, visit, blocks, params, tile, CONSUMER: gl.constexpr):
    """dK and dV, not scaled, of one consumer's keys: of a work tile's visits, at least one.
    visit: how many came before, in all work tiles."""
    D: gl.constexpr = shared.k.shape[-1]
    E: gl.constexpr = shared.v.shape[-1]
    dtype: gl.constexpr = shared.k.dtype
    dk = gl.zeros([ROWS, D], gl.float32, scores_layout(dtype, D))
    dv = gl.zeros([ROWS, E], gl.float32, scores_layout(dtype, E))
    first, end = visit_range(params, tile, blocks)
    queued, dp = first_probabilities(shared, visit, blocks, params, tile, first, CONSUMER)
    last = end - 1
    number = first
    while number < last:
        # Masked visits are outside of the loop.
        run = full_run(blocks, number + 1, last)
        for _ in range(run):
            number += 1
            queued, dp, dk, dv = step(
                shared, visit, queued, dp, dk, dv, blocks, params, tile, number, CONSUMER, False
            )
            visit += 1
        if run == 0:
            number += 1
            queued, dp, dk, dv = step(
                shared, visit, queued, dp, dk, dv, blocks, params, tile, number, CONSUMER, True
            )
            visit += 1
    dk, dv = last_step(shared, visit, queued, dp, dk, dv, params, CONSUMER)
    return dk, dv, visit + 1
