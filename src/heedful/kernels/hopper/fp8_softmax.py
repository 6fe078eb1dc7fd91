"""Softmax whose probabilities become e4m3 operands, without a shuffle and without a scale of 1.

M query rows, N keys. e4m3 reaches from 2^-9 to 448, probabilities from 0 to 1. They are computed
as 2^(x + TOP_LOG2 - max x), which leaves room above for a maximum that moves lazily.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.compat import inline_asm
from heedful.kernels.hopper.softmax import _any_above, lane_sums, scale_rows

# The largest probability of a row whose maximum has just been looked up, as a power of two: exact,
# so that a row that sees one key returns its value unrounded.
TOP_LOG2: gl.constexpr = gl.constexpr(4.0)
LIMIT_BITS: gl.constexpr = gl.constexpr(0x410CEAED)  # log2 448, of the largest e4m3, as a float32


@gluon.jit
def pack_e4m3(p_MN):
    """Non-negative float32 values rounded to e4m3, four neighbours to a register."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b16 lo, hi;
        cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;
        mov.b32 $0, {lo, hi};
        }
        """,
        "=r,r,r,r,r",
        [p_MN],
        gl.float8e4nv,
        True,
        4,
    )


@gluon.jit
def as_operand(p_MN, layout: gl.constexpr):
    """float32 scores in the layout of a product's result -> e4m3 left operand of the next.

    Of 16 keys, a lane holds 2t, 2t + 1, 8 + 2t, 9 + 2t of a result, and 4t to 4t + 3 of an operand.
    So it hands its own over as those: the keys of V are stored in that order (see fp8_values.py).
    """
    M: gl.constexpr = p_MN.shape[0]
    N: gl.constexpr = p_MN.shape[1]
    p_MN = p_MN.reshape([M, N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([M, N])
    # First the layout, which is a matter of names, so that neighbours in it are packed together.
    return pack_e4m3(gl.convert_layout(p_MN, layout, assert_trivial=True))


@gluon.jit
def softmax_first(s_MN, scale_log2):
    """The first tile: p, and the reference of each row, -inf where it has seen no key."""
    x_MN = s_MN * scale_log2
    m_M = gl.max(x_MN, 1) - TOP_LOG2
    shift_M = gl.where(m_M == float("-inf"), 0.0, m_M)
    return gl.exp2(x_MN - shift_M[:, None]), m_M


@gluon.jit
def vote(x_MN, unset_M, MAY_HIDE_ROWS: gl.constexpr):
    """Whether any exponent of this warp's leaves e4m3, or any row has nothing to compare with."""
    bits_MN = x_MN.to(gl.int32, bitcast=True)
    if MAY_HIDE_ROWS:
        force_M = gl.where(unset_M, 0x7FFFFFFF, 0)
        return inline_asm(
            _any_above,
            ("=r", "r", "r", "r"),
            [bits_MN, force_M, LIMIT_BITS],
            gl.int32,
            is_pure=True,
        )
    else:
        return inline_asm(
            _any_above, ("=r", "r", "r"), [bits_MN, LIMIT_BITS], gl.int32, is_pure=True
        )


@gluon.jit
def softmax_careful(s_MN, m_M, l_ML, scale_log2, MAY_HIDE_ROWS: gl.constexpr):
    """One more tile against old references, which move only where p would leave e4m3.

    Returns p, references, sums of p, what the output so far is to be scaled by, and whether this
    warp moved any reference: only then must it be scaled.
    """
    unset_M = m_M == float("-inf")
    shift_M = gl.where(unset_M, 0.0, m_M) if MAY_HIDE_ROWS else m_M
    x_MN = s_MN * scale_log2 - shift_M[:, None]
    moved = vote(x_MN, unset_M, MAY_HIDE_ROWS)
    alpha_M = gl.full(m_M.shape, 1.0, gl.float32, m_M.type.layout)
    if moved != 0:
        delta_M = gl.max(x_MN, 1) - TOP_LOG2
        if MAY_HIDE_ROWS:
            risen_M = gl.maximum(delta_M, 0.0)
            m_M = gl.where(unset_M, delta_M, m_M + risen_M)
            alpha_M = gl.where(unset_M, 1.0, gl.exp2(-risen_M))
            delta_M = gl.where(unset_M & (delta_M > float("-inf")), delta_M, risen_M)
        else:
            delta_M = gl.maximum(delta_M, 0.0)
            m_M += delta_M
            alpha_M = gl.exp2(-delta_M)
        x_MN = x_MN - delta_M[:, None]
        l_ML = scale_rows(l_ML, alpha_M)
    p_MN = gl.exp2(x_MN)
    return p_MN, m_M, l_ML + lane_sums(p_MN), alpha_M, moved


@gluon.jit
def softmax_early(s_MN, m_M, l_ML, scale_log2, MAY_HIDE_ROWS: gl.constexpr):
    """As softmax_careful, but p is computed before it is known whether references move, so that
    nothing waits for the vote, and once more from the scores, which stay, where they do."""
    unset_M = m_M == float("-inf")
    shift_M = gl.where(unset_M, 0.0, m_M) if MAY_HIDE_ROWS else m_M
    x_MN = s_MN * scale_log2 - shift_M[:, None]
    moved = vote(x_MN, unset_M, MAY_HIDE_ROWS)
    p_MN = gl.exp2(x_MN)
    sum_ML = l_ML + lane_sums(p_MN)
    alpha_M = gl.full(m_M.shape, 1.0, gl.float32, m_M.type.layout)
    if moved != 0:
        old_M = m_M
        m_M = gl.maximum(m_M, gl.max(s_MN * scale_log2, 1) - TOP_LOG2)
        shift_M = gl.where(m_M == float("-inf"), 0.0, m_M) if MAY_HIDE_ROWS else m_M
        alpha_M = gl.exp2(old_M - shift_M)
        p_MN = gl.exp2(s_MN * scale_log2 - shift_M[:, None])
        sum_ML = scale_rows(l_ML, alpha_M) + lane_sums(p_MN)
    return p_MN, m_M, sum_ML, alpha_M, moved
