"""The warpgroup of the Hopper backward that makes dQ of every visit, from dS of both consumers.

M query rows, N keys (64), D qk dim.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from heedful.kernels.args.hopper_backward import HopperBackwardIO, HopperBackwardParams
from heedful.kernels.hopper import barrier
from heedful.kernels.hopper.backward_mainloop import queue_dq, send_dq, stage_of
from heedful.kernels.hopper.backward_shared import CONSUMERS
from heedful.kernels.hopper.backward_tile import (
    is_visited,
    key_tile,
    m_block_range,
    next_index,
    stride_before,
    visit_range,
)
from heedful.kernels.hopper.pipeline import PipelineState
from heedful.kernels.hopper.tile_scheduler import SCHEDULER_STAGES, TileScheduler


@gluon.jit
def backward_dq(
    io: HopperBackwardIO, shared, scheduler: TileScheduler, params: HopperBackwardParams
):
    """dQ of each visit, a share after the other."""
    visit = gl.to_tensor(0)
    kv_phase = gl.to_tensor(0)
    scheduler_state = PipelineState.start(SCHEDULER_STAGES)
    index = next_index(scheduler, stride_before(), scheduler_state)
    while index < scheduler.count:
        tile = key_tile(params, index)
        blocks = m_block_range(params, tile)
        if is_visited(params, tile, blocks):
            first, end = visit_range(params, tile, blocks)
            barrier.wait(shared.k_full.index(0), kv_phase)
            for _ in range(first, end):
                ds_state = stage_of(visit, params.tile.DS_STAGES)
                barrier.wait(shared.ds_full.index(ds_state.index), ds_state.phase)
                for share in gl.static_range(CONSUMERS):
                    dq = queue_dq(shared, ds_state, share)
                    dq = warpgroup_mma_wait(0, deps=[dq])
                    if share == CONSUMERS - 1:
                        barrier.arrive_after_mma(shared.ds_empty.index(ds_state.index))
                    send_dq(shared, dq, visit, params, share)
                visit += 1
            barrier.arrive_after_mma(shared.k_empty.index(0))
            kv_phase ^= 1
        scheduler_state = scheduler_state.next()
        index = next_index(scheduler, index, scheduler_state)
