"""Loads, masks and stores tiles of queries, scores and results.

Shapes: M query rows, N key rows, D head dim.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.args.shared import Mask
from heedful.kernels.common.constants import LN2
from heedful.kernels.common.log_sum import log_sum_exp


@gluon.constexpr_function
def fetch_layout(dim, warps, dtype):
    """16 bytes for each lane, with whole rows adjacent: a wave covers 1 KiB without a gap, as a
    load direct to LDS must, and the rows of waves follow each other."""
    items = 128 // dtype.primitive_bitwidth
    lanes = dim // items
    return gl.BlockedLayout([1, items], [64 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def row_offsets(rows, stride, dims):
    """Offsets of the elements of rows from a tile's base, in 32 bits. Launching raises for strides
    that are too long for this."""
    return rows[:, None] * stride.to(gl.int32) + dims[None, :]


@gluon.jit
def last_keys(rows_M, len_k, off, mask: Mask):
    """The last key that each row sees; negative if there is none."""
    last_M = gl.full(rows_M.shape, 0, gl.int32, rows_M.type.layout) + (len_k - 1)
    if mask.HAS_RIGHT:
        last_M = gl.minimum(last_M, rows_M + (off + mask.right))
    return last_M


@gluon.jit
def apply_mask(s_MN, last_M, BY_SIGN: gl.constexpr):
    """Scores with -inf for keys that a row does not see: those after key last_M of the tile.

    BY_SIGN: by arithmetic on the sign of the distance. A comparison takes a pair of scalar
    registers for each score in flight, and there may not be enough.
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
def load_query_tile(work, q, M: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows [row0, row0 + M) of q (.., M, H, D); zeros from len_q on."""
    fetch: gl.constexpr = fetch_layout(D, gl.num_warps(), q.ptr.dtype.element_ty)
    rows = gl.arange(0, M, gl.SliceLayout(1, fetch))
    dims = gl.arange(0, D, gl.SliceLayout(0, fetch))
    base = work.queries(q) + work.row0.to(gl.int64) * q.stride_n
    mask = (rows < work.seq.len_q - work.row0)[:, None]
    offsets = row_offsets(rows, q.stride_n, dims)
    q_MD = gl.amd.cdna3.buffer_load(base, offsets, mask=mask, other=0.0)
    return gl.convert_layout(q_MD, LAYOUT)


@gluon.jit
def store_results(work, out, lse, rest, base_M, l_M, acc_MD, scale):
    """Stores scale * acc / l of rows below len_q, and their log-sum-exp in natural units. base_M is
    in base 2. A row that saw no key has sum 0, and gets out 0 and lse -inf. rest: as in
    `ForwardIO`."""
    MFMA: gl.constexpr = acc_MD.type.layout
    M: gl.constexpr = acc_MD.shape[0]
    D: gl.constexpr = acc_MD.shape[1]
    acc_MD = acc_MD * (scale / gl.where(l_M == 0.0, 1.0, l_M))[:, None]
    rows = gl.arange(0, M, gl.SliceLayout(1, MFMA))
    dims = gl.arange(0, D, gl.SliceLayout(0, MFMA))
    used_M = rows < work.seq.len_q - work.row0
    base = work.queries(out) + work.split * out.stride_s + work.row0.to(gl.int64) * out.stride_n
    value = acc_MD.to(out.ptr.dtype.element_ty)
    offsets = row_offsets(rows, out.stride_n, dims)
    gl.amd.cdna3.buffer_store(value, base, offsets, mask=used_M[:, None])
    if lse.ptr is not None:
        start = work.split * lse.stride_s + work.b * lse.stride_b
        start += work.h * lse.stride_h + work.seq.token_q + work.row0
        if rest is None:
            lse_M = (base_M + gl.log2(l_M)) * LN2
        else:
            lse_M, rest_M = log_sum_exp(base_M, l_M, True)
            gl.amd.cdna3.buffer_store(rest_M, rest + start, rows, mask=used_M)
        gl.amd.cdna3.buffer_store(lse_M, lse.ptr + start, rows, mask=used_M)
