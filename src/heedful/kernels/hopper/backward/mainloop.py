"""The mainloop of one consumer of the backward: streams queries past its 64 keys.

Scores are computed transposed, so that P and dS are left operands of dV and dK in registers. dS
goes through shared memory only for dQ, which another warpgroup computes. The scores of a step are
computed while dK of the step before runs, and their exponentials overlap with it.

M query rows, N keys (64), D qk dim, E v dim, J pairs of neighbouring queries.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
)

from heedful.kernels.hopper.backward.columns import (
    no_gradients,
    part_count,
    queue_gradients,
    queue_transposed,
    wait_for_gradients,
)
from heedful.kernels.hopper.backward.scores import (
    kept_probabilities,
    queued_probabilities,
    score_gradients,
)
from heedful.kernels.hopper.backward.shared import (
    CONSUMERS,
    alternates,
    ds_stages,
    row_numbers,
    visits_apart,
    wait_for_outlet,
)
from heedful.kernels.hopper.backward.tile import is_masked, needs_no_mask, visit_range, walks_down
from heedful.kernels.hopper.sm90 import barrier
from heedful.kernels.hopper.sm90.compat import opaque
from heedful.kernels.hopper.sm90.mma import ROWS, scores_layout, wait_products
from heedful.kernels.hopper.sm90.pairs import from_pairs, lane_place, store_pairs, to_pairs
from heedful.kernels.hopper.sm90.pipeline import matrix, stage_of


@gluon.jit
def key_box(boxes, index):
    """One box of keys or values as (N, D)."""
    # ptxas: the index is opaque. Otherwise descriptors of the box are computed before the loop and
    # kept.
    return matrix(boxes.index(opaque(gl.to_tensor(index))), ROWS, boxes.shape[-1])


@gluon.jit
def consumer_box(boxes, stage, params, CONSUMER):
    """A consumer's box of keys or values at a stage."""
    if alternates(params):
        return key_box(boxes, stage)
    else:
        return key_box(boxes, stage * CONSUMERS + CONSUMER)


@gluon.jit
def queue_visit(shared, visit, k_stage, params, CONSUMER):
    """Starts a visit's S."""
    q_state = stage_of(visit, params.tile.Q_STAGES)
    shared.q.consumer_wait(q_state)
    keys = consumer_box(shared.k, k_stage, params, CONSUMER)
    # S^T = K Q^T
    return queue_transposed(keys, shared.q.tile(q_state), params.tile.D, params.tile.BLOCK_M)


@gluon.jit
def visit_probabilities(
    shared,
    s_NM,
    visit,
    blocks,
    params,
    tile,
    number,
    CONSUMER,
    MASKED: gl.constexpr,
):
    """A visit's probabilities, packed until its dP is there."""
    dtype: gl.constexpr = shared.k.dtype
    layout: gl.constexpr = gl.SliceLayout(
        0, scores_layout(dtype, params.tile.BLOCK_M, gl.num_warps())
    )
    rows = row_numbers(shared, params, visit % params.tile.Q_STAGES, CONSUMER, layout, MASKED)
    return queued_probabilities(s_NM, rows, blocks, params, tile, number, dtype, CONSUMER, MASKED)


@gluon.jit
def store_ds(shared, ds_NJ, visit, lane, params, CONSUMER):
    """Passes one consumer's dS to the warpgroup that computes dQ."""
    dtype: gl.constexpr = shared.k.dtype
    BLOCK_M: gl.constexpr = params.tile.BLOCK_M
    state = stage_of(visit, ds_stages(params))
    barrier.wait(shared.ds_empty.index(state.index), state.phase ^ 1)
    memory = shared.consumer_ds(state, CONSUMER)
    if BLOCK_M == ROWS:
        store_pairs(memory, ds_NJ, lane)
    else:
        # ptxas: with 128 queries the compiler's store takes fewer instructions, despite its
        # barriers.
        memory.store(from_pairs(ds_NJ, dtype, scores_layout(dtype, BLOCK_M, gl.num_warps())))
        fence_async_shared()
    barrier.arrive_each_warp(shared.ds_full.index(state.index))


@gluon.jit
def step(
    shared,
    made,
    visit,
    number,
    blocks,
    params,
    tile,
    k_stage,
    lane,
    CONSUMER,
    MASKED: gl.constexpr,
    LAST: gl.constexpr,
):
    """One visit. made: (its probabilities, dK, dV), which is also what it returns.

    Unless LAST, the returned probabilities are those of the consumer's next visit, which has this
    number in the work tile and a mask if MASKED. Its five products:

        S^T = K Q^T    of the next visit
        dP^T = V dO^T
        dV += P^T dO
        dK += dS^T Q
        dQ += dS K     by another warpgroup (dq/warpgroup.py), from `store_ds`
    """
    queued, dk, dv = made
    dtype: gl.constexpr = shared.k.dtype
    BLOCK_M: gl.constexpr = params.tile.BLOCK_M
    APART: gl.constexpr = visits_apart(params)
    operand: gl.constexpr = gl.DotOperandLayout(0, dv[0].type.layout, 2)
    operand_k: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    layout: gl.constexpr = gl.SliceLayout(0, scores_layout(dtype, BLOCK_M, gl.num_warps()))
    q_state = stage_of(visit, params.tile.Q_STAGES)
    do_state = stage_of(visit, params.tile.DO_STAGES)
    shared.do.consumer_wait(do_state)
    values, dout = consumer_box(shared.v, 0, params, CONSUMER), shared.do.tile(do_state)
    # dP^T = V dO^T
    dp_NM = queue_transposed(values, dout, params.tile.E, BLOCK_M)
    dp_NM = wait_products(dp_NM)
    if LAST:
        barrier.arrive_after_mma(shared.v_empty.index(0))
    delta_M = shared.delta.index(do_state.index).load(layout)
    ds_NJ = to_pairs(score_gradients(queued, dp_NM, delta_M, params, dtype), dtype)
    left = kept_probabilities(queued, params, dtype, operand)
    # dV += P^T dO
    dv = queue_gradients(left, dout, dv, params.tile.E)
    store_ds(shared, ds_NJ, visit, lane, params, CONSUMER)
    if LAST:
        dv = wait_for_gradients(dv)
    else:
        s_NM = queue_visit(shared, visit + APART, k_stage, params, CONSUMER)
        dv = wait_for_gradients(dv, part_count(params.tile.D))
    shared.do.consumer_release_after_mma(do_state)
    left = from_pairs(ds_NJ, dtype, operand_k)
    # dK += dS^T Q
    dk = queue_gradients(left, shared.q.tile(q_state), dk, params.tile.D)
    if not LAST:
        s_NM = wait_products(s_NM, part_count(params.tile.D))
        queued = visit_probabilities(
            shared, s_NM, visit + APART, blocks, params, tile, number, CONSUMER, MASKED
        )
    # ptxas: a product that still runs at the end of an iteration is copied, which waits for it.
    dk = wait_for_gradients(dk)
    shared.q.consumer_release_after_mma(q_state)
    return queued, dk, dv


@gluon.jit
def full_run(params, tile, blocks, number, last):
    """How many of a consumer's visits from this number to the last need no mask."""
    if params.ways.HEADS_INNERMOST:
        group = params.sizes.group
        turn = number // group
        is_down = walks_down(params, tile)
        block = gl.where(is_down, blocks.end - 1 - turn, blocks.begin + turn)
        left = gl.where(is_down, block - blocks.full_begin + 1, blocks.full_end - block)
        left = left * group - (number - turn * group)
    elif params.ways.ROTATES and not params.mask.HAS_RIGHT:
        # All visits of a work tile need a mask, or none.
        block = blocks.begin
        left = last - number + 1
    else:
        count = blocks.end - blocks.begin
        block = blocks.begin + number % count
        left = blocks.full_end - block
        if params.ways.ROTATES:
            left = gl.where(needs_no_mask(blocks), last - number + 1, left)
    run = gl.where(is_masked(blocks, block), 0, left)
    run = gl.minimum(run, last - number + 1)
    if alternates(params):
        run = (run + 1) // 2
    return run


@gluon.jit
def own_visits(first, end, visit, CONSUMER):
    """(first, end, visits before the first) of a consumer that alternates with the other: of visits
    of all work tiles it has the even or the odd ones, so that stages of rings are always its own.
    At least one is its own."""
    ahead = (visit + CONSUMER) & 1
    first += ahead
    return first, end - (end - first + 1) % 2, visit + ahead


@gluon.jit
def pass_over(shared, params, kv_count):
    """Takes a work tile of whose visits none is this consumer's."""
    k_state = stage_of(kv_count, params.tile.K_STAGES)
    barrier.wait(shared.k_full.index(k_state.index), k_state.phase)
    barrier.wait(shared.v_full.index(0), kv_count & 1)
    # Its barrier comes before the stages are free.
    wait_for_outlet()
    barrier.arrive_after_mma(shared.v_empty.index(0))
    barrier.arrive_after_mma(shared.k_empty.index(k_state.index))


@gluon.jit
def backward_mainloop(shared, visit, blocks, params, tile, kv_count, CONSUMER):
    """(dK, dV, visits so far), not scaled, of one consumer's keys, over its visits of a work tile,
    at least one. visit: visits before it, of all work tiles. kv_count: work tiles before it that
    had visits."""
    APART: gl.constexpr = visits_apart(params)
    dtype: gl.constexpr = shared.k.dtype
    dk = no_gradients(params.tile.D, dtype)
    dv = no_gradients(params.tile.E, dtype)
    first, end = visit_range(params, tile, blocks)
    if APART > 1:
        first, end, visit = own_visits(first, end, visit, CONSUMER)
    k_state = stage_of(kv_count, params.tile.K_STAGES)
    barrier.wait(shared.k_full.index(k_state.index), k_state.phase)
    s_NM = queue_visit(shared, visit, k_state.index, params, CONSUMER)
    s_NM = wait_products(s_NM)
    queued = visit_probabilities(shared, s_NM, visit, blocks, params, tile, first, CONSUMER, True)
    barrier.wait(shared.v_full.index(0), kv_count & 1)
    wait_for_outlet()
    if params.ways.DK_IN_KEYS and kv_count > 0:
        # Their gradient has left the memory of the keys before.
        before = stage_of(kv_count - 1, params.tile.K_STAGES).index
        barrier.arrive_after_mma(shared.k_empty.index(before))
    lane = lane_place()
    last = end - 1
    number = first
    made = queued, dk, dv
    stage = k_state.index
    while number < last:
        # Visits with a mask are outside of the loop.
        run = full_run(params, tile, blocks, number + APART, last)
        for _ in range(run):
            number += APART
            made = step(
                shared,
                made,
                visit,
                number,
                blocks,
                params,
                tile,
                stage,
                lane,
                CONSUMER,
                False,
                False,
            )
            visit += APART
        if run == 0:
            number += APART
            made = step(
                shared,
                made,
                visit,
                number,
                blocks,
                params,
                tile,
                stage,
                lane,
                CONSUMER,
                True,
                False,
            )
            visit += APART
    _queued, dk, dv = step(
        shared, made, visit, last, blocks, params, tile, stage, lane, CONSUMER, False, True
    )
    if not params.ways.DK_IN_KEYS:
        barrier.arrive_after_mma(shared.k_empty.index(k_state.index))
    return dk, dv, visit + 1
