"""The warpgroup of the Hopper backward that makes dQ of every visit, from dS of both consumers.

M query rows, N keys (64), D qk dim.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from heedful.kernels.args.hopper_backward import HopperBackwardIO, HopperBackwardParams
from heedful.kernels.hopper import barrier
from heedful.kernels.hopper.backward_mainloop import keys_of, queue_dq, send_dq, stage_of
from heedful.kernels.hopper.backward_shared import CONSUMERS, adders
from heedful.kernels.hopper.backward_sums import add_registers, put_dq
from heedful.kernels.hopper.backward_tile import (
    is_visited,
    key_tile,
    m_block_range,
    next_index,
    query_tile,
    stride_before,
    visit_range,
)
from heedful.kernels.hopper.mma import ROWS, scores_layout
from heedful.kernels.hopper.pipeline import PipelineState
from heedful.kernels.hopper.tile_scheduler import SCHEDULER_STAGES, TileScheduler


@gluon.jit
def queue_whole(shared, ds_state):
    D: gl.constexpr = shared.k.shape[-1]
    layout: gl.constexpr = scores_layout(shared.k.dtype, D)
    dq = gl.zeros([ROWS, D], gl.float32, layout)
    for i in gl.static_range(CONSUMERS):
        left = shared.ds.index(i * ds_state.stages + ds_state.index)
        right = keys_of(shared.k, i)
        dq = warpgroup_mma(left.permute((1, 0)), right, dq, use_acc=i > 0, is_async=True)
    return dq


@gluon.jit
def backward_dq(
    io: HopperBackwardIO, shared, scheduler: TileScheduler, params: HopperBackwardParams
):
    """dQ of each visit, a share after the other."""
    DIRECT: gl.constexpr = params.tile.DQ_HOW % 2 == 1
    WHOLE: gl.constexpr = params.tile.DQ_HOW >= 2
    BLOCK_M: gl.constexpr = params.tile.BLOCK_M
    D: gl.constexpr = shared.k.shape[-1]
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
            head, block = query_tile(params, tile, blocks, first)
            row = head.to(gl.int64) * params.sizes.accum_rows + tile.accum_row + block * BLOCK_M
            address = io.dq_accum + row * D
            count = blocks.end - blocks.begin
            left = blocks.end - block
            jump = (params.sizes.accum_rows - count * BLOCK_M) * D
            for _ in range(first, end):
                ds_state = stage_of(visit, params.tile.DS_STAGES)
                barrier.wait(shared.ds_full.index(ds_state.index), ds_state.phase)
                if WHOLE:
                    dq = queue_whole(shared, ds_state)
                    dq = warpgroup_mma_wait(0, deps=[dq])
                    barrier.arrive_after_mma(shared.ds_empty.index(ds_state.index))
                    if DIRECT:
                        add_registers(address, dq)
                    else:
                        for share in gl.static_range(CONSUMERS):
                            barrier.wait(shared.dq_empty.index(share), (visit & 1) ^ 1)
                        put_dq(dq, shared.dq.index(0))
                        for share in gl.static_range(CONSUMERS):
                            barrier.arrive_each_warp(
                                shared.dq_full.index(visit % adders(params) * CONSUMERS + share)
                            )
                else:
                    for share in gl.static_range(CONSUMERS):
                        dq = queue_dq(shared, ds_state, share)
                        dq = warpgroup_mma_wait(0, deps=[dq])
                        if share == CONSUMERS - 1:
                            barrier.arrive_after_mma(shared.ds_empty.index(ds_state.index))
                        if DIRECT:
                            add_registers(address + share * (BLOCK_M * D // 2), dq)
                            barrier.wait(shared.k_full.index(0), kv_phase)
                        else:
                            send_dq(shared, dq, visit, params, share)
                visit += 1
                if DIRECT:
                    left -= 1
                    address += BLOCK_M * D + gl.where(left == 0, jump, 0)
                    left = gl.where(left == 0, count, left)
            barrier.arrive_after_mma(shared.k_empty.index(0))
            kv_phase ^= 1
        scheduler_state = scheduler_state.next()
        index = next_index(scheduler, index, scheduler_state)
