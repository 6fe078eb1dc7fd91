"""Attention backward of wide heads, up to 256: one consumer computes S and dV, the other dP and dK.

A work tile is 64 keys, and each consumer has all of one gradient in registers. Probabilities and dS
pass from one consumer to the other through shared memory. Each consumer computes half of dQ, 64
columns at a time, and adds it to global memory from registers: no shared memory is left for it.

The kernel is `backward_wide`, launched by `launch/bind/hopper_backward.py` as `backward` is. A
program has two consumer warpgroups and a producer warp.

M query rows, N keys (64), D qk dim, E v dim, J pairs of neighbouring queries.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda

from heedful.kernels.args.hopper_backward import HopperBackwardIO, HopperBackwardParams
from heedful.kernels.hopper.backward.columns import (
    no_gradients,
    queue_gradients,
    queue_transposed,
    scaled,
    wait_for_gradients,
)
from heedful.kernels.hopper.backward.consumer import store_gradient
from heedful.kernels.hopper.backward.dq.sums import add_registers
from heedful.kernels.hopper.backward.mainloop import key_box
from heedful.kernels.hopper.backward.p_scale import p_descale
from heedful.kernels.hopper.backward.producer import backward_producer
from heedful.kernels.hopper.backward.scores import kept_probabilities, queued_probabilities
from heedful.kernels.hopper.backward.shared import (
    CONSUMERS,
    allocate_queries,
    release_keys,
    row_numbers,
    sync_consumers,
    wait_for_keys,
)
from heedful.kernels.hopper.backward.tile import (
    key_tile,
    m_block_range,
    next_index,
    query_tile,
    stride_before,
    visit_range,
    work_scheduler,
)
from heedful.kernels.hopper.sm90 import barrier
from heedful.kernels.hopper.sm90.barrier import barriers
from heedful.kernels.hopper.sm90.compat import aggregate
from heedful.kernels.hopper.sm90.mma import ROWS, scores_layout
from heedful.kernels.hopper.sm90.pairs import from_pairs
from heedful.kernels.hopper.sm90.pipeline import Pipeline, PipelineState, allocate_boxes, stage_of
from heedful.kernels.hopper.sm90.roles import start_roles
from heedful.kernels.hopper.sm90.tile_scheduler import SCHEDULER_STAGES, TileScheduler

CROSSING_STAGES: gl.constexpr = gl.constexpr(2)


@aggregate
class WideShared:
    """Shared memory, as BackwardShared. p, ds: probabilities and dS of two visits, keys by queries.
    p_full, ds_full: a barrier for each visit."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q: Pipeline
    do: Pipeline
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor

    @gluon.jit
    def allocate(io, params):
        BLOCK_M: gl.constexpr = params.tile.BLOCK_M
        q, do, lse, delta = allocate_queries(io, params)
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], io.q.dtype)
        return WideShared(
            allocate_boxes(io.k, 1),
            allocate_boxes(io.v, 1),
            q,
            do,
            lse,
            delta,
            gl.allocate_shared_memory(gl.float16, [CROSSING_STAGES, ROWS, BLOCK_M], layout),
            gl.allocate_shared_memory(io.q.dtype, [CROSSING_STAGES, ROWS, BLOCK_M], layout),
            barriers(1, 1),
            barriers(1, 1),
            barriers(1, CONSUMERS),
            barriers(1, CONSUMERS),
            barriers(CROSSING_STAGES, 4),
            barriers(CROSSING_STAGES, 4),
        )


@gluon.jit
def add_dq(io, shared, params, tile, blocks, number, crossing, CONSUMER: gl.constexpr):
    """Computes one consumer's columns of a visit's dQ and adds them to global memory."""
    D: gl.constexpr = params.tile.D
    COLS: gl.constexpr = 64
    # If there are three blocks of columns, consumer 0 computes two: it has fewer other products.
    FIRST: gl.constexpr = CONSUMER * ((D // COLS + 1) // CONSUMERS)
    END: gl.constexpr = D // COLS if CONSUMER else (D // COLS + 1) // CONSUMERS
    BLOCK_M: gl.constexpr = params.tile.BLOCK_M
    layout: gl.constexpr = scores_layout(shared.k.dtype, COLS)
    head, block = query_tile(params, tile, blocks, number)
    row = head.to(gl.int64) * params.sizes.accum_rows + tile.accum_row + block * BLOCK_M
    address = io.dq_accum + row * D
    left = shared.ds.index(crossing.index).permute((1, 0))
    keys = key_box(shared.k, 0)
    for part in gl.static_range(FIRST, END):
        dq = gl.zeros([ROWS, COLS], gl.float32, layout)
        right = keys.slice(part * COLS, COLS, dim=1)
        # dQ += dS K
        dq = warpgroup_mma(left, right, dq, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        add_registers(address + part * (BLOCK_M * COLS), dq)


@gluon.jit
def queue_visit(shared, visit, params):
    """Starts a visit's S."""
    q_state = stage_of(visit, params.tile.Q_STAGES)
    shared.q.consumer_wait(q_state)
    queries = shared.q.tile(q_state)
    # S^T = K Q^T
    return queue_transposed(key_box(shared.k, 0), queries, params.tile.D, params.tile.BLOCK_M)


@gluon.jit
def crossing_probabilities(queued, params, dtype: gl.constexpr, layout: gl.constexpr):
    """The numbers that dS is computed from: probabilities, with softcap times the slope of the
    cap."""
    p_NM = from_pairs(queued[0], gl.float16, layout)
    if params.mods.HAS_SOFTCAP:
        slope_NM = from_pairs(queued[1], dtype, layout).to(gl.float32)
        p_NM = (p_NM.to(gl.float32) * slope_NM).to(gl.float16)
    return p_NM


@gluon.jit
def value_gradients(io, shared, visit, blocks, params, tile, first, end):
    """dV of a work tile, by the consumer that computes probabilities. Its products of a visit: S^T
    = K Q^T, dV += P^T dO, and half the columns of dQ += dS K."""
    dtype: gl.constexpr = shared.k.dtype
    layout: gl.constexpr = scores_layout(dtype, params.tile.BLOCK_M)
    dv = no_gradients(params.tile.E, dtype)
    operand: gl.constexpr = gl.DotOperandLayout(0, dv[0].type.layout, 2)
    for number in range(first, end):
        q_state = stage_of(visit, params.tile.Q_STAGES)
        do_state = stage_of(visit, params.tile.DO_STAGES)
        crossing = stage_of(visit, CROSSING_STAGES)
        s_NM = queue_visit(shared, visit, params)
        rows = row_numbers(shared, params, q_state.index, 0, gl.SliceLayout(0, layout), True)
        s_NM = warpgroup_mma_wait(0, deps=[s_NM])
        shared.q.consumer_release(q_state)
        queued = queued_probabilities(s_NM, rows, blocks, params, tile, number, dtype, 0, True)
        shared.p.index(crossing.index).store(crossing_probabilities(queued, params, dtype, layout))
        barrier.arrive_each_warp(shared.p_full.index(crossing.index))
        shared.do.consumer_wait(do_state)
        left = kept_probabilities(queued, params, dtype, operand)
        # dV += P^T dO
        dv = queue_gradients(left, shared.do.tile(do_state), dv, params.tile.E)
        barrier.wait(shared.ds_full.index(crossing.index), crossing.phase)
        dv = wait_for_gradients(dv)
        shared.do.consumer_release(do_state)
        add_dq(io, shared, params, tile, blocks, number, crossing, 0)
        visit += 1
    return dv, visit


@gluon.jit
def key_gradients(io, shared, visit, blocks, params, tile, first, end):
    """dK of a work tile, without the scale, by the consumer that computes dS. Its products of a
    visit: dP^T = V dO^T, dK += dS^T Q, and the other columns of dQ += dS K."""
    dtype: gl.constexpr = shared.k.dtype
    layout: gl.constexpr = scores_layout(dtype, params.tile.BLOCK_M)
    dk = no_gradients(params.tile.D, dtype)
    operand: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    pairs: gl.constexpr = gl.SliceLayout(0, layout)
    for number in range(first, end):
        q_state = stage_of(visit, params.tile.Q_STAGES)
        do_state = stage_of(visit, params.tile.DO_STAGES)
        crossing = stage_of(visit, CROSSING_STAGES)
        shared.do.consumer_wait(do_state)
        values, dout = key_box(shared.v, 0), shared.do.tile(do_state)
        # dP^T = V dO^T
        dp_NM = queue_transposed(values, dout, params.tile.E, params.tile.BLOCK_M)
        delta_M = shared.delta.index(do_state.index).load(pairs)
        dp_NM = warpgroup_mma_wait(0, deps=[dp_NM])
        shared.do.consumer_release(do_state)
        barrier.wait(shared.p_full.index(crossing.index), crossing.phase)
        p_NM = shared.p.index(crossing.index).load(layout)
        ds_NM = crossed_gradients(p_NM, dp_NM, delta_M, params, dtype)
        shared.ds.index(crossing.index).store(ds_NM)
        fence_async_shared()
        barrier.arrive_each_warp(shared.ds_full.index(crossing.index))
        shared.q.consumer_wait(q_state)
        left = gl.convert_layout(ds_NM, operand)
        # dK += dS^T Q
        dk = queue_gradients(left, shared.q.tile(q_state), dk, params.tile.D)
        dk = wait_for_gradients(dk)
        shared.q.consumer_release(q_state)
        add_dq(io, shared, params, tile, blocks, number, crossing, 1)
        visit += 1
    return dk, visit


@gluon.jit
def crossed_gradients(p_NM, dp_NM, delta_M, params, dtype: gl.constexpr):
    """dS from probabilities that came through shared memory. Dropped ones have their sign set."""
    p_NM = p_NM.to(gl.float32)
    if params.dropout.IS_ON:
        dp_NM = gl.where(p_NM > 0.0, dp_NM * params.dropout.inverse_keep, 0.0)
        p_NM = gl.abs(p_NM)
    return (p_NM * (dp_NM - delta_M[None, :])).to(dtype)


@gluon.jit
def wide_consumer(
    io: HopperBackwardIO,
    shared,
    scheduler: TileScheduler,
    params: HopperBackwardParams,
    CONSUMER: gl.constexpr,
):
    """Computes dV (consumer 0) or dK (consumer 1) of each work tile; zeros if no query sees any
    key."""
    visit = gl.to_tensor(0)
    kv_phase = gl.to_tensor(0)
    scheduler_state = PipelineState.start(SCHEDULER_STAGES)
    index = next_index(scheduler, stride_before(), scheduler_state)
    while index < scheduler.count:
        tile = key_tile(params, index)
        blocks = m_block_range(params, tile)
        first, end = visit_range(params, tile, blocks)
        wait_for_keys(shared, kv_phase)
        kv_phase ^= 1
        if CONSUMER == 0:
            dv, visit = value_gradients(io, shared, visit, blocks, params, tile, first, end)
            dv = scaled(dv, p_descale(io.q.dtype))
            if params.dropout.IS_ON:
                dv = scaled(dv, params.dropout.inverse_keep)
            # The other consumer has read all values and all keys.
            sync_consumers()
            store_gradient(io.dv, shared.v.index(0), dv, 0, params.tile.E, params, tile, 0)
        else:
            dk, visit = key_gradients(io, shared, visit, blocks, params, tile, first, end)
            dk = scaled(dk, params.sizes.scale * p_descale(io.q.dtype))
            sync_consumers()
            before: gl.constexpr = params.tile.E
            store_gradient(io.dk, shared.k.index(0), dk, before, params.tile.D, params, tile, 0)
        release_keys(shared)
        scheduler_state = scheduler_state.next()
        index = next_index(scheduler, index, scheduler_state)


@gluon.jit
def backward_wide(io: HopperBackwardIO, params: HopperBackwardParams):
    """As `backward` of kernel.py."""
    CONSUMER_REGS: gl.constexpr = params.tile.CONSUMER_REGS
    PRODUCER_REGS: gl.constexpr = params.tile.PRODUCER_REGS
    shared = WideShared.allocate(io, params)
    scheduler = work_scheduler(params, CONSUMERS)
    fence_async_shared()
    # The launch begins early (KernelCall.programmatic). From here on, the prologue's results are in
    # memory.
    cuda.gdc_wait()
    start_roles(
        CONSUMERS,
        [
            (wide_consumer, (io, shared, scheduler, params), 4, CONSUMER_REGS),
            (backward_producer, (io, shared, scheduler, params), 1, PRODUCER_REGS),
        ],
    )
