"""A consumer warpgroup of the backward: it computes dK and dV of its 64 keys of every work tile,
and stores them. Where `kernel.py` says so, both consumers are one role of eight warps, which share
machine code and differ by a number (`this_consumer`).

M query rows, N keys (64), C columns of a part of a gradient.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from heedful.kernels.args.hopper_backward import HopperBackwardIO, HopperBackwardParams
from heedful.kernels.hopper.backward.columns import (
    no_gradients,
    part_columns,
    part_of,
    scaled,
)
from heedful.kernels.hopper.backward.dq.sums import store_registers
from heedful.kernels.hopper.backward.mainloop import backward_mainloop
from heedful.kernels.hopper.backward.p_scale import p_descale
from heedful.kernels.hopper.backward.shared import CONSUMERS, wait_for_outlet
from heedful.kernels.hopper.backward.tile import (
    is_visited,
    key_tile,
    m_block_range,
    next_index,
    partial_row,
    stride_before,
)
from heedful.kernels.hopper.sm90 import barrier
from heedful.kernels.hopper.sm90.compat import inline_asm, reinterpret, tma_store
from heedful.kernels.hopper.sm90.mma import ROWS
from heedful.kernels.hopper.sm90.pipeline import PipelineState, matrix, stage_of
from heedful.kernels.hopper.sm90.sequences import box
from heedful.kernels.hopper.sm90.tile_scheduler import SCHEDULER_STAGES, TileScheduler


@gluon.jit
def this_consumer():
    """The number of a thread's consumer, where both consumers are one role. The compiler treats it
    as one number of all eight warps, and tensors as the same in both warpgroups."""
    return inline_asm("mov.u32 $0, %tid.x; shr.u32 $0, $0, 7;", "=r", [], gl.int32)


@gluon.jit
def with_zeros(x_NC, row, params, tile):
    """One part of the gradients of keys from `row` on, with zeros for keys that are not in use."""
    if params.seqs.used_k is not None or params.mods.longest_k is not None:
        layout: gl.constexpr = gl.SliceLayout(1, x_NC.type.layout)
        key_N = row + gl.arange(0, ROWS, layout=layout)
        x_NC = gl.where((key_N < tile.seq.len_k)[:, None], x_NC, 0.0)
    return x_NC


@gluon.jit
def store_rows(desc, memory, others, x_NC, COLUMNS: gl.constexpr, params, tile, CONSUMER, column=0):
    """Stores the gradients of one consumer's keys by TMA, through its shared memory. others: that
    of both consumers, if they are one role, of which one thread stores for both. column: the first
    one."""
    PACKED: gl.constexpr = params.seqs.cu_k is not None
    row = tile.col + CONSUMER * ROWS
    if len(x_NC) == 1:
        x = with_zeros(x_NC[0], row, params, tile)
        memory.store(x.to(desc.dtype).reshape(memory.shape))
    else:
        rows = matrix(memory, ROWS, memory.shape[-1])
        for part in gl.static_range(len(x_NC)):
            x = with_zeros(x_NC[part], row, params, tile)
            part_of(rows, COLUMNS, part).store(x.to(desc.dtype))
    fence_async_shared()
    if gl.num_warps() == 8:
        for i in gl.static_range(CONSUMERS):
            row = tile.col + i * ROWS
            seq = tile.seq
            at = box(PACKED, tile.batch, tile.kv_head, seq.token_k, seq.stored_k, row)
            tma_store(desc, at, others[i])
    else:
        seq = tile.seq
        coordinates = box(PACKED, tile.batch, tile.kv_head, seq.token_k, seq.stored_k, row)
        tma_store(desc, coordinates[:-1] + [column], memory)


@gluon.jit
def outlet(shared, desc, first: gl.constexpr, CONSUMER):
    """Shared memory for gradients of one consumer's keys. This is the memory of its dS, which one
    gradient or both fill. first: whether the gradient is the first of the two."""
    shape: gl.constexpr = desc.block_type.shape
    FIT: gl.constexpr = ds_bytes(shared) // desc.block_type.nbytes
    boxes = reinterpret(shared.ds, desc.dtype, [CONSUMERS * FIT] + shape, desc.layout)
    return boxes.index(CONSUMER * FIT + (0 if first else FIT - 1))


@gluon.constexpr_function
def ds_bytes(shared):
    """Bytes of one consumer's dS, in all stages."""
    boxes, rows, columns = shared.ds.shape
    return boxes // 2 * rows * columns * 2


@gluon.jit
def store_gradients(io, shared, dk, dv, params, tile, visit, CONSUMER):
    """Stores dV and dK through the memory of dS, once dQ has been computed from it."""
    D: gl.constexpr = io.dk.block_type.shape[-1]
    E: gl.constexpr = io.dv.block_type.shape[-1]
    for ahead in gl.static_range(params.tile.DS_STAGES):
        state = stage_of(visit + ahead, params.tile.DS_STAGES)
        barrier.wait(shared.ds_empty.index(state.index), state.phase ^ 1)
    out = outlet(shared, io.dv, True, CONSUMER)
    others = outlet(shared, io.dv, True, 0), outlet(shared, io.dv, True, 1)
    store_rows(io.dv, out, others, dv, params.tile.E, params, tile, CONSUMER)
    if ds_bytes(shared) < 2 * ROWS * (D + E):
        wait_for_outlet()
    dk = scaled(dk, params.sizes.scale * p_descale(io.q.dtype))
    out = outlet(shared, io.dk, False, CONSUMER)
    others = outlet(shared, io.dk, False, 0), outlet(shared, io.dk, False, 1)
    store_rows(io.dk, out, others, dk, params.tile.D, params, tile, CONSUMER)


@gluon.jit
def store_partial(x_NC, before, COLUMNS: gl.constexpr, params, tile, CONSUMER):
    """Stores one gradient of one consumer's keys for the epilogue, in the order of registers.
    COLUMNS: columns of the gradient. before: columns of the gradients before it in memory."""
    ALL: gl.constexpr = params.tile.D + params.tile.E
    place = (partial_row(params, tile) + CONSUMER * ROWS) * ALL + before * ROWS
    for part in gl.static_range(len(x_NC)):
        at = place + part * part_columns(COLUMNS, 0) * ROWS
        store_registers(params.order.partials + at, x_NC[part])


@gluon.jit
def store_gradient(
    desc,
    memory,
    x_NC,
    before,
    COLUMNS: gl.constexpr,
    params,
    tile,
    BOX: gl.constexpr,
    column=0,
):
    """Stores one gradient of 64 keys, or one split's addend of it. BOX: which 64 keys of the
    tile. before, column: as of `store_partial` and `store_rows`."""
    if params.order.partials is None:
        store_rows(desc, memory, (), x_NC, COLUMNS, params, tile, BOX, column)
    else:
        store_partial(x_NC, before, COLUMNS, params, tile, BOX)


@gluon.jit
def send_gradients(io, shared, dk, dv, params, tile, visit, CONSUMER):
    """Scales and stores dV and dK, or one split's addends of them."""
    E: gl.constexpr = params.tile.E
    dv = scaled(dv, p_descale(io.q.dtype))
    if params.dropout.IS_ON:
        dv = scaled(dv, params.dropout.inverse_keep)
    if params.order.partials is None:
        store_gradients(io, shared, dk, dv, params, tile, visit, CONSUMER)
    else:
        store_partial(dv, 0, E, params, tile, CONSUMER)
        dk = scaled(dk, params.sizes.scale * p_descale(io.q.dtype))
        store_partial(dk, E, params.tile.D, params, tile, CONSUMER)


@gluon.jit
def backward_consumer(
    io: HopperBackwardIO,
    shared,
    scheduler: TileScheduler,
    params: HopperBackwardParams,
    CONSUMER,
):
    """Computes the gradients of one consumer's keys of each work tile; zeros if no query sees any
    of them."""
    if gl.num_warps() == 8:
        CONSUMER = this_consumer()
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
            dk = no_gradients(params.tile.D, io.dk.dtype)
            dv = no_gradients(params.tile.E, io.dv.dtype)
            wait_for_outlet()
        send_gradients(io, shared, dk, dv, params, tile, visit, CONSUMER)
        scheduler_state = scheduler_state.next()
        index = next_index(scheduler, index, scheduler_state)
    wait_for_outlet()
