"""Attention backward of up to 192 columns of queries and 128 of values: two consumers of 64 keys
each, which also compute dQ and add it to global memory from registers.

dK and dV of 64 keys take 160 registers of a thread. This leaves none for a warpgroup that computes
dQ (kernel.py), and a tile of 64 keys (wide.py) would add twice as much dQ. Each consumer computes
half of dQ's columns, from the dS of both, so the two meet once in each step. Log-sum-exps and
deltas are subtracted by the products: accumulators begin with them, and they take no other
registers.

The kernel is `backward_pair`, launched by `launch/bind/hopper_backward.py` as `backward` is. A
program has two consumer warpgroups and a producer warp.

M query rows, N keys (64 of a consumer), J pairs of neighbouring queries, D qk dim, E v dim.
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
    add_transposed,
    no_gradients,
    queue_gradients,
    scaled,
    wait_for_gradients,
)
from heedful.kernels.hopper.backward.consumer import store_gradient
from heedful.kernels.hopper.backward.dq.sums import add_registers
from heedful.kernels.hopper.backward.mainloop import key_box
from heedful.kernels.hopper.backward.mask import hide_by_words, hide_queries
from heedful.kernels.hopper.backward.p_scale import p_descale
from heedful.kernels.hopper.backward.producer import backward_producer
from heedful.kernels.hopper.backward.scores import kept_probabilities
from heedful.kernels.hopper.backward.shared import (
    CONSUMERS,
    allocate_queries,
    load_words,
    release_keys,
    sync_consumers,
    wait_for_keys,
)
from heedful.kernels.hopper.backward.tile import (
    key_tile,
    m_block_range,
    next_index,
    stride_before,
    visit_range,
    work_scheduler,
)
from heedful.kernels.hopper.sm90 import barrier
from heedful.kernels.hopper.sm90.barrier import barriers
from heedful.kernels.hopper.sm90.compat import aggregate, inline_asm
from heedful.kernels.hopper.sm90.mma import ROWS, scores_layout
from heedful.kernels.hopper.sm90.pairs import from_pairs, lane_place, store_pairs, to_pairs
from heedful.kernels.hopper.sm90.pipeline import Pipeline, PipelineState, allocate_boxes, stage_of
from heedful.kernels.hopper.sm90.roles import start_roles
from heedful.kernels.hopper.sm90.tile_scheduler import SCHEDULER_STAGES, TileScheduler


@aggregate
class PairShared:
    """Shared memory, as BackwardShared, with one stage of keys.

    places, rows: beside each tile of queries, its number among all tiles, and its first row. ds: a
    ring of boxes for each consumer, keys by queries; both consumers compute dQ from all of them.
    """

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q: Pipeline
    do: Pipeline
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    places: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor

    @gluon.jit
    def allocate(io, params):
        BLOCK_M: gl.constexpr = params.tile.BLOCK_M
        STAGES: gl.constexpr = params.tile.DS_STAGES
        q, do, lse, delta = allocate_queries(io, params)
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], io.q.dtype)
        ds = gl.allocate_shared_memory(io.q.dtype, [CONSUMERS * STAGES, ROWS, BLOCK_M], layout)
        return PairShared(
            allocate_boxes(io.k, CONSUMERS),
            allocate_boxes(io.v, CONSUMERS),
            q,
            do,
            lse,
            delta,
            # ptxas: places and rows are in memory, since consumers have no registers to compute
            # them.
            gl.allocate_shared_memory(gl.int32, [params.tile.Q_STAGES, 32], plain),
            gl.allocate_shared_memory(gl.int32, [params.tile.Q_STAGES, 32], plain),
            ds,
            barriers(1, 1),
            barriers(1, 1),
            barriers(1, CONSUMERS),
            barriers(1, CONSUMERS),
            barriers(STAGES, CONSUMERS * 4),
        )

    @gluon.jit
    def consumer_ds(self, state, CONSUMER: gl.constexpr):
        """One consumer's box of dS at a stage."""
        return self.ds.index(CONSUMER * state.stages + state.index)


@gluon.jit
def read_number(memory):
    """The first number in shared memory, for all threads."""
    return inline_asm("ld.shared.b32 $0, [$1];", "=r,r,~{memory}", [memory], gl.int32)


@gluon.jit
def make_dq(shared, state, COL: gl.constexpr, COLS: gl.constexpr):
    """Columns [COL, COL + COLS) of a visit's dQ."""
    dq = gl.zeros([ROWS, COLS], gl.float32, scores_layout(shared.k.dtype, COLS))
    for i in gl.static_range(CONSUMERS):
        left = shared.consumer_ds(state, i).permute((1, 0))
        right = key_box(shared.k, i).slice(COL, COLS, dim=1)
        # dQ += dS K
        dq = warpgroup_mma(left, right, dq, use_acc=i > 0, is_async=True)
    return warpgroup_mma_wait(0, deps=[dq])


@gluon.jit
def add_dq(io, shared, params, place, state, CONSUMER: gl.constexpr):
    """Computes one consumer's columns of a visit's dQ and adds them to global memory. place: number
    of the tile of queries among all."""
    BLOCK_M: gl.constexpr = params.tile.BLOCK_M
    address = io.dq_accum + place.to(gl.int64) * (BLOCK_M * params.tile.D)
    FIRST: gl.constexpr = 0 if CONSUMER == 0 else 128
    HALF: gl.constexpr = 64 + CONSUMER * 32
    add_registers(address + FIRST * BLOCK_M, make_dq(shared, state, FIRST, 64))
    add_registers(address + HALF * BLOCK_M, make_dq(shared, state, HALF, 32))


@gluon.jit
def less_than_rows(x_M, BLOCK_M: gl.constexpr, layout: gl.constexpr):
    """The initial accumulator of a product from which x is subtracted, one number for each
    query."""
    # ptxas: so these 16 numbers take no registers beside their results.
    return gl.zeros([ROWS, BLOCK_M], gl.float32, layout) - x_M[None, :]


@gluon.jit
def probabilities(shared, visit, params, tile, CONSUMER: gl.constexpr):
    """A visit's probabilities, in pairs."""
    dtype: gl.constexpr = shared.k.dtype
    BLOCK_M: gl.constexpr = params.tile.BLOCK_M
    layout: gl.constexpr = scores_layout(dtype, BLOCK_M)
    rows: gl.constexpr = gl.SliceLayout(0, layout)
    q_state = stage_of(visit, params.tile.Q_STAGES)
    shared.q.consumer_wait(q_state)
    lse_M = shared.lse.index(q_state.index).load(rows) / params.mods.scale_log2
    s_NM = less_than_rows(lse_M, BLOCK_M, layout)
    keys = key_box(shared.k, CONSUMER)
    # S^T = K Q^T
    s_NM = add_transposed(keys, shared.q.tile(q_state), s_NM, params.tile.D)
    s_NM = warpgroup_mma_wait(0, deps=[s_NM])
    p_NM = gl.exp2(s_NM * params.mods.scale_log2)
    if params.mask.RANGES:
        words_M = load_words(shared, params, q_state.index, CONSUMER, rows)
        p_NM = hide_by_words(p_NM, words_M, params, CONSUMER)
    else:
        row = read_number(shared.rows.index(q_state.index))
        p_NM = hide_queries(p_NM, params, tile, row, CONSUMER)
    return to_pairs(p_NM, gl.float16)


@gluon.jit
def pair_step(io, shared, visit, dk, dv, params, tile, lane, CONSUMER: gl.constexpr):
    """One visit. visit: visits before it, of all work tiles. Its five products: S^T = K Q^T, dP^T =
    V dO^T, dV += P^T dO, dK += dS^T Q, and half the columns of dQ += dS K."""
    dtype: gl.constexpr = shared.k.dtype
    BLOCK_M: gl.constexpr = params.tile.BLOCK_M
    layout: gl.constexpr = scores_layout(dtype, BLOCK_M)
    operand: gl.constexpr = gl.DotOperandLayout(0, dv[0].type.layout, 2)
    operand_k: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    q_state = stage_of(visit, params.tile.Q_STAGES)
    do_state = stage_of(visit, params.tile.DO_STAGES)
    ds_state = stage_of(visit, params.tile.DS_STAGES)
    p_NJ = probabilities(shared, visit, params, tile, CONSUMER)
    shared.do.consumer_wait(do_state)
    dout = shared.do.tile(do_state)
    delta_M = shared.delta.index(do_state.index).load(gl.SliceLayout(0, layout))
    dp_NM = less_than_rows(delta_M, BLOCK_M, layout)
    # dP^T = V dO^T
    dp_NM = add_transposed(key_box(shared.v, CONSUMER), dout, dp_NM, params.tile.E)
    dp_NM = warpgroup_mma_wait(0, deps=[dp_NM])
    p_NM = from_pairs(p_NJ, gl.float16, layout).to(gl.float32)
    ds_NJ = to_pairs(p_NM * dp_NM, dtype)
    left = kept_probabilities((p_NJ,), params, dtype, operand)
    # dV += P^T dO
    dv = queue_gradients(left, dout, dv, params.tile.E)
    # Both consumers have computed dQ from this stage's dS of two visits ago: neither has announced
    # its next dS before that.
    store_pairs(shared.consumer_ds(ds_state, CONSUMER), ds_NJ, lane)
    barrier.arrive_each_warp(shared.ds_full.index(ds_state.index))
    dv = wait_for_gradients(dv)
    shared.do.consumer_release_after_mma(do_state)
    left = from_pairs(ds_NJ, dtype, operand_k)
    # dK += dS^T Q
    dk = queue_gradients(left, shared.q.tile(q_state), dk, params.tile.D)
    dk = wait_for_gradients(dk)
    place = read_number(shared.places.index(q_state.index))
    shared.q.consumer_release_after_mma(q_state)
    barrier.wait(shared.ds_full.index(ds_state.index), ds_state.phase)
    add_dq(io, shared, params, place, ds_state, CONSUMER)
    return dk, dv


@gluon.jit
def pair_mainloop(io, shared, visit, params, tile, visits, CONSUMER: gl.constexpr):
    """(dK, dV, visits so far), not scaled, of one consumer's keys, over a work tile of `visits`
    visits."""
    dtype: gl.constexpr = shared.k.dtype
    dk = no_gradients(params.tile.D, dtype)
    dv = no_gradients(params.tile.E, dtype)
    lane = lane_place()
    for _ in range(visits):
        dk, dv = pair_step(io, shared, visit, dk, dv, params, tile, lane, CONSUMER)
        visit += 1
    return dk, dv, visit


@gluon.jit
def pair_consumer(
    io: HopperBackwardIO,
    shared,
    scheduler: TileScheduler,
    params: HopperBackwardParams,
    CONSUMER: gl.constexpr,
):
    """Computes the gradients of one consumer's keys of each work tile; zeros if no query sees any
    of them."""
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
        visits = gl.maximum(end - first, 0)
        dk, dv, visit = pair_mainloop(io, shared, visit, params, tile, visits, CONSUMER)
        dv = scaled(dv, p_descale(io.q.dtype))
        dk = scaled(dk, params.sizes.scale * p_descale(io.q.dtype))
        # The other consumer has read all keys.
        sync_consumers()
        memory = shared.v.index(CONSUMER)
        store_gradient(io.dv, memory, dv, 0, params.tile.E, params, tile, CONSUMER)
        memory = shared.k.index(CONSUMER)
        store_gradient(io.dk, memory, dk, params.tile.E, params.tile.D, params, tile, CONSUMER)
        release_keys(shared)
        scheduler_state = scheduler_state.next()
        index = next_index(scheduler, index, scheduler_state)


@gluon.jit
def backward_pair(io: HopperBackwardIO, params: HopperBackwardParams):
    """As `backward` of kernel.py."""
    CONSUMER_REGS: gl.constexpr = params.tile.CONSUMER_REGS
    PRODUCER_REGS: gl.constexpr = params.tile.PRODUCER_REGS
    shared = PairShared.allocate(io, params)
    scheduler = work_scheduler(params, CONSUMERS)
    fence_async_shared()
    # The launch begins early (KernelCall.programmatic). From here on, the prologue's results are in
    # memory.
    cuda.gdc_wait()
    start_roles(
        CONSUMERS,
        [
            (pair_consumer, (io, shared, scheduler, params), 4, CONSUMER_REGS),
            (backward_producer, (io, shared, scheduler, params), 1, PRODUCER_REGS),
        ],
    )
