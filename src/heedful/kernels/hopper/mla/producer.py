"""The producer warp of the MLA decode: it loads keys box by box, each as soon as its memory is
free."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from heedful.kernels.hopper.decode.keys import keys_of_segment
from heedful.kernels.hopper.decode.share import look
from heedful.kernels.hopper.mla.boxes import BOXES, KEYS, WIDTH
from heedful.kernels.hopper.mla.shared import BLOCKS, box_in_turn, release_before
from heedful.kernels.hopper.sm90.compat import reinterpret, tma_load
from heedful.kernels.hopper.sm90.sequences import keys_at, page_at


@gluon.jit
def latent_pages(params, keys, col, HEIGHT: gl.constexpr):
    """(page number, its place in the sequence) for each box of HEIGHT keys among 64 keys from `col`
    on, if there are pages."""
    pages = ()
    if params.kv.table is not None:
        table = params.kv.table + keys.batch.to(gl.int64) * params.kv.stride_tableb
        last = gl.maximum(keys.seq.len_k - 1, 0)
        for i in gl.static_range(KEYS // HEIGHT):
            place = gl.minimum(col + i * HEIGHT, last) // params.kv.page_size
            pages = pages + ((gl.load(table + place), place),)
    return pages


@gluon.jit
def load_parts(desc, parts, full, params, keys, col, pages, COLUMN: gl.constexpr):
    """Starts loading columns from COLUMN on of 64 keys from `col` on, to as many parts as boxes of
    the tensor map have rows for. pages: from `latent_pages`."""
    HEIGHT: gl.constexpr = desc.block_type.shape[-2]
    rows = params.kv_rows.k_rows
    for i in gl.static_range(KEYS // HEIGHT):
        if params.kv.table is not None:
            page, place = pages[i]
            numbered = page, place * params.kv.page_size
            at = page_at(params, keys, numbered, rows, col + i * HEIGHT)
        else:
            at = keys_at(params, keys, rows, col + i * HEIGHT)
        tma_load(desc, at[:-1] + [COLUMN], full, parts.index(i))


@gluon.jit
def load_box(io, memory, full, params, keys, col, pages, BOX: gl.constexpr):
    """Starts filling a box of shared memory with 64 keys from `col` on."""
    shape: gl.constexpr = io.k.block_type.shape
    mbarrier.expect(full, KEYS * WIDTH * 2)
    parts = reinterpret(memory, io.k.dtype, [KEYS // shape[-2]] + shape, io.k.layout)
    load_parts(io.k, parts, full, params, keys, col, pages, BOX * WIDTH)


@gluon.jit
def load_block(io, shared, params, keys, col, phase, BLOCK: gl.constexpr):
    """Loads 64 keys from `col` on, each box once its memory is free."""
    # Page numbers are loaded before there is room for keys.
    pages = latent_pages(params, keys, col, io.k.block_type.shape[-2])
    for turn in gl.static_range(BOXES):
        if release_before(BLOCK, turn) >= 0:
            mbarrier.wait(shared.empty(BLOCK, release_before(BLOCK, turn)), phase ^ 1)
        load_box(
            io,
            shared.k_box(BLOCK, box_in_turn(BLOCK, turn)),
            shared.full(BLOCK, box_in_turn(BLOCK, turn)),
            params,
            keys,
            col,
            pages,
            box_in_turn(BLOCK, turn),
        )


@gluon.jit
def mla_producer(io, shared, share, params):
    """Loads the keys of all segments of this program."""
    visit = gl.to_tensor(0)
    while share.x < share.end:
        segment, share = look(share, params)
        keys = keys_of_segment(params, segment)
        for number in range(segment.start, segment.stop):
            col = number * params.tile.BLOCK_N
            for block in gl.static_range(BLOCKS):
                load_block(io, shared, params, keys, col + block * KEYS, visit & 1, block)
            visit += 1
