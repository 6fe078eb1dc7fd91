"""Attention forward: one producer warp, and consumer warpgroups of 64 query rows each.

fp8 differs in three ways: V comes transposed (fp8/transpose_v.py), P is rounded to e4m3 in
registers (fp8/softmax.py), and output sums leave the matrix unit's accumulators, which keep some 14
bits, for float32 ones (sm90/promotion.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra import cuda

from heedful.kernels.args.hopper import HopperIO, HopperParams, TransposeV
from heedful.kernels.hopper.forward.consumer import consumer
from heedful.kernels.hopper.forward.epilogue import Outputs
from heedful.kernels.hopper.forward.kv_pipeline import KVPipeline
from heedful.kernels.hopper.forward.producer import producer
from heedful.kernels.hopper.fp8.transpose_v import RAW_STAGES, TRANSPOSE_WARPS, transpose_v
from heedful.kernels.hopper.sm90.pipeline import Pipeline
from heedful.kernels.hopper.sm90.tile_scheduler import TileScheduler


@gluon.jit
def forward(io: HopperIO, params: HopperParams, transpose: TransposeV, BEGINS_EARLY: gl.constexpr):
    """out = softmax(scale q k^T + score mods + mask) v over (batch, head, row, dim) tensor maps.

    What a call lacks is None. transpose: for warps that transpose V, else None. BEGINS_EARLY: the
    launch is programmatic. The one before it makes nothing that this one reads.
    """
    CONSUMERS: gl.constexpr = params.tile.CONSUMERS
    CONSUMER_REGS: gl.constexpr = params.tile.CONSUMER_REGS
    PRODUCER_REGS: gl.constexpr = params.tile.PRODUCER_REGS
    TRANSPOSES: gl.constexpr = transpose is not None
    q = Pipeline.allocate(io.q, params.stages.Q_STAGES, 1, params.tile.TAIL_D, CONSUMERS)
    kv = KVPipeline.allocate(io, params)
    outputs = Outputs.allocate(io, q, kv, params)
    scheduler = TileScheduler.of(params)
    if TRANSPOSES:
        raw = Pipeline.allocate(transpose.v, RAW_STAGES, 1)
    fence_async_shared()
    # A partition is compiled on its own, so that each consumer must be spelled out.
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (consumer, (outputs, q, kv, scheduler, params, 0)),
                (producer, (io, q, kv, scheduler, transpose, params)),
            ],
            [1],
            [PRODUCER_REGS],
        )
    elif CONSUMERS == 2 and TRANSPOSES:
        gl.warp_specialize(
            [
                (consumer, (outputs, q, kv, scheduler, params, 0)),
                (consumer, (outputs, q, kv, scheduler, params, 1)),
                (producer, (io, q, kv, scheduler, transpose, params)),
                (transpose_v, (transpose, raw)),
            ],
            [4, 1, TRANSPOSE_WARPS],
            [CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consumer, (outputs, q, kv, scheduler, params, 0)),
                (consumer, (outputs, q, kv, scheduler, params, 1)),
                (producer, (io, q, kv, scheduler, transpose, params)),
            ],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
    elif CONSUMERS == 3 and TRANSPOSES:
        gl.warp_specialize(
            [
                (consumer, (outputs, q, kv, scheduler, params, 0)),
                (consumer, (outputs, q, kv, scheduler, params, 1)),
                (consumer, (outputs, q, kv, scheduler, params, 2)),
                (producer, (io, q, kv, scheduler, transpose, params)),
                (transpose_v, (transpose, raw)),
            ],
            [4, 4, 1, TRANSPOSE_WARPS],
            [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (consumer, (outputs, q, kv, scheduler, params, 0)),
                (consumer, (outputs, q, kv, scheduler, params, 1)),
                (consumer, (outputs, q, kv, scheduler, params, 2)),
                (producer, (io, q, kv, scheduler, transpose, params)),
            ],
            [4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )
    else:
        gl.static_assert(CONSUMERS == 4 and not TRANSPOSES)
        gl.warp_specialize(
            [
                (consumer, (outputs, q, kv, scheduler, params, 0)),
                (consumer, (outputs, q, kv, scheduler, params, 1)),
                (consumer, (outputs, q, kv, scheduler, params, 2)),
                (consumer, (outputs, q, kv, scheduler, params, 3)),
                (producer, (io, q, kv, scheduler, transpose, params)),
            ],
            [4, 4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )
    if BEGINS_EARLY:
        # Who waits for this kernel waits for the one before it, too.
        cuda.gdc_wait()
