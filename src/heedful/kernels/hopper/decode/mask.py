"""Masks the scores of a decode, whose rows are the query heads of a KV head at each position.

M query rows, N keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.sm90.mask import mask_outside
from heedful.kernels.hopper.sm90.mma import ROWS


@gluon.jit
def masked(s_MN, params, segment, bounds, col):
    """Scores of keys from `col` on, with those that a row does not see at -inf. bounds: `KeyBounds`
    of the tile's rows, see common/key_range.py."""
    N: gl.constexpr = s_MN.shape[1]
    layout: gl.constexpr = gl.SliceLayout(1, s_MN.type.layout)
    group = params.shape.heads_q // params.shape.heads_k
    if col + N > bounds.stop_first:
        stop_M = gl.full([ROWS], 0, gl.int32, layout) + segment.seq.len_k
        if params.mask.HAS_RIGHT:
            pos_M = (segment.row0 + gl.arange(0, ROWS, layout=layout)) // group
            stop_M = gl.minimum(stop_M, pos_M + (segment.seq.off + params.mask.right + 1))
        s_MN = mask_outside(s_MN, None, stop_M - col)
    if params.mask.HAS_LEFT:  # noqa: SIM102  (known when compiling, and `and` is not)
        if col < bounds.start_last:
            pos_M = (segment.row0 + gl.arange(0, ROWS, layout=layout)) // group
            start_M = pos_M + (segment.seq.off - params.mask.left)
            # Leading keys stay visible, so both tests must fail for a key to be masked.
            key_N = col + gl.arange(0, N, layout=gl.SliceLayout(0, s_MN.type.layout))
            seen_MN = (key_N[None, :] >= start_M[:, None]) | (key_N < params.mask.first)[None, :]
            s_MN = gl.where(seen_MN, s_MN, float("-inf"))
    return s_MN


@gluon.jit
def masked_keys(s_NM, params, segment, bounds, col):
    """As `masked`, of scores whose rows are keys."""
    layout: gl.constexpr = s_NM.type.layout
    of_rows: gl.constexpr = gl.SliceLayout(0, layout)
    if col + s_NM.shape[0] > bounds.stop_first:
        rows_M = gl.arange(0, s_NM.shape[1], layout=of_rows)
        stop_M = rows_M * 0 + segment.seq.len_k
        if params.mask.HAS_RIGHT:
            group = params.shape.heads_q // params.shape.heads_k
            pos_M = (segment.row0 + rows_M) // group
            stop_M = gl.minimum(stop_M, pos_M + (segment.seq.off + params.mask.right + 1))
        key_N = col + gl.arange(0, s_NM.shape[0], layout=gl.SliceLayout(1, layout))
        s_NM = gl.where(key_N[:, None] < stop_M[None, :], s_NM, float("-inf"))
    if params.mask.HAS_LEFT:  # noqa: SIM102  (known when compiling, and `and` is not)
        if col < bounds.start_last:
            group = params.shape.heads_q // params.shape.heads_k
            pos_M = (segment.row0 + gl.arange(0, s_NM.shape[1], layout=of_rows)) // group
            start_M = pos_M + (segment.seq.off - params.mask.left)
            key_N = col + gl.arange(0, s_NM.shape[0], layout=gl.SliceLayout(1, layout))
            seen_NM = (key_N[:, None] >= start_M[None, :]) | (key_N < params.mask.first)[:, None]
            s_NM = gl.where(seen_NM, s_NM, float("-inf"))
    return s_NM
