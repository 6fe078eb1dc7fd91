"""The MLA decode for Hopper over latent vectors of 8 bits, with 64 query rows a tile: two consumers
that have half of the output's columns each, so that no value is converted twice.

The kernel is `mla_converting_pair`, launched by `launch/bind/mla.py`. Its producer is that of
`mla_converting`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from heedful.kernels.args.hopper_decode import HopperDecodeParams
from heedful.kernels.args.mla import StoredLatentIO
from heedful.kernels.hopper.decode.keys import keys_of_segment
from heedful.kernels.hopper.decode.share import look, own_share
from heedful.kernels.hopper.mla.boxes import KEYS
from heedful.kernels.hopper.mla.conversion import StoredKeys
from heedful.kernels.hopper.mla.converting import load_stored
from heedful.kernels.hopper.mla.converting_pair_consumer import converting_pair_consumer
from heedful.kernels.hopper.mla.converting_pair_shared import PairShared
from heedful.kernels.hopper.mla.shared import BLOCKS
from heedful.kernels.hopper.sm90.pipeline import PipelineState
from heedful.kernels.hopper.sm90.roles import start_roles


@gluon.jit
def pair_producer(io, keys, share, params):
    """Loads the keys of all segments of this program, block by block."""
    block = PipelineState.start(params.tile.STAGES)
    while share.x < share.end:
        segment, share = look(share, params)
        of = keys_of_segment(params, segment)
        for number in range(BLOCKS * segment.start, BLOCKS * segment.stop):
            block = load_stored(io, keys, block, params, of, number * KEYS, True)


@gluon.jit
def mla_converting_pair(io: StoredLatentIO, params: HopperDecodeParams):
    """Stores out (B, M, H, E) and lse (B, H, M)."""
    CONSUMER_REGS: gl.constexpr = params.tile.CONSUMER_REGS
    PRODUCER_REGS: gl.constexpr = params.tile.PRODUCER_REGS
    SCALED: gl.constexpr = io.scales is not None
    shared = PairShared.allocate(io.rest_k.dtype, SCALED, io.q_map is not None)
    keys = StoredKeys.allocate(io.k.dtype, io.rest_k.dtype, params.tile.STAGES, SCALED)
    share, _empty = own_share(params)
    fence_async_shared()
    start_roles(
        BLOCKS,
        [
            (converting_pair_consumer, (io, shared, keys, share, params), 4, CONSUMER_REGS),
            (pair_producer, (io, keys, share, params), 1, PRODUCER_REGS),
        ],
    )
