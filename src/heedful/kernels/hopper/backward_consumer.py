"""A consumer of the Hopper backward: dK and dV of its 64 keys of every work tile, a half of dQ."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from heedful.kernels.args import HopperBackwardIO, HopperBackwardParams
from heedful.kernels.hopper import barrier
from heedful.kernels.hopper.backward_mainloop import backward_mainloop
from heedful.kernels.hopper.backward_tile import key_tile, m_block_range
from heedful.kernels.hopper.compat import reinterpret, tma_store
from heedful.kernels.hopper.mma import ROWS, scores_layout
from heedful.kernels.hopper.sequences import box


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
def store_gradients(io, shared, dk, dv, params, tile, visit, CONSUMER: gl.constexpr):
    """dV leaves through the memory of values, which no other consumer reads, and dK through that
    of dQ."""
    if params.dropout.IS_ON:
        dv *= params.dropout.inverse_keep
    store_rows(io.dv, shared.v.index(CONSUMER), dv, params, tile, CONSUMER)
    barrier.wait(shared.dq_empty.index(CONSUMER), (visit & 1) ^ 1)
    shape: gl.constexpr = io.dk.block_type.shape
    memory = reinterpret(shared.dq.index(CONSUMER), io.dk.dtype, shape, io.dk.layout)
    store_rows(io.dk, memory, dk * params.sizes.scale, params, tile, CONSUMER)
    tma.store_wait(0)


@gluon.jit
def store_no_gradients(io, shared, params, tile, CONSUMER: gl.constexpr):
    """Zeros, for keys that no query sees."""
    D: gl.constexpr = io.dk.block_type.shape[-1]
    E: gl.constexpr = io.dv.block_type.shape[-1]
    shape: gl.constexpr = io.dk.block_type.shape
    dk = gl.zeros([ROWS, D], gl.float32, scores_layout(io.dk.dtype, D))
    dv = gl.zeros([ROWS, E], gl.float32, scores_layout(io.dv.dtype, E))
    memory = reinterpret(shared.dq.index(CONSUMER), io.dk.dtype, shape, io.dk.layout)
    store_rows(io.dk, memory, dk, params, tile, CONSUMER)
    tma.store_wait(0)
    gl.barrier()
    shape_v: gl.constexpr = io.dv.block_type.shape
    memory_v = reinterpret(shared.dq.index(CONSUMER), io.dv.dtype, shape_v, io.dv.layout)
    store_rows(io.dv, memory_v, dv, params, tile, CONSUMER)
    tma.store_wait(0)
    gl.barrier()


@gluon.jit
def backward_consumer(
    io: HopperBackwardIO, shared, params: HopperBackwardParams, CONSUMER: gl.constexpr
):
    """Gradients of one consumer's keys of each work tile."""
    visit = gl.to_tensor(0)
    kv_phase = gl.to_tensor(0)
    index = gl.program_id(0)
    while index < params.order.tiles:
        tile = key_tile(params, index)
        blocks = m_block_range(params, tile)
        if blocks.end > blocks.begin:
            barrier.wait(shared.k_full.index(0), kv_phase)
            barrier.wait(shared.v_full.index(0), kv_phase)
            dk, dv, visit = backward_mainloop(shared, visit, blocks, params, tile, CONSUMER)
            store_gradients(io, shared, dk, dv, params, tile, visit, CONSUMER)
            kv_phase ^= 1
            mbarrier.arrive(shared.kv_empty.index(0), count=1)
        else:
            barrier.wait(shared.dq_empty.index(CONSUMER), (visit & 1) ^ 1)
            store_no_gradients(io, shared, params, tile, CONSUMER)
        index += gl.num_programs(0)
