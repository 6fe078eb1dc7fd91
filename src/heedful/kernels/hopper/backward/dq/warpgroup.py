"""The warpgroup of the backward that computes dQ of every visit, from the dS of both consumers. So
the consumers never wait for each other, and one computes exponentials while the other uses the
matrix unit.

M query rows, N keys (64), D qk dim.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from heedful.kernels.args.hopper_backward import HopperBackwardIO, HopperBackwardParams
from heedful.kernels.hopper.backward.columns import share_columns
from heedful.kernels.hopper.backward.dq.sums import put_dq
from heedful.kernels.hopper.backward.mainloop import key_box
from heedful.kernels.hopper.backward.shared import (
    CONSUMERS,
    SHARES,
    adders,
    alternates,
    ds_stages,
    visits_apart,
)
from heedful.kernels.hopper.backward.tile import (
    is_visited,
    key_tile,
    m_block_range,
    next_index,
    stride_before,
    visit_range,
)
from heedful.kernels.hopper.sm90 import barrier
from heedful.kernels.hopper.sm90.mma import ROWS, scores_layout
from heedful.kernels.hopper.sm90.pipeline import PipelineState, stage_of
from heedful.kernels.hopper.sm90.tile_scheduler import SCHEDULER_STAGES, TileScheduler


@gluon.jit
def make_dq(shared, ds_state, k_stage, params, SHARE: gl.constexpr):
    """A share of a visit's dQ."""
    M: gl.constexpr = params.tile.BLOCK_M
    D: gl.constexpr = params.tile.D
    COLS: gl.constexpr = share_columns(D, M, SHARE)
    layout: gl.constexpr = scores_layout(shared.k.dtype, COLS)
    dq = gl.zeros([ROWS, COLS], gl.float32, layout)
    BOXES: gl.constexpr = CONSUMERS // visits_apart(params)
    for i in gl.static_range(BOXES):
        maker = ds_state.index % CONSUMERS if alternates(params) else i
        left = shared.consumer_ds(ds_state, maker)
        right = key_box(shared.k, k_stage * BOXES + i)
        if M > ROWS:
            left = left.slice(SHARE * ROWS, ROWS, dim=1)
        else:
            right = right.slice(SHARE * share_columns(D, M, 0), COLS, dim=1)
        # dQ += dS K
        dq = warpgroup_mma(left.permute((1, 0)), right, dq, use_acc=i > 0, is_async=True)
    return warpgroup_mma_wait(0, deps=[dq])


@gluon.jit
def send_dq(shared, dq, visit, params, SHARE: gl.constexpr):
    """Passes a share of dQ to the warp that adds it."""
    ADDERS: gl.constexpr = adders(params)
    barrier.wait(shared.dq_empty.index(SHARE), (visit & 1) ^ 1)
    put_dq(dq, shared.dq.index(SHARE))
    barrier.arrive_each_warp(shared.dq_full.index(visit % ADDERS * SHARES + SHARE))


@gluon.jit
def visit_dq(shared, visit, k_stage, params):
    """Computes dQ of one visit, and releases its dS."""
    ds_state = stage_of(visit, ds_stages(params))
    barrier.wait(shared.ds_full.index(ds_state.index), ds_state.phase)
    for share in gl.static_range(SHARES):
        dq = make_dq(shared, ds_state, k_stage, params, share)
        if share == SHARES - 1:
            barrier.arrive_after_mma(shared.ds_empty.index(ds_state.index))
        send_dq(shared, dq, visit, params, share)


@gluon.jit
def backward_dq(
    io: HopperBackwardIO, shared, scheduler: TileScheduler, params: HopperBackwardParams
):
    """Computes dQ of every visit of every work tile."""
    visit = gl.to_tensor(0)
    kv_count = gl.to_tensor(0)
    scheduler_state = PipelineState.start(SCHEDULER_STAGES)
    index = next_index(scheduler, stride_before(), scheduler_state)
    while index < scheduler.count:
        tile = key_tile(params, index)
        blocks = m_block_range(params, tile)
        if is_visited(params, tile, blocks):
            first, end = visit_range(params, tile, blocks)
            k_state = stage_of(kv_count, params.tile.K_STAGES)
            barrier.wait(shared.k_full.index(k_state.index), k_state.phase)
            for _ in range(first, end):
                visit_dq(shared, visit, k_state.index, params)
                visit += 1
            barrier.arrive_after_mma(shared.k_empty.index(k_state.index))
            kv_count += 1
        scheduler_state = scheduler_state.next()
        index = next_index(scheduler, index, scheduler_state)
