"""The work tile of a program: its queries, and the key tiles (n-blocks) that they see."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.args.shared import Mask, Sequences, Shape, TileOrder
from heedful.kernels.common.key_range import key_bounds
from heedful.kernels.common.sequences import seqlens_of


@gluon.aggregate
class WorkTile:
    """Queries from row0 on of one head of one sequence, and the key tiles [begin, end) of one
    split. Tiles before `full_end` need no mask.

    b, h, g: sequence, query head and KV head, in 64 bits. seq: its `Seqlens`. Key j is visible to
    query i if j < len_k and, with a mask, j <= i + off + right.
    """

    b: gl.tensor
    h: gl.tensor
    g: gl.tensor
    split: gl.tensor
    row0: gl.tensor
    seq: gl.tuple
    begin: gl.tensor
    full_end: gl.tensor
    end: gl.tensor

    @gluon.jit
    def queries(self, x):
        """The address in x (.., M, H, D) where this head's queries begin."""
        return x.ptr + self.b * x.stride_b + self.h * x.stride_h + self.seq.token_q * x.stride_n

    @gluon.jit
    def keys(self, x):
        """The address in x (.., N, G, D) where this head's keys or values begin."""
        return x.ptr + self.b * x.stride_b + self.g * x.stride_h + self.seq.token_k * x.stride_n

    @gluon.jit
    def factor(self, descale):
        """This KV head's entry of a float32 (B, G) array; 1 if there is no array."""
        if descale.ptr is None:
            return gl.to_tensor(1.0)
        else:
            return gl.load(descale.ptr + self.b * descale.stride_b + self.g * descale.stride_h)


@gluon.jit
def work_tile(
    sequences: Sequences,
    shape: Shape,
    mask: Mask,
    order: TileOrder,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """The `WorkTile` of this program.

    Consecutive programs take different heads, so that each head stays on one die, and its keys in
    one L2 cache, where the number of heads allows it. Under a causal mask the longest tiles go
    first.
    """
    heads = shape.batch * shape.heads_q
    block = gl.program_id(0) // heads
    if mask.HAS_RIGHT:
        block = order.tiles - 1 - block
    bh = gl.program_id(0) % heads
    b = bh // shape.heads_q
    h = bh % shape.heads_q
    g = h // (shape.heads_q // shape.heads_k)
    seq = seqlens_of(b, sequences, mask)
    row0 = block * BLOCK_M
    full, end = n_block_range(row0, seq, mask, BLOCK_M, BLOCK_N)
    split = gl.program_id(1)
    begin, full_end, end = split_n_blocks(full, end, split, order.splits)
    split = split.to(gl.int64)
    b, g, h = b.to(gl.int64), g.to(gl.int64), h.to(gl.int64)
    return WorkTile(
        b=b, h=h, g=g, split=split, row0=row0, seq=seq, begin=begin, full_end=full_end, end=end
    )


@gluon.jit
def n_block_range(row0, seq, mask: Mask, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """(full, end): tiles [0, end) are visible to some row of [row0, row0 + BLOCK_M), and tiles
    below `full` to every row."""
    last = gl.minimum(row0 + BLOCK_M, seq.len_q) - 1
    bounds = key_bounds(row0, last, seq.off, seq.len_k, mask)
    return bounds.stop_first // BLOCK_N, gl.cdiv(bounds.stop_last, BLOCK_N)


@gluon.jit
def split_n_blocks(full, end, split, splits):
    """(begin, full_end, end) of the tiles of one split. Splits depend on a sequence's own length
    alone.

    The last full tile goes with the masked ones. While it is processed, the first masked tile is
    loaded, which may be ragged. So the hot loop never needs a mask on its loads.
    """
    each = (end + splits - 1) // splits
    begin = gl.minimum(split * each, end)
    end = gl.minimum(begin + each, end)
    return begin, gl.minimum(gl.maximum(full - 1, begin), end), end
