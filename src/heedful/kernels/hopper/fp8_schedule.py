"""Which tiles a program of the fp8 forward works on: as schedule.py, for the features it has."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.compat import aggregate, optional

ROWS: gl.constexpr = gl.constexpr(64)  # query rows of one consumer: what one WGMMA takes
# Sequences of packed keys begin at multiples of this in turned values.
TURN_N: gl.constexpr = gl.constexpr(128)


@aggregate
class Fp8Shape:
    """Sizes of one call at run time, and the variant of the kernel. Key j is visible to query i iff
    -left <= j - i - off <= right with off = shift + align * (len_k - len_q). FLUSH: key tiles
    between two flushes of the accumulators into float32 sums, in registers (SUMS_IN_REGS) or shared
    memory. LATE: exponentials before it is known whether references move, see fp8_recheck.py."""

    heads: gl.tensor
    group: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    total_q: gl.tensor
    row_blocks: gl.tensor
    tiles: gl.tensor
    section: gl.tensor
    left: gl.tensor
    right: gl.tensor
    shift: gl.tensor
    align: gl.tensor
    cu_q: gl.tensor | gl.constexpr
    cu_k: gl.tensor | gl.constexpr
    BLOCK_N: gl.constexpr
    CONSUMERS: gl.constexpr
    K_STAGES: gl.constexpr
    V_STAGES: gl.constexpr
    FLUSH: gl.constexpr
    LATE: gl.constexpr
    SUMS_IN_REGS: gl.constexpr
    ORDERED: gl.constexpr
    IS_RIGHT: gl.constexpr
    IS_LEFT: gl.constexpr
    HAS_SOFTCAP: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        heads,
        group,
        seqlen_q,
        seqlen_k,
        total_q,
        row_blocks,
        tiles,
        section,
        left,
        right,
        shift,
        align,
        cu_q,
        cu_k,
        BLOCK_N,
        CONSUMERS,
        K_STAGES,
        V_STAGES,
        FLUSH,
        LATE,
        SUMS_IN_REGS,
        ORDERED,
        IS_RIGHT,
        IS_LEFT,
        HAS_SOFTCAP,
    ):
        self.heads = heads
        self.group = group
        self.seqlen_q = seqlen_q
        self.seqlen_k = seqlen_k
        self.total_q = total_q
        self.row_blocks = row_blocks
        self.tiles = tiles
        self.section = section
        self.left = left
        self.right = right
        self.shift = shift
        self.align = align
        self.cu_q = optional(cu_q)
        self.cu_k = optional(cu_k)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.K_STAGES = gl.constexpr(K_STAGES)
        self.V_STAGES = gl.constexpr(V_STAGES)
        self.FLUSH = gl.constexpr(FLUSH)
        self.LATE = gl.constexpr(LATE)
        self.SUMS_IN_REGS = gl.constexpr(SUMS_IN_REGS)
        self.ORDERED = gl.constexpr(ORDERED)
        self.IS_RIGHT = gl.constexpr(IS_RIGHT)
        self.IS_LEFT = gl.constexpr(IS_LEFT)
        self.HAS_SOFTCAP = gl.constexpr(HAS_SOFTCAP)


@aggregate
class Fp8Tile:
    """One block of query rows of one head; start_q, start_k: where its sequence lies if packed."""

    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    row: gl.tensor
    start_q: gl.tensor
    start_k: gl.tensor
    len_q: gl.tensor
    len_k: gl.tensor
    off: gl.tensor

    @gluon.constexpr_function
    def __init__(self, batch, head, kv_head, row, start_q, start_k, len_q, len_k, off):
        self.batch = batch
        self.head = head
        self.kv_head = kv_head
        self.row = row
        self.start_q = start_q
        self.start_k = start_k
        self.len_q = len_q
        self.len_k = len_k
        self.off = off


@aggregate
class Fp8Keys:
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
def sequence(cu_seqlens, batch, seqlen):
    """Where a sequence begins among packed tokens, and its length."""
    if cu_seqlens is None:
        return gl.to_tensor(0), seqlen
    else:
        start = gl.load(cu_seqlens + batch)
        return start, gl.load(cu_seqlens + batch + 1) - start


@gluon.jit
def box(IS_PACKED: gl.constexpr, batch, head, start, length, row):
    """Coordinates of rows from `row` of one head, in a map that ends with the sequence: dense, or
    packed as heedful.launch.args.hopper explains."""
    if IS_PACKED:
        return [1 << 30, start + length, head, (1 << 30) - length + row, 0]
    else:
        return [batch, head, row, 0]


@gluon.jit
def rows_at(shape, tile, row):
    """Coordinates of query or output rows."""
    packed: gl.constexpr = shape.cu_q is not None
    return box(packed, tile.batch, tile.head, tile.start_q, tile.len_q, row)


@gluon.jit
def keys_at(shape, tile, col):
    """Coordinates of keys."""
    packed: gl.constexpr = shape.cu_k is not None
    return box(packed, tile.batch, tile.kv_head, tile.start_k, tile.len_k, col)


@gluon.jit
def values_at(shape, tile, col):
    """Coordinates of turned values (batch, kv_head, dim, position)."""
    if shape.cu_k is None:
        return [tile.batch, tile.kv_head, 0, col]
    else:
        return [0, tile.kv_head, 0, (tile.start_k // TURN_N + tile.batch) * TURN_N + col]


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
    start_q, len_q = sequence(shape.cu_q, batch, shape.seqlen_q)
    start_k, len_k = sequence(shape.cu_k, batch, shape.seqlen_k)
    off = shape.shift + shape.align * (len_k - len_q)
    row = block * (ROWS * shape.CONSUMERS)
    kv_head = head // shape.group
    return Fp8Tile(batch, head, kv_head, row, start_q, start_k, len_q, len_k, off)


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
    return Fp8Keys(begin, full_begin, stop_first // shape.BLOCK_N, end)


@gluon.jit
def needs_mask(keys, j):
    """Whether key tile j is hidden from any row in part."""
    return (j >= keys.full_end) | (j < keys.full_begin)
