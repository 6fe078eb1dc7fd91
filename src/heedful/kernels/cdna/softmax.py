"""Online softmax in base 2.

In the transposed 32x32 MFMA layout a row lies in two lanes, 32 apart, so that a reduction over
keys is one exchange after what a lane does by itself. Sums stay spread over the two lanes until the
last tile: (M, 2).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def larger(a, b):
    """max(a, b) of numbers: in one instruction, where the compiler would first quieten NaNs of
    values whose origin it does not see."""
    return gl.inline_asm_elementwise(
        "v_max_f32 $0, $1, $2", "=v,v,v", [a, b], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def row_max(s_MN):
    """The largest score of each row."""
    M: gl.constexpr = s_MN.shape[0]
    N: gl.constexpr = s_MN.shape[1]
    by_lane = s_MN.reshape([M, N // 8, 2, 4]).permute([0, 2, 1, 3]).reshape([M, 2, N // 2])
    top_M = gl.reduce(gl.max(by_lane, 2), 1, larger)
    return gl.convert_layout(top_M, gl.SliceLayout(1, s_MN.type.layout))


@gluon.jit
def lane_sums(p_MN):
    """Sums over the keys that a lane holds: (M, N) -> (M, 2). Of every eight keys it holds four
    neighbours, which are kept apart as long as possible: the vector unit adds in pairs."""
    M: gl.constexpr = p_MN.shape[0]
    N: gl.constexpr = p_MN.shape[1]
    return gl.sum(gl.sum(p_MN.reshape([M, N // 8, 2, 4]), 1), 2)


@gluon.jit
def add_sums(l_ML, alpha_M, p_MN):
    """The sums so far, scaled, and those of one more tile."""
    alpha_M = gl.convert_layout(alpha_M, gl.SliceLayout(1, l_ML.type.layout))
    return l_ML * alpha_M[:, None] + lane_sums(p_MN)


@gluon.jit
def total(l_ML, m_M):
    """Sums of whole rows, where m_M lies."""
    return gl.convert_layout(gl.sum(l_ML, 1), m_M.type.layout)


@gluon.jit
def finite_base(m_M, IS_MASKED: gl.constexpr):
    """What exponents are taken against: a row that saw no key has maximum -inf, and
    -inf - -inf is NaN."""
    if IS_MASKED:
        return gl.where(m_M == float("-inf"), 0.0, m_M)
    return m_M
