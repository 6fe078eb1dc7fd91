"""Attention backward: dK and dV of every key tile, and dQ summed over key tiles in float32.

A program has two consumer warpgroups of 64 keys each, one that makes dQ, a warp that loads, and one
or two that add dQ to its sums in global memory. prologue.py comes ahead,
dq/epilogue.py behind.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra import cuda

from heedful.kernels.args.hopper_backward import HopperBackwardIO, HopperBackwardParams
from heedful.kernels.hopper.backward.consumer import backward_consumer
from heedful.kernels.hopper.backward.dq.warpgroup import backward_dq
from heedful.kernels.hopper.backward.producer import backward_adder, backward_producer
from heedful.kernels.hopper.backward.shared import CONSUMERS, BackwardShared, adders
from heedful.kernels.hopper.backward.tile import work_scheduler


@gluon.jit
def backward(io: HopperBackwardIO, params: HopperBackwardParams):
    """dk, dv of (batch, head, row, dim) tensor maps, and dq_accum, cleared before, with dq less its
    scale added to it."""
    CONSUMER_REGS: gl.constexpr = params.tile.CONSUMER_REGS
    DQ_REGS: gl.constexpr = params.tile.DQ_REGS
    PRODUCER_REGS: gl.constexpr = params.tile.PRODUCER_REGS
    shared = BackwardShared.allocate(io, params)
    # Who makes dQ and who adds it are told of work tiles, too.
    scheduler = work_scheduler(params, CONSUMERS + 1 + adders(params))
    fence_async_shared()
    # Begun early (KernelCall.programmatic): what the prologue wrote is in memory from here on.
    cuda.gdc_wait()
    ADDERS: gl.constexpr = adders(params)
    if ADDERS == 1:
        gl.warp_specialize(
            [
                (backward_consumer, (io, shared, scheduler, params, 0)),
                (backward_consumer, (io, shared, scheduler, params, 1)),
                (backward_dq, (io, shared, scheduler, params)),
                (backward_producer, (io, shared, scheduler, params)),
                (backward_adder, (io, shared, scheduler, params, 0)),
            ],
            [4, 4, 1, 1],
            [CONSUMER_REGS, DQ_REGS, PRODUCER_REGS, PRODUCER_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (backward_consumer, (io, shared, scheduler, params, 0)),
                (backward_consumer, (io, shared, scheduler, params, 1)),
                (backward_dq, (io, shared, scheduler, params)),
                (backward_producer, (io, shared, scheduler, params)),
                (backward_adder, (io, shared, scheduler, params, 0)),
                (backward_adder, (io, shared, scheduler, params, 1)),
            ],
            [4, 4, 1, 1, 1],
            [CONSUMER_REGS, DQ_REGS, PRODUCER_REGS, PRODUCER_REGS, PRODUCER_REGS],
        )
