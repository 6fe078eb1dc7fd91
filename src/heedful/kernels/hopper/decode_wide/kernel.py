"""The Hopper decode of head dims above 256 up to 512, with up to 32 query rows of a KV head.

The output of 64 rows would be more than a warpgroup's registers. So, as in `mla.swap_ab`, query
rows are columns of products, and there can be as few as 16.

The kernel is `decode_wide`, launched by `launch/bind/hopper_decode.py` as `decode` is. Its producer
is that kernel's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from heedful.kernels.args.hopper_decode import (
    HopperDecodeAppend,
    HopperDecodeIO,
    HopperDecodeParams,
)
from heedful.kernels.hopper.decode.kernel import ring_of
from heedful.kernels.hopper.decode.producer import decode_producer
from heedful.kernels.hopper.decode.share import own_share
from heedful.kernels.hopper.decode_wide.consumer import wide_consumer


@gluon.jit
def decode_wide(io: HopperDecodeIO, params: HopperDecodeParams, append: HopperDecodeAppend):
    """As `decode` of hopper/decode/kernel.py."""
    PRODUCER_REGS: gl.constexpr = params.tile.PRODUCER_REGS
    M: gl.constexpr = params.tile.BLOCK_M
    D: gl.constexpr = params.tile.BLOCK_D
    N: gl.constexpr = params.tile.BLOCK_N
    dtype: gl.constexpr = io.k.dtype
    of_q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, D], dtype)
    of_p: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, M], dtype)
    q = gl.allocate_shared_memory(dtype, [M, D], of_q)
    p = gl.allocate_shared_memory(dtype, [N, M], of_p)
    # Keys and values have tiles of one size, and take turns in one ring.
    ring = ring_of(io.k, params, D)
    share, empty = own_share(params)
    fence_async_shared()
    gl.warp_specialize(
        [
            (wide_consumer, (io, q, p, ring, share, empty, params, append)),
            (decode_producer, (io, ring, None, share, params, append)),
        ],
        [1],
        [PRODUCER_REGS],
    )
