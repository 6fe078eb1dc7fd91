"""Attention backward for sm_90 in bfloat16 and float16, head dims up to 128: dK and dV of every key
tile, and dQ summed over key tiles in float32.

The kernel is `backward`, launched by `launch/bind/hopper_backward.py` between `prologue.py` and
`dq/epilogue.py`. A program has two consumer warpgroups of 64 keys each, a warpgroup that computes
dQ, a producer warp, and one or two warps that add dQ to its sums in global memory.
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
from heedful.kernels.hopper.sm90.roles import start_roles


@gluon.jit
def backward(io: HopperBackwardIO, params: HopperBackwardParams):
    """Stores dk and dv, (batch, head, row, dim) tensor maps, and adds dq without the scale of
    scores to dq_accum, which the prologue has cleared."""
    CONSUMER_REGS: gl.constexpr = params.tile.CONSUMER_REGS
    DQ_REGS: gl.constexpr = params.tile.DQ_REGS
    PRODUCER_REGS: gl.constexpr = params.tile.PRODUCER_REGS
    shared = BackwardShared.allocate(io, params)
    # The warps that compute and add dQ read the scheduler's ring, too.
    # With eight warps, one role has both consumers: their loops then share machine code, which has
    # to fit the instruction cache (32 KiB).
    ROLES: gl.constexpr = 1 if gl.num_warps() == 8 else CONSUMERS
    scheduler = work_scheduler(params, ROLES + 1 + adders(params))
    fence_async_shared()
    # The launch begins early (KernelCall.programmatic). From here on, the prologue's results are in
    # memory.
    cuda.gdc_wait()
    start_roles(
        ROLES,
        [
            (backward_consumer, (io, shared, scheduler, params), gl.num_warps(), CONSUMER_REGS),
            (backward_dq, (io, shared, scheduler, params), 4, DQ_REGS),
            (backward_producer, (io, shared, scheduler, params), 1, PRODUCER_REGS),
            (backward_adder, (io, shared, scheduler, params, 0), 1, PRODUCER_REGS),
            (backward_adder, (io, shared, scheduler, params, 1), adders(params) - 1, PRODUCER_REGS),
        ],
    )
