"""A consumer of the Hopper backward: dK and dV of its 64 keys of every work tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from heedful.kernels.args.hopper_backward import HopperBackwardIO, HopperBackwardParams
from heedful.kernels.hopper import barrier
from heedful.kernels.hopper.backward_mainloop import backward_mainloop
from heedful.kernels.hopper.backward_p_scale import p_descale
from heedful.kernels.hopper.backward_shared import CONSUMERS, wait_for_outlet
from heedful.kernels.hopper.backward_sums import store_registers
from heedful.kernels.hopper.backward_tile import (
    is_visited,
    key_tile,
    m_block_range,
    next_index,
    partial_row,
    stride_before,
)
from heedful.kernels.hopper.compat import reinterpret, tma_store
from heedful.kernels.hopper.mma import ROWS, scores_layout
from heedful.kernels.hopper.pipeline import PipelineState, stage_of
from heedful.kernels.hopper.sequences import box
from heedful.kernels.hopper.tile_scheduler import SCHEDULER_STAGES, TileScheduler


@gluon.jit
def store_rows(desc, memory, x_ND, params, tile, CONSUMER: gl.constexpr):
    """Sends gradients of one consumer's keys through its shared memory."""
    PACKED: gl.constexpr = params.seqs.cu_k is not None
    layout: gl.constexpr = gl.SliceLayout(1, x_ND.type.layout)
    if params.seqs.used_k is not None or params.mods.longest_k is not None:
        key_N = tile.col + CONSUMER * ROWS + gl.arange(0, ROWS, layout=layout)
        x_ND = gl.where((key_N < tile.len_k)[:, None], x_ND, 0.0)
    memory.store(x_ND.to(desc.dtype).reshape(memory.shape))
    fence_async_shared()
    row = tile.col + CONSUMER * ROWS
    at = box(PACKED, tile.batch, tile.kv_head, tile.start_k, tile.stored_k, row)
    tma_store(desc, at, memory)


@gluon.jit
def outlet(shared, desc, first: gl.constexpr, CONSUMER: gl.constexpr):
    """Memory for gradients of one consumer's keys: that of its dS, which one fills or two do."""
    shape: gl.constexpr = desc.block_type.shape
    FIT: gl.constexpr = ds_bytes(shared) // desc.block_type.nbytes
    boxes = reinterpret(shared.ds, desc.dtype, [CONSUMERS * FIT] + shape, desc.layout)
    return boxes.index(CONSUMER * FIT + (0 if first else FIT - 1))


@gluon.constexpr_function
def ds_bytes(shared):
    """Of all of one consumer's dS."""
    boxes, rows, columns = shared.ds.shape
    return boxes // 2 * rows * columns * 2


@gluon.jit
def store_gradients(io, shared, dk, dv, params, tile, visit, CONSUMER: gl.constexpr):
    """Sends dV and dK away, through the memory of dS once dQ has been made of it."""
    D: gl.constexpr = io.dk.block_type.shape[-1]
    E: gl.constexpr = io.dv.block_type.shape[-1]
    for ahead in gl.static_range(params.tile.DS_STAGES):
        state = stage_of(visit + ahead, params.tile.DS_STAGES)
        barrier.wait(shared.ds_empty.index(state.index), state.phase ^ 1)
    store_rows(io.dv, outlet(shared, io.dv, True, CONSUMER), dv, params, tile, CONSUMER)
    if ds_bytes(shared) < 2 * ROWS * (D + E):
        wait_for_outlet()
    dk *= params.sizes.scale * p_descale(io.q.dtype)
    store_rows(io.dk, outlet(shared, io.dk, False, CONSUMER), dk, params, tile, CONSUMER)


@gluon.jit
def store_partial(
    x_ND, BEFORE: gl.constexpr, COLS: gl.constexpr, params, tile, CONSUMER: gl.constexpr
):
    """Stores one gradient of one consumer's keys, as it is in registers, for the epilogue: behind
    BEFORE columns of COLS that these keys have."""
    row = partial_row(params, tile) + CONSUMER * ROWS
    store_registers(params.order.partials + row * COLS + BEFORE * ROWS, x_ND)


@gluon.jit
def finish(io, shared, dk, dv, params, tile, visit, CONSUMER: gl.constexpr):
    """Writes dV and dK, or what one split of the visits adds to them."""
    COLS: gl.constexpr = dk.shape[1] + dv.shape[1]
    dv *= p_descale(io.q.dtype)
    if params.dropout.IS_ON:
        dv *= params.dropout.inverse_keep
    if params.order.partials is None:
        store_gradients(io, shared, dk, dv, params, tile, visit, CONSUMER)
    else:
        store_partial(dv, 0, COLS, params, tile, CONSUMER)
        dk *= params.sizes.scale * p_descale(io.q.dtype)
        store_partial(dk, dv.shape[1], COLS, params, tile, CONSUMER)


@gluon.jit
def backward_consumer(
    io: HopperBackwardIO,
    shared,
    scheduler: TileScheduler,
    params: HopperBackwardParams,
    CONSUMER: gl.constexpr,
):
    """Gradients of one consumer's keys of each work tile; zeros if no query sees any."""
    D: gl.constexpr = shared.k.shape[-1]
    E: gl.constexpr = shared.v.shape[-1]
    visit = gl.to_tensor(0)
    kv_count = gl.to_tensor(0)
    scheduler_state = PipelineState.start(SCHEDULER_STAGES)
    index = next_index(scheduler, stride_before(), scheduler_state)
    while index < scheduler.count:
        tile = key_tile(params, index)
        blocks = m_block_range(params, tile)
        if is_visited(params, tile, blocks):
            dk, dv, visit = backward_mainloop(
                shared, visit, blocks, params, tile, kv_count, CONSUMER
            )
            kv_count += 1
        else:
            dk = gl.zeros([ROWS, D], gl.float32, scores_layout(io.dk.dtype, D))
            dv = gl.zeros([ROWS, E], gl.float32, scores_layout(io.dv.dtype, E))
            wait_for_outlet()
        finish(io, shared, dk, dv, params, tile, visit, CONSUMER)
        scheduler_state = scheduler_state.next()
        index = next_index(scheduler, index, scheduler_state)
    wait_for_outlet()
