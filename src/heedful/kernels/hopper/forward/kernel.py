"""Attention forward for sm_90 in bfloat16, float16 and e4m3.

The kernel is `forward`, launched by `launch/bind/hopper.py` and `hopper_fp8.py`. A program has one
producer warp, which loads tiles by TMA, and one to four consumer warpgroups of 64 query rows each.
Programs take work tiles from the tile scheduler. Keys and values of 8 bits beside queries of 16
are converted by further warps (conversion.py).

fp8 differs in three ways. V is transposed first (fp8/transpose_v.py). P is rounded to e4m3 in
registers (fp8/softmax.py). The matrix unit's accumulators keep only about 14 bits, so output sums
are promoted to float32 (sm90/promotion.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra import cuda

from heedful.kernels.args.hopper import HopperIO, HopperParams, TransposeV
from heedful.kernels.hopper.forward.consumer import consumer
from heedful.kernels.hopper.forward.conversion import KEY_WARPS, VALUE_WARPS, convert
from heedful.kernels.hopper.forward.epilogue import Outputs
from heedful.kernels.hopper.forward.kv_pipeline import KVPipeline
from heedful.kernels.hopper.forward.producer import producer
from heedful.kernels.hopper.fp8.transpose_v import RAW_STAGES, TRANSPOSE_WARPS, transpose_v
from heedful.kernels.hopper.sm90.pipeline import Pipeline
from heedful.kernels.hopper.sm90.roles import start_roles
from heedful.kernels.hopper.sm90.tile_scheduler import TileScheduler


@gluon.jit
def forward(io: HopperIO, params: HopperParams, transpose: TransposeV, BEGINS_EARLY: gl.constexpr):
    """out = softmax(scale q k^T + score mods + mask) v over (batch, head, row, dim) tensor maps.

    Fields of absent operands are None. transpose: the group of warps that transpose V, else None.
    BEGINS_EARLY: the launch is programmatic. The kernel before it writes nothing that this one
    reads.
    """
    CONSUMERS: gl.constexpr = params.tile.CONSUMERS
    CONSUMER_REGS: gl.constexpr = params.tile.CONSUMER_REGS
    PRODUCER_REGS: gl.constexpr = params.tile.PRODUCER_REGS
    TRANSPOSES: gl.constexpr = transpose is not None
    CONVERTS: gl.constexpr = params.stages.STORED_STAGES > 0
    q = Pipeline.allocate(io.q, params.stages.Q_STAGES, 1, params.tile.TAIL_D, CONSUMERS)
    if CONVERTS:
        kv = KVPipeline.converted(io, params)
    else:
        kv = KVPipeline.allocate(io, params)
    outputs = Outputs.allocate(io, q, kv, params)
    scheduler = TileScheduler.of(params, CONSUMERS + 2 * CONVERTS)
    if TRANSPOSES:
        raw = Pipeline.allocate(transpose.v, RAW_STAGES, 1)
    if CONVERTS:
        descales = params.fp8.descales
        SIGNED: gl.constexpr = descales.k.ptr is not None
        stored = KVPipeline.stored(io, params)
    fence_async_shared()
    if TRANSPOSES:
        start_roles(
            CONSUMERS,
            [
                (consumer, (outputs, q, kv, scheduler, params), 4, CONSUMER_REGS),
                (producer, (io, q, kv, scheduler, transpose, params), 1, PRODUCER_REGS),
                (transpose_v, (transpose, raw), TRANSPOSE_WARPS, PRODUCER_REGS),
            ],
        )
    elif CONVERTS:
        start_roles(
            CONSUMERS,
            [
                (consumer, (outputs, q, kv, scheduler, params), 4, CONSUMER_REGS),
                (producer, (io, q, stored, scheduler, transpose, params), 1, PRODUCER_REGS),
                (
                    convert,
                    (stored.k, kv.k, descales.k, scheduler, params, SIGNED),
                    KEY_WARPS,
                    PRODUCER_REGS,
                ),
                (
                    convert,
                    (stored.v, kv.v, descales.v, scheduler, params, False),
                    VALUE_WARPS,
                    PRODUCER_REGS,
                ),
            ],
        )
    else:
        start_roles(
            CONSUMERS,
            [
                (consumer, (outputs, q, kv, scheduler, params), 4, CONSUMER_REGS),
                (producer, (io, q, kv, scheduler, transpose, params), 1, PRODUCER_REGS),
            ],
        )
    if BEGINS_EARLY:
        # A kernel that waits for this one must wait for the kernel before this one, too.
        cuda.gdc_wait()
