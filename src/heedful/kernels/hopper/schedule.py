"""Which output tile a program works on, and which key tiles that tile needs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.compat import aggregate

ROWS: gl.constexpr = gl.constexpr(64)  # query rows of one consumer: what one WGMMA takes


@aggregate
class Shape:
    """Sizes of one call at run time, and the variant of the kernel. Key j is visible to query i iff
    -left <= j - i - off <= right with off = shift + align * (len_k - len_q)."""

    heads: gl.tensor
    group: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    row_blocks: gl.tensor
    tiles: gl.tensor
    section: gl.tensor
    left: gl.tensor
    right: gl.tensor
    shift: gl.tensor
    align: gl.tensor
    BLOCK_N: gl.constexpr
    CONSUMERS: gl.constexpr
    STAGES: gl.constexpr
    OUT_IN_Q: gl.constexpr
    ORDERED: gl.constexpr
    LAZY: gl.constexpr
    SUM_BY_MMA: gl.constexpr
    IS_RIGHT: gl.constexpr
    IS_LEFT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        heads,
        group,
        seqlen_q,
        seqlen_k,
        row_blocks,
        tiles,
        section,
        left,
        right,
        shift,
        align,
        BLOCK_N,
        CONSUMERS,
        STAGES,
        OUT_IN_Q,
        ORDERED,
        LAZY,
        SUM_BY_MMA,
        IS_RIGHT,
        IS_LEFT,
    ):
        self.heads = heads
        self.group = group
        self.seqlen_q = seqlen_q
        self.seqlen_k = seqlen_k
        self.row_blocks = row_blocks
        self.tiles = tiles
        self.section = section
        self.left = left
        self.right = right
        self.shift = shift
        self.align = align
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.STAGES = gl.constexpr(STAGES)
        self.OUT_IN_Q = gl.constexpr(OUT_IN_Q)
        self.ORDERED = gl.constexpr(ORDERED)
        self.LAZY = gl.constexpr(LAZY)
        self.SUM_BY_MMA = gl.constexpr(SUM_BY_MMA)
        self.IS_RIGHT = gl.constexpr(IS_RIGHT)
        self.IS_LEFT = gl.constexpr(IS_LEFT)


@aggregate
class Tile:
    """One block of query rows of one head."""

    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    row: gl.tensor
    len_q: gl.tensor
    len_k: gl.tensor
    off: gl.tensor

    @gluon.constexpr_function
    def __init__(self, batch, head, kv_head, row, len_q, len_k, off):
        self.batch = batch
        self.head = head
        self.kv_head = kv_head
        self.row = row
        self.len_q = len_q
        self.len_k = len_k
        self.off = off


@gluon.jit
def decode(shape, index):
    """Tile `index`: sections of heads whose K and V share the L2 cache, in a section row blocks
    from the longest to the shortest, and the section's heads innermost."""
    per_section = shape.section * shape.row_blocks
    section = index // per_section
    within = index - section * per_section
    first = section * shape.section
    width = gl.minimum(shape.section, shape.tiles // shape.row_blocks - first)
    block = within // width
    head = first + within - block * width
    if shape.IS_RIGHT:
        block = shape.row_blocks - 1 - block
    batch = head // shape.heads
    head -= batch * shape.heads
    off = shape.shift + shape.align * (shape.seqlen_k - shape.seqlen_q)
    row = block * (ROWS * shape.CONSUMERS)
    return Tile(batch, head, head // shape.group, row, shape.seqlen_q, shape.seqlen_k, off)


@aggregate
class KeyRange:
    """Key tiles [begin, end) that some rows see; all but [full_begin, full_end) need a mask."""

    begin: gl.tensor
    full_begin: gl.tensor
    full_end: gl.tensor
    end: gl.tensor

    @gluon.constexpr_function
    def __init__(self, begin, full_begin, full_end, end):
        self.begin = begin
        self.full_begin = full_begin
        self.full_end = full_end
        self.end = end


@gluon.jit
def key_range(shape, tile, row, rows: gl.constexpr):
    """The key tiles of queries [row, row + rows), as core.mask.MaskSpec.key_range has them."""
    last = gl.minimum(row + rows, tile.len_q) - 1
    stop_first = tile.len_k
    stop_last = tile.len_k
    if shape.IS_RIGHT:
        stop_first = gl.maximum(gl.minimum(tile.len_k, row + tile.off + shape.right + 1), 0)
        stop_last = gl.maximum(gl.minimum(tile.len_k, last + tile.off + shape.right + 1), 0)
    end = gl.where(last < row, 0, gl.cdiv(stop_last, shape.BLOCK_N))
    begin = end * 0
    full_begin = begin
    if shape.IS_LEFT:
        begin = gl.minimum(gl.maximum(row + tile.off - shape.left, 0) // shape.BLOCK_N, end)
        full_begin = gl.cdiv(gl.maximum(last + tile.off - shape.left, 0), shape.BLOCK_N)
    return KeyRange(begin, full_begin, stop_first // shape.BLOCK_N, end)
