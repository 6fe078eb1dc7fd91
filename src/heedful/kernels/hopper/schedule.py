"""Which output tile a program works on, and which key tiles that tile needs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.compat import aggregate, optional

ROWS: gl.constexpr = gl.constexpr(64)  # query rows of one consumer: what one WGMMA takes


@aggregate
class Tile:
    """One block of query rows of one head; start_q, start_k: where its sequence lies if packed.

    len_q, len_k: what is used of it; stored_q: query rows in storage, which all get a result.
    kv_batch: which batch entry its keys are in.
    """

    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    row: gl.tensor
    start_q: gl.tensor
    start_k: gl.tensor
    len_q: gl.tensor
    len_k: gl.tensor
    off: gl.tensor
    stored_q: gl.tensor
    kv_batch: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, batch, head, kv_head, row, start_q, start_k, len_q, len_k, off, stored_q, kv_batch
    ):
        self.batch = batch
        self.head = head
        self.kv_head = kv_head
        self.row = row
        self.start_q = start_q
        self.start_k = start_k
        self.len_q = len_q
        self.len_k = len_k
        self.off = off
        self.stored_q = stored_q
        self.kv_batch = kv_batch


@gluon.jit
def within(value, low, high):
    """The value, or the bound beyond which it is."""
    return gl.minimum(gl.maximum(value, low), high)


@gluon.jit
def sequence(cu_seqlens, batch, seqlen):
    """Where a sequence begins among packed tokens, and its length; `seqlen`, or of packed tokens so
    many at most, whatever cu_seqlens says."""
    if cu_seqlens is None:
        return gl.to_tensor(0), seqlen
    else:
        start = within(gl.load(cu_seqlens + batch), 0, seqlen)
        return start, within(gl.load(cu_seqlens + batch + 1), start, seqlen) - start


@gluon.jit
def stored_queries(shape):
    """Queries of every sequence, or packed ones of all."""
    if shape.cu_q is None:
        return shape.seqlen_q
    else:
        return shape.total_q


@gluon.jit
def box(IS_PACKED: gl.constexpr, batch, head, start, length, row):
    """Coordinates of rows from `row` of one head, in a map that ends with the sequence.

    Dense: (batch, head, row, 0). Packed sequences share one map; that rows past the end of each
    are still zeros when read and dropped when written takes a dimension that ends at 2^30 and one
    whose stride wraps around 2^64 bytes (see heedful.launch.args.hopper).
    """
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
    """Coordinates of keys or values."""
    packed: gl.constexpr = shape.cu_k is not None
    return box(packed, tile.batch, tile.kv_head, tile.start_k, tile.len_k, col)


@gluon.jit
def in_sections(index, blocks, heads, width, sections):
    """Head and block of piece `index` of heads that have `blocks` pieces each: sections of `width`
    heads, whose K and V share the L2 cache, and block by block the section's heads innermost.
    `sections` come before the last, which takes the heads that remain."""
    per_section = width * blocks
    section = gl.minimum(index // per_section, sections)
    within = index - section * per_section
    first = section * width
    width = gl.where(section < sections, width, heads - first)
    block = within // width
    return first + within - block * width, block


@gluon.jit
def decode(shape, index):
    """Tile `index`: sections of heads, in each of them row blocks from the longest to the shortest.
    Of packed sequences one after the other, in the order of order.py."""
    row_blocks = shape.row_blocks
    heads = shape.heads
    batch = gl.to_tensor(0)
    if shape.order is None:
        heads = shape.tiles // row_blocks
    else:
        entry = shape.order + 1 + 2 * (index // heads)
        batch = gl.load(entry)
        index -= gl.load(entry + 1) * heads
        row_blocks = gl.cdiv(sequence(shape.cu_q, batch, shape.total_q)[1], ROWS * shape.CONSUMERS)
    head, block = in_sections(index, row_blocks, heads, shape.section, shape.sections)
    if shape.IS_RIGHT:
        block = row_blocks - 1 - block
    if shape.order is None:
        batch = head // shape.heads
        head -= batch * shape.heads
    start_q, len_q = sequence(shape.cu_q, batch, stored_queries(shape))
    start_k, len_k = sequence(shape.cu_k, batch, shape.seqlen_k)
    off = shape.shift + shape.align * (len_k - len_q)
    row = block * (ROWS * shape.CONSUMERS)
    kv_head = head // shape.group
    return Tile(batch, head, kv_head, row, start_q, start_k, len_q, len_k, off, len_q, batch)


@aggregate
class KeyRange:
    """Key tiles [begin, end) that some rows see; all but [full_begin, full_end) need a mask.

    With leading keys that stay visible beside a window, tiles [0, first_end) are visited after
    these, and of all visits `visits` from number `skipped` on; else these three are None.
    """

    begin: gl.tensor
    full_begin: gl.tensor
    full_end: gl.tensor
    end: gl.tensor
    first_end: gl.tensor | gl.constexpr
    skipped: gl.tensor | gl.constexpr
    visits: gl.tensor | gl.constexpr

    @gluon.constexpr_function
    def __init__(self, begin, full_begin, full_end, end, first_end=None, skipped=None, visits=None):
        self.begin = begin
        self.full_begin = full_begin
        self.full_end = full_end
        self.end = end
        self.first_end = optional(first_end)
        self.skipped = optional(skipped)
        self.visits = optional(visits)


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


@gluon.jit
def needs_mask(keys, j):
    """Whether key tile j is hidden from any row in part."""
    return (j >= keys.full_end) | (j < keys.full_begin)


@gluon.jit
def next_masked(keys, step):
    """Of visits from the last key tile to the first, the first from number `step` on whose tile
    needs a mask; a number past the last if none does."""
    right = keys.end - 1 - keys.full_end
    left = keys.end - keys.full_begin
    if keys.skipped is not None:
        right -= keys.skipped
        left -= keys.skipped
    return gl.where(step <= right, step, gl.maximum(step, left))


@gluon.jit
def visits_last_second(shape, whole):
    """Whether the last key tile is visited after the one before it, because rows see it in part
    and that one as a whole: what each row sees first is what its exponentials refer to, and of few
    keys the maximum is soon exceeded. All rows of a program must agree, whose key tiles these are;
    more rows than a tile has keys never see the last but one as a whole."""
    if shape.VISITS_SECOND:
        before = whole.end - 2
        sees_all = (before >= whole.full_begin) & (before + 1 == whole.full_end)
        return (before >= whole.begin) & sees_all
    else:
        return gl.to_tensor(False)


@gluon.jit
def visited(keys, step, last_second):
    """The key tile of a visit: from the last to the first, the last but one perhaps ahead."""
    return gl.where(last_second & (step < 2), keys.end - 2 + step, keys.end - 1 - step)
