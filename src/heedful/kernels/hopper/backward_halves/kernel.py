"""Attention backward for sm_90 in bfloat16 and float16, head dims above 256 up to 512.

The kernel is `backward_halves`, launched by `launch/bind/hopper_backward.py` as `backward` is. A
work tile is 64 keys. A cluster of two programs computes it, each of which has half of the columns
of all inputs and gradients. A program has two consumer warpgroups, a producer warp, and three warps
that fill its warpgroup.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra import cuda

from heedful.kernels.args.hopper_backward import HopperBackwardIO, HopperBackwardParams
from heedful.kernels.hopper.backward.shared import CONSUMERS
from heedful.kernels.hopper.backward.tile import work_tiles
from heedful.kernels.hopper.backward_halves.consumer import halves_consumer
from heedful.kernels.hopper.backward_halves.producer import halves_producer
from heedful.kernels.hopper.backward_halves.shared import HALVES, HalvesShared
from heedful.kernels.hopper.forward_wide.cluster import tell_barriers
from heedful.kernels.hopper.forward_wide.producer import bystander
from heedful.kernels.hopper.sm90.roles import start_roles


@gluon.jit
def backward_halves(io: HopperBackwardIO, params: HopperBackwardParams):
    """As `backward` of hopper/backward/kernel.py."""
    CONSUMER_REGS: gl.constexpr = params.tile.CONSUMER_REGS
    PRODUCER_REGS: gl.constexpr = params.tile.PRODUCER_REGS
    shared = HalvesShared.allocate(io, params)
    count = work_tiles(params)
    fence_async_shared()
    tell_barriers(HALVES)
    # The launch begins early (KernelCall.programmatic). From here on, the prologue's results are in
    # memory.
    cuda.gdc_wait()
    start_roles(
        CONSUMERS,
        [
            (halves_consumer, (io, shared, params, count), 4, CONSUMER_REGS),
            (halves_producer, (io, shared, params, count), 1, PRODUCER_REGS),
            # A role's warps are a power of two.
            (bystander, (HALVES,), 2, PRODUCER_REGS),
            (bystander, (HALVES,), 1, PRODUCER_REGS),
        ],
    )
