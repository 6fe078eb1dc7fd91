"""Online softmax of one warpgroup's rows, in base 2, with the row sum left spread over lanes."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def lane_sums(p_MN):
    """Sums over the keys that one lane holds: (M, N) -> (M, 4).

    In a WGMMA accumulator a row lies in four lanes, two neighbouring keys in each of every eight.
    Adding up the four waits until the last tile, so that the loop has no shuffles for it.
    """
    M: gl.constexpr = p_MN.shape[0]
    N: gl.constexpr = p_MN.shape[1]
    return gl.sum(gl.sum(p_MN.reshape([M, N // 8, 4, 2]), 3), 1)


@gluon.jit
def scale_rows(x_ME, alpha_M):
    """Multiplies row m by alpha_M[m]."""
    return x_ME * gl.convert_layout(alpha_M, gl.SliceLayout(1, x_ME.type.layout))[:, None]


@gluon.jit
def softmax_first(s_MN, scale_log2):
    """The first tile: p, row maximum of the raw scores, sums by lane."""
    m_M = gl.max(s_MN, 1)
    shift_M = gl.where(m_M == float("-inf"), 0.0, m_M) * scale_log2
    p_MN = gl.exp2(s_MN * scale_log2 - shift_M[:, None])
    return p_MN, m_M, lane_sums(p_MN)


@gluon.jit
def softmax_step(s_MN, m_M, l_ML, scale_log2, MAY_HIDE_ROWS: gl.constexpr):
    """One more tile: p, new maximum, new sums, and what the output so far must be scaled by."""
    new_m_M = gl.maximum(m_M, gl.max(s_MN, 1))
    shift_M = new_m_M
    if MAY_HIDE_ROWS:
        # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN.
        shift_M = gl.where(new_m_M == float("-inf"), 0.0, new_m_M)
    shift_M = shift_M * scale_log2
    alpha_M = gl.exp2(m_M * scale_log2 - shift_M)
    p_MN = gl.exp2(s_MN * scale_log2 - shift_M[:, None])
    l_ML = scale_rows(l_ML, alpha_M) + lane_sums(p_MN)
    return p_MN, new_m_M, l_ML, alpha_M
