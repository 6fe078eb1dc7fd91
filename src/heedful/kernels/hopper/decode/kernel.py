"""The Hopper decode: attention of few queries over a cache in 16 bits.

The kernel is `decode`, launched by `launch/bind/hopper_decode.py`. A program has one producer warp,
which loads keys and values by TMA, far ahead of one consumer warpgroup. Programs share the keys of
the call as those of the portable decode do, see split_kv/work.py. The producer goes on to a
program's next sequence while the consumer still computes this one, so memory has no pause between
sequences.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra import cuda

from heedful.kernels.args.hopper_decode import (
    HopperDecodeAppend,
    HopperDecodeIO,
    HopperDecodeParams,
)
from heedful.kernels.hopper.decode.consumer import decode_consumer
from heedful.kernels.hopper.decode.producer import decode_producer
from heedful.kernels.hopper.decode.share import own_share
from heedful.kernels.hopper.sm90.mma import ROWS
from heedful.kernels.hopper.sm90.pipeline import Pipeline


@gluon.jit
def ring_of(desc, params, DIM: gl.constexpr):
    """The ring of keys or values. A tile is one box or, in pages, several."""
    STAGES: gl.constexpr = params.tile.STAGES
    if params.kv.table is None:
        return Pipeline.allocate(desc, STAGES, 1)
    else:
        return Pipeline.of_tiles(desc.dtype, params.tile.BLOCK_N, DIM, STAGES, 1)


@gluon.jit
def decode(io: HopperDecodeIO, params: HopperDecodeParams, append: HopperDecodeAppend):
    """Stores out (B, M, H, E) and lse (B, H, M). append: new rows for the cache, or an absent
    group."""
    if params.work.short_q is not None:
        # The kernel of the long sequences starts on the SMs of programs that have ended.
        cuda.gdc_launch_dependents()
    PRODUCER_REGS: gl.constexpr = params.tile.PRODUCER_REGS
    D: gl.constexpr = params.tile.BLOCK_D
    dtype: gl.constexpr = io.k.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    q = gl.allocate_shared_memory(dtype, [ROWS, D], layout)
    k = ring_of(io.k, params, D)
    v = ring_of(io.v, params, params.tile.BLOCK_E)
    share, empty = own_share(params)
    fence_async_shared()
    gl.warp_specialize(
        [
            (decode_consumer, (io, q, k, v, share, empty, params, append)),
            (decode_producer, (io, k, v, share, params, append)),
        ],
        [1],
        [PRODUCER_REGS],
    )
