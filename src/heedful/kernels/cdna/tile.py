"""Where a program's tile of queries lies, which keys it sees, and how its results leave.

Shapes: M query rows, N key rows, D head dim.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LN2: gl.constexpr = gl.constexpr(0.6931471805599453)


@gluon.constexpr_function
def fetch_layout(dim, warps, dtype):
    """16 bytes a lane, whole rows side by side: a wave covers 1 KiB without a gap, as a load
    straight to LDS must, and rows of waves follow each other."""
    items = 128 // dtype.primitive_bitwidth
    lanes = dim // items
    return gl.BlockedLayout([1, items], [64 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def tile_of(pid, heads, row_blocks, IS_CAUSAL: gl.constexpr):
    """(row block, flat head): heads are dealt round the dies first, so that one head's keys stay
    in one L2 where their number allows; under a causal mask the longest tiles go first."""
    block = pid // heads
    if IS_CAUSAL:
        block = row_blocks - 1 - block
    return block, pid % heads


@gluon.jit
def within(value, low, high):
    """The value, or the bound beyond which it is."""
    return gl.minimum(gl.maximum(value, low), high)


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


@gluon.aggregate
class Work:
    """What one program does: queries from row0 on of one head of one sequence, against the key
    tiles [begin, stop) of one split; those before `hot` without a mask.

    b, h, g: sequence, query head and KV head, 64-bit. token_q, token_k: where the sequence begins
    among packed tokens. Key j is visible to query i iff j < len_k and, if causal, j <= i + off.
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
    hot: gl.tensor
    stop: gl.tensor

    @gluon.constexpr_function
    def __init__(self, b, h, g, split, token_q, token_k, row0, len_q, len_k, off, begin, hot, stop):
        self.b = b
        self.h = h
        self.g = g
        self.split = split
        self.token_q = token_q
        self.token_k = token_k
        self.row0 = row0
        self.len_q = len_q
        self.len_k = len_k
        self.off = off
        self.begin = begin
        self.hot = hot
        self.stop = stop

    @gluon.jit
    def queries(self, x, stride_b, stride_m, stride_h):
        """x (.., M, H, D) where this head's queries begin."""
        return x + self.b * stride_b + self.h * stride_h + self.token_q * stride_m

    @gluon.jit
    def keys(self, x, stride_b, stride_n, stride_h):
        """x (.., N, G, D) where this head's keys or values begin."""
        return x + self.b * stride_b + self.g * stride_h + self.token_k * stride_n

    @gluon.jit
    def factor(self, scales, stride_b, stride_g):
        """This KV head's entry of a float32 (B, G) array, 1 where there is none."""
        if scales is None:
            return gl.to_tensor(1.0)
        else:
            return gl.load(scales + self.b * stride_b + self.g * stride_g)


@gluon.jit
def work_of(
    cu_q,
    cu_k,
    seqlen_q,
    seqlen_k,
    heads_q,
    heads,
    group,
    row_blocks,
    num_splits,
    align,
    shift,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
):
    """The Work of this program."""
    block, bh = tile_of(gl.program_id(0), heads, row_blocks, IS_CAUSAL)
    b = bh // heads_q
    h = bh % heads_q
    token_q, len_q = sequence(b, cu_q, seqlen_q)
    token_k, len_k = sequence(b, cu_k, seqlen_k)
    row0 = block * BLOCK_M
    off = align * (len_k - len_q) + shift
    full, end = key_tiles(row0, len_q, len_k, off, BLOCK_M, BLOCK_N, IS_CAUSAL)
    split = gl.program_id(1)
    begin, hot, stop = split_tiles(full, end, split, num_splits)
    split = split.to(gl.int64)
    b, g, h = b.to(gl.int64), (h // group).to(gl.int64), h.to(gl.int64)
    return Work(b, h, g, split, token_q, token_k, row0, len_q, len_k, off, begin, hot, stop)


@gluon.jit
def key_tiles(
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
def split_tiles(full, end, split, num_splits):
    """(begin, hot, stop): one split works off [begin, stop) of the tiles, those before `hot`
    without a mask. Splits depend on a sequence's own length alone.

    The last full tile goes with the masked ones: while it is worked off the first of them comes,
    which may be ragged, and so the hot loop never needs a mask on its loads.
    """
    each = (end + num_splits - 1) // num_splits
    begin = gl.minimum(split * each, end)
    stop = gl.minimum(begin + each, end)
    return begin, gl.minimum(gl.maximum(full - 1, begin), stop), stop


@gluon.jit
def last_keys(rows_M, len_k, off, IS_CAUSAL: gl.constexpr):
    """The last key that each row sees, negative if none."""
    last_M = gl.full(rows_M.shape, 0, gl.int32, rows_M.type.layout) + (len_k - 1)
    if IS_CAUSAL:
        last_M = gl.minimum(last_M, rows_M + off)
    return last_M


@gluon.jit
def hide(s_MN, last_M, BY_SIGN: gl.constexpr):
    """Scores of keys that a row does not see, those after number last_M of the tile, become -inf.

    BY_SIGN: by arithmetic on the sign of the distance. A comparison takes a pair of scalar
    registers for each score that is in flight, and there may not be enough.
    """
    N: gl.constexpr = s_MN.shape[1]
    cols_N = gl.arange(0, N, gl.SliceLayout(0, s_MN.type.layout))
    if BY_SIGN:
        hidden_MN = (last_M[:, None] - cols_N[None, :]) >> 31
        bits_MN = s_MN.to(gl.int32, bitcast=True)
        # The bits of -inf.
        bits_MN = (bits_MN & ~hidden_MN) | (hidden_MN & -0x800000)
        return bits_MN.to(gl.float32, bitcast=True)
    else:
        return gl.where(cols_N[None, :] <= last_M[:, None], s_MN, float("-inf"))


@gluon.jit
def load_queries(q, stride_qm, row0, len_q, M: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows [row0, row0 + M), zeros from len_q on."""
    fetch: gl.constexpr = fetch_layout(D, gl.num_warps(), q.dtype.element_ty)
    rows = gl.arange(0, M, gl.SliceLayout(1, fetch))
    dims = gl.arange(0, D, gl.SliceLayout(0, fetch))
    base = q + row0.to(gl.int64) * stride_qm
    offsets = rows[:, None] * stride_qm + dims[None, :]
    mask = (rows < len_q - row0)[:, None]
    q_MD = gl.amd.cdna3.buffer_load(base, offsets, mask=mask, other=0.0)
    return gl.convert_layout(q_MD, LAYOUT)


@gluon.jit
def store_results(out, lse, stride_om, row0, len_q, base_M, l_M, acc_MD, scale):
    """scale * acc / l of rows below len_q, and their log-sum-exp in nats; base_M is in units of
    log2. A row that saw no key has sum 0: out 0, lse -inf."""
    MFMA: gl.constexpr = acc_MD.type.layout
    M: gl.constexpr = acc_MD.shape[0]
    D: gl.constexpr = acc_MD.shape[1]
    acc_MD = acc_MD * (scale / gl.where(l_M == 0.0, 1.0, l_M))[:, None]
    rows = gl.arange(0, M, gl.SliceLayout(1, MFMA))
    dims = gl.arange(0, D, gl.SliceLayout(0, MFMA))
    used_M = rows < len_q - row0
    base = out + row0.to(gl.int64) * stride_om
    offsets = rows[:, None] * stride_om + dims[None, :]
    value = acc_MD.to(out.dtype.element_ty)
    gl.amd.cdna3.buffer_store(value, base, offsets, mask=used_M[:, None])
    if lse is not None:
        lse_M = (base_M + gl.log2(l_M)) * LN2
        gl.amd.cdna3.buffer_store(lse_M, lse + row0, rows, mask=used_M)
