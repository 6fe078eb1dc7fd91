"""The MLA decode for Hopper over latent vectors of 8 bits, with up to 32 query rows a tile: as
`swap_ab`, with products whose left operands are converted in registers.

The kernel is `mla_converting`, launched by `launch/bind/mla.py`. A program has one producer warp,
which loads keys as they are stored, and one consumer warpgroup. Two programs share an SM: one
converts while the other waits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from heedful.kernels.args.hopper_decode import HopperDecodeParams
from heedful.kernels.args.mla import StoredLatentIO
from heedful.kernels.hopper.decode.keys import keys_of_segment
from heedful.kernels.hopper.decode.share import look, own_share
from heedful.kernels.hopper.mla.boxes import KEYS
from heedful.kernels.hopper.mla.conversion import COLUMNS, GROUPS, StoredKeys
from heedful.kernels.hopper.mla.converting_consumer import ConvertingShared, converting_consumer
from heedful.kernels.hopper.mla.producer import latent_pages, load_parts
from heedful.kernels.hopper.sm90.compat import reinterpret
from heedful.kernels.hopper.sm90.pipeline import PipelineState


@gluon.constexpr_function
def parts_of(desc):
    """The shape of 64 keys as boxes of a tensor map."""
    shape = list(desc.block_type.shape)
    return [KEYS.value // shape[-2], *shape]


@gluon.jit
def load_group(io, keys, block, params, of, col, pages, GROUP: gl.constexpr):
    """Starts loading 128 columns of values of 64 keys, once their memory is free."""
    at = block.index * GROUPS + GROUP
    mbarrier.wait(keys.values.empty.index(at), block.phase ^ 1)
    full, memory = keys.values.full.index(at), keys.values.boxes.index(at)
    mbarrier.expect(full, KEYS * COLUMNS)
    parts = reinterpret(memory, io.k.dtype, parts_of(io.k), io.k.layout)
    load_parts(io.k, parts, full, params, of, col, pages, GROUP * COLUMNS)


@gluon.jit
def load_rest(io, keys, block, params, of, col, pages):
    """The same for the columns past the values, and for the scales of rows that have some."""
    mbarrier.wait(keys.rest.empty.index(block.index), block.phase ^ 1)
    full, memory = keys.rest.full.index(block.index), keys.rest.boxes.index(block.index)
    BYTES: gl.constexpr = keys.rest.dim * (io.rest_k.dtype.primitive_bitwidth // 8)
    SCALES: gl.constexpr = 0 if keys.scales is None else 4 * GROUPS
    mbarrier.expect(full, KEYS * (BYTES + SCALES))
    parts = reinterpret(memory, io.rest_k.dtype, parts_of(io.rest_k), io.rest_k.layout)
    load_parts(io.rest_k, parts, full, params, of, col, pages, params.tile.REST_COLUMN)
    if keys.scales is not None:
        memory = keys.scales.index(block.index)
        parts = reinterpret(memory, gl.float32, parts_of(io.scales), io.scales.layout)
        load_parts(io.scales, parts, full, params, of, col, pages, params.tile.SCALE_COLUMN)


@gluon.jit
def load_stored(io, keys, block, params, of, col, REST_FIRST: gl.constexpr):
    """Loads 64 keys from `col` on, each part once its memory is free. Returns the next block.
    REST_FIRST: the columns past the values come first."""
    # Page numbers are loaded before there is room for keys.
    pages = latent_pages(params, of, col, io.k.block_type.shape[-2])
    if REST_FIRST:
        load_rest(io, keys, block, params, of, col, pages)
    for group in gl.static_range(GROUPS):
        load_group(io, keys, block, params, of, col, pages, group)
    if not REST_FIRST:
        load_rest(io, keys, block, params, of, col, pages)
    return block.next()


@gluon.jit
def stored_producer(io, keys, share, params):
    """Loads the keys of all segments of this program."""
    block = PipelineState.start(params.tile.STAGES)
    while share.x < share.end:
        segment, share = look(share, params)
        of = keys_of_segment(params, segment)
        for number in range(segment.start, segment.stop):
            FIRST: gl.constexpr = keys.scales is not None
            block = load_stored(io, keys, block, params, of, number * KEYS, FIRST)


@gluon.jit
def mla_converting(io: StoredLatentIO, params: HopperDecodeParams):
    """Stores out (B, M, H, E) and lse (B, H, M)."""
    PRODUCER_REGS: gl.constexpr = params.tile.PRODUCER_REGS
    SCALED: gl.constexpr = io.scales is not None
    shared = ConvertingShared.allocate(params.tile.BLOCK_M, io.rest_k.dtype, SCALED)
    keys = StoredKeys.allocate(io.k.dtype, io.rest_k.dtype, params.tile.STAGES, SCALED)
    share, _empty = own_share(params)
    fence_async_shared()
    gl.warp_specialize(
        [
            (converting_consumer, (io, shared, keys, share, params)),
            (stored_producer, (io, keys, share, params)),
        ],
        [1],
        [PRODUCER_REGS],
    )
