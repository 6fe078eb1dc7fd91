"""Tiles of queries and scores: how they are loaded, masked and stored.

Shapes: M query rows, N key rows, D head dim.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.args.shared import Mask
from heedful.kernels.common.constants import LN2
from heedful.kernels.common.log_sum import log_sum_exp


@gluon.constexpr_function
def fetch_layout(dim, warps, dtype):
    """16 bytes a lane, whole rows side by side: a wave covers 1 KiB without a gap, as a load
    straight to LDS must, and rows of waves follow each other."""
    items = 128 // dtype.primitive_bitwidth
    lanes = dim // items
    return gl.BlockedLayout([1, items], [64 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def row_offsets(rows, stride, dims):
    """Where the elements of rows lie from a tile's base on, in 32 bits, which suffice: launching
    raises for longer strides."""
    return rows[:, None] * stride.to(gl.int32) + dims[None, :]


@gluon.jit
def last_keys(rows_M, len_k, off, mask: Mask):
    """The last key that each row sees, negative if none."""
    last_M = gl.full(rows_M.shape, 0, gl.int32, rows_M.type.layout) + (len_k - 1)
    if mask.HAS_RIGHT:
        last_M = gl.minimum(last_M, rows_M + (off + mask.right))
    return last_M


@gluon.jit
def apply_mask(s_MN, last_M, BY_SIGN: gl.constexpr):
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
def load_query_tile(work, q, M: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows [row0, row0 + M) of q (.., M, H, D), zeros from len_q on."""
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
    """scale * acc / l of rows below len_q, and their log-sum-exp in nats; base_M is in units of
    log2. A row that saw no key has sum 0: out 0, lse -inf. rest: as `ForwardIO` has it."""
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
