"""The MLA decode for Hopper with up to 32 query rows: products have keys, or columns of values, as
their rows, and query rows as their columns.

A product has 64 rows in any case, but can have as few columns as there are query rows. So queries
take little memory, one warpgroup holds the whole output, and no consumer waits for another.

The kernel is `mla_swap_ab`, launched by `launch/bind/mla.py`. A program has one producer
warp, which loads keys, and one consumer warpgroup. Programs share the keys of the call as those of
the portable decode do, see split_kv/work.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from heedful.kernels.args.hopper_decode import HopperDecodeParams
from heedful.kernels.args.mla import MlaIO
from heedful.kernels.hopper.decode.keys import keys_of_segment
from heedful.kernels.hopper.decode.share import look, own_share
from heedful.kernels.hopper.mla.boxes import BOXES, KEYS, WIDTH
from heedful.kernels.hopper.mla.producer import latent_pages, load_box
from heedful.kernels.hopper.mla.swap_ab_consumer import SwapShared, box_at, swap_ab_consumer
from heedful.kernels.hopper.sm90.pipeline import Pipeline, PipelineState


@gluon.jit
def load_segment(io, ring, segment, block, params):
    """Loads the keys of a segment, each box once its memory is free."""
    keys = keys_of_segment(params, segment)
    for number in range(segment.start, segment.stop):
        col = number * KEYS
        # Page numbers are loaded before there is room for keys.
        pages = latent_pages(params, keys, col, io.k.block_type.shape[-2])
        for box in gl.static_range(BOXES):
            at = box_at(block, box)
            mbarrier.wait(ring.empty.index(at), block.phase ^ 1)
            load_box(io, ring.boxes.index(at), ring.full.index(at), params, keys, col, pages, box)
        block = block.next()
    return block


@gluon.jit
def swap_ab_producer(io, ring, share, params):
    """Loads the keys of all segments of this program."""
    block = PipelineState.start(params.tile.STAGES)
    while share.x < share.end:
        segment, share = look(share, params)
        block = load_segment(io, ring, segment, block, params)


@gluon.jit
def mla_swap_ab(io: MlaIO, params: HopperDecodeParams):
    """Stores out (B, M, H, E) and lse (B, H, M)."""
    PRODUCER_REGS: gl.constexpr = params.tile.PRODUCER_REGS
    shared = SwapShared.allocate(io.k.dtype, params.tile.BLOCK_M)
    ring = Pipeline.of_tiles(io.k.dtype, KEYS, WIDTH, params.tile.STAGES * BOXES, 1)
    share, _empty = own_share(params)
    fence_async_shared()
    gl.warp_specialize(
        [
            (swap_ab_consumer, (io, shared, ring, share, params)),
            (swap_ab_producer, (io, ring, share, params)),
        ],
        [1],
        [PRODUCER_REGS],
    )
