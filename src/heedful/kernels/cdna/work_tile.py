"""What one program works on: its queries, and the key tiles (n-blocks) that they see."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.aggregate
class WorkTile:
    """Queries from row0 on of one head of one sequence, against the key tiles [begin, end) of one
    split; those before `full_end` without a mask.

    b, h, g: sequence, query head and KV head, 64-bit. token_q, token_k: where the sequence begins
    among packed tokens. Key j is visible to query i iff j < len_k and, with a mask, j <= i + off.
    """

    b: gl.tensor
    h: gl.tensor
    g: gl.tensor
    split: gl.tensor
    token_q: gl.tensor
    token_k: gl.tensor
    row0: gl.tensor
    len_q: gl.tensor
    len_k: gl.tensor
    off: gl.tensor
    begin: gl.tensor
    full_end: gl.tensor
    end: gl.tensor

    @gluon.jit
    def queries(self, x):
        """x (.., M, H, D) where this head's queries begin."""
        return x.ptr + self.b * x.stride_b + self.h * x.stride_h + self.token_q * x.stride_n

    @gluon.jit
    def keys(self, x):
        """x (.., N, G, D) where this head's keys or values begin."""
        return x.ptr + self.b * x.stride_b + self.g * x.stride_h + self.token_k * x.stride_n

    @gluon.jit
    def factor(self, descale):
        """This KV head's entry of a float32 (B, G) array, 1 where there is none."""
        if descale.ptr is None:
            return gl.to_tensor(1.0)
        else:
            return gl.load(descale.ptr + self.b * descale.stride_b + self.g * descale.stride_h)


@gluon.jit
def work_tile(sequences, shape, mask, order, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The WorkTile of this program.

    Heads are dealt round the dies first, so that one head's keys stay in one L2 where their number
    allows; under a causal mask the longest tiles go first.
    """
    heads = shape.batch * shape.heads_q
    block = gl.program_id(0) // heads
    if mask.HAS_RIGHT:
        block = order.tiles - 1 - block
    bh = gl.program_id(0) % heads
    b = bh // shape.heads_q
    h = bh % shape.heads_q
    g = h // (shape.heads_q // shape.heads_k)
    token_q, len_q = sequence(b, sequences.cu_q, sequences.seqlen_q)
    token_k, len_k = sequence(b, sequences.cu_k, sequences.seqlen_k)
    row0 = block * BLOCK_M
    off = mask.bottom_right * (len_k - len_q) + mask.shift
    if mask.HAS_RIGHT:
        off += mask.right
    full, end = n_block_range(row0, len_q, len_k, off, BLOCK_M, BLOCK_N, mask.HAS_RIGHT)
    split = gl.program_id(1)
    begin, full_end, end = split_n_blocks(full, end, split, order.splits)
    split = split.to(gl.int64)
    b, g, h = b.to(gl.int64), g.to(gl.int64), h.to(gl.int64)
    return WorkTile(b, h, g, split, token_q, token_k, row0, len_q, len_k, off, begin, full_end, end)


@gluon.jit
def sequence(b, cu_seqlens, seqlen):
    """(first token as 64 bits, length) of sequence b. seqlen: the length of every sequence, or of
    packed ones all together, beyond which none reaches whatever cu_seqlens says."""
    token = b.to(gl.int64) * 0
    length = seqlen
    if cu_seqlens is not None:
        begin = within(gl.load(cu_seqlens + b), 0, seqlen)
        length = within(gl.load(cu_seqlens + b + 1), begin, seqlen) - begin
        token += begin
    return token, length


@gluon.jit
def within(value, low, high):
    """The value, or the bound beyond which it is."""
    return gl.minimum(gl.maximum(value, low), high)


@gluon.jit
def n_block_range(
    row0, len_q, len_k, off, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, IS_CAUSAL: gl.constexpr
):
    """Tiles [0, end) are visible to some row of [row0, row0 + BLOCK_M), those below `full` to
    every row and without a mask."""
    full = len_k // BLOCK_N
    end = (len_k + BLOCK_N - 1) // BLOCK_N
    if IS_CAUSAL:
        last = gl.minimum(row0 + BLOCK_M, len_q) - 1
        seen_by_first = gl.maximum(gl.minimum(len_k, row0 + off + 1), 0)
        seen_by_last = gl.maximum(gl.minimum(len_k, last + off + 1), 0)
        full = seen_by_first // BLOCK_N
        end = (seen_by_last + BLOCK_N - 1) // BLOCK_N
    return full, end


@gluon.jit
def split_n_blocks(full, end, split, splits):
    """(begin, full_end, end) of the tiles of one split. Splits depend on a sequence's own length
    alone.

    The last full tile goes with the masked ones: while it is worked off the first of them comes,
    which may be ragged, and so the hot loop never needs a mask on its loads.
    """
    each = (end + splits - 1) // splits
    begin = gl.minimum(split * each, end)
    end = gl.minimum(begin + each, end)
    return begin, gl.minimum(gl.maximum(full - 1, begin), end), end
