"""The MLA decode for Hopper: attention of few queries over latent vectors, whose first 512 columns
are values.

The kernel is `mla`, launched by `launch/bind/mla.py`. A program has one producer warp, which loads
keys, and two consumer warpgroups, which have half of the output's columns each. Programs share the
keys of the call as those of the portable decode do, see split_kv/work.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from heedful.kernels.args.hopper_decode import HopperDecodeParams
from heedful.kernels.args.mla import MlaIO
from heedful.kernels.hopper.decode.share import own_share
from heedful.kernels.hopper.mla.consumer import mla_consumer
from heedful.kernels.hopper.mla.producer import mla_producer
from heedful.kernels.hopper.mla.shared import BLOCKS, MlaShared
from heedful.kernels.hopper.sm90.roles import start_roles


@gluon.jit
def mla(io: MlaIO, params: HopperDecodeParams):
    """Stores out (B, M, H, E) and lse (B, H, M)."""
    CONSUMER_REGS: gl.constexpr = params.tile.CONSUMER_REGS
    PRODUCER_REGS: gl.constexpr = params.tile.PRODUCER_REGS
    shared = MlaShared.allocate(io.k.dtype, io.q_map is not None)
    share, _empty = own_share(params)
    fence_async_shared()
    start_roles(
        BLOCKS,
        [
            (mla_consumer, (io, shared, share, params), 4, CONSUMER_REGS),
            (mla_producer, (io, shared, share, params), 1, PRODUCER_REGS),
        ],
    )
