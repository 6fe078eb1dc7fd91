"""Attention forward for sm_90 in bfloat16 and float16, head dims above 256 up to 512.

The kernel is `forward_wide`, launched by `launch/bind/hopper.py`. A program has one work tile of 64
query rows: two producer warps, a warpgroup that makes probabilities, and two that have half of the
output's columns each. Two programs of neighbouring rows are a cluster, which shares what it loads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from heedful.kernels.args.hopper import HopperIO, HopperParams
from heedful.kernels.hopper.forward.epilogue import Outputs
from heedful.kernels.hopper.forward_wide.cluster import tell_barriers
from heedful.kernels.hopper.forward_wide.producer import (
    bystander,
    key_producer,
    value_producer,
)
from heedful.kernels.hopper.forward_wide.scores import score_consumer
from heedful.kernels.hopper.forward_wide.shared import WideShared
from heedful.kernels.hopper.forward_wide.values import value_consumer
from heedful.kernels.hopper.sm90.roles import start_roles
from heedful.kernels.hopper.sm90.tile_scheduler import TileScheduler


@gluon.jit
def forward_wide(io: HopperIO, params: HopperParams):
    """out = softmax(scale q k^T + score mods + mask) v over (batch, head, row, dim) tensor maps."""
    CLUSTER: gl.constexpr = params.tile.CONSUMERS
    VALUE_REGS: gl.constexpr = params.tile.CONSUMER_REGS
    PRODUCER_REGS: gl.constexpr = params.tile.PRODUCER_REGS
    BYSTANDERS: gl.constexpr = 2 if CLUSTER > 1 else 0
    shared = WideShared.allocate(io.q.dtype, params.stages.K_STAGES, CLUSTER)
    outputs = Outputs(io.out, io.lse)
    scheduler = TileScheduler.of(params, 1)
    fence_async_shared()
    tell_barriers(CLUSTER)
    start_roles(
        1,
        [
            (score_consumer, (shared, scheduler, params, CLUSTER), 4, VALUE_REGS),
            (value_consumer, (outputs, shared, scheduler, params, CLUSTER, 0), 4, VALUE_REGS),
            (value_consumer, (outputs, shared, scheduler, params, CLUSTER, 1), 4, VALUE_REGS),
            (key_producer, (io, shared, scheduler, params, CLUSTER), 1, PRODUCER_REGS),
            (value_producer, (io, shared, scheduler, params, CLUSTER), 1, PRODUCER_REGS),
            (bystander, (CLUSTER,), BYSTANDERS, PRODUCER_REGS),
        ],
    )
