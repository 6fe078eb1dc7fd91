"""Softmax of the fp8 forward: p in e4m3, and references that move only where p would leave it.

M query rows, N keys, J words of four keys, L lanes that share a row, C sums of a lane's row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.compat import inline_asm
from heedful.kernels.hopper.softmax import _vote_above, scale_rows

# The largest probability of a row whose maximum has just been looked up, as a power of two: exact,
# so that a row that sees one key returns its value unrounded.
TOP_LOG2: gl.constexpr = gl.constexpr(4.0)
LIMIT_BITS: gl.constexpr = gl.constexpr(0x410CEAED)  # log2 448, of the largest e4m3, as a float32
# Keys of a row of which a lane adds up its quarter for one vote, see speculative_softmax_fp8.py.
VOTE_N: gl.constexpr = gl.constexpr(64)


@gluon.jit
def to_words(p_MN):
    """Non-negative float32 values in the layout of a product's result -> e4m3, (M, J / 4, 4) words.

    Of 16 keys, a lane holds 2t, 2t + 1, 8 + 2t, 9 + 2t of a result, and 4t to 4t + 3 of an operand.
    So it hands its own over as those: V's keys are stored in that order (transpose_v_kernel.py).
    As bytes, P would cross the loop's end one by one, to be put together again there.
    """
    M: gl.constexpr = p_MN.shape[0]
    N: gl.constexpr = p_MN.shape[1]
    even, odd = p_MN.reshape([M, N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).split()
    p0, p2 = even.split()
    p1, p3 = odd.split()
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b16 lo, hi;
        cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;
        mov.b32 $0, {lo, hi};
        }
        """,
        "=r,f,f,f,f",
        [p0, p1, p2, p3],
        gl.int32,
        True,
        1,
    )


@gluon.jit
def from_words(words, layout: gl.constexpr):
    """The left operand (M, N) that words hold: each stands for its four bytes."""
    M: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1] * 16
    pairs = gl.join(words, words)
    words_MN = gl.join(pairs, pairs).reshape([M, N])
    words_MN = gl.convert_layout(words_MN, layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [words_MN], gl.float8e4nv, True, 4
    )


@gluon.jit
def part_sums(p_MN):
    """Sums over those of each 64 keys that one lane holds, (M, C, L)."""
    M: gl.constexpr = p_MN.shape[0]
    C: gl.constexpr = p_MN.shape[1] // VOTE_N
    return gl.sum(gl.sum(p_MN.reshape([M, C, VOTE_N // 8, 4, 2]), 4), 2)


@gluon.jit
def shift_of(m_M):
    """What to subtract for a reference: -inf is that of a row which has seen no key."""
    return gl.where(m_M == float("-inf"), 0.0, m_M)


@gluon.jit
def reference(s_MN, scale_log2):
    """What puts the largest p of each row at 2^TOP_LOG2, -inf where all keys are hidden."""
    if scale_log2 < 0.0:
        top_M = gl.min(s_MN, 1)
    else:
        top_M = gl.max(s_MN, 1)
    return top_M * scale_log2 - TOP_LOG2


@gluon.jit
def threshold_vote(x_MN, unset_M, MAY_MASK_ROWS: gl.constexpr):
    """Whether any exponent of this warp's leaves e4m3, or any row has nothing to compare with."""
    bits_MN = x_MN.to(gl.int32, bitcast=True)
    if MAY_MASK_ROWS:
        force_M = gl.where(unset_M, 0x7FFFFFFF, 0)
        return inline_asm(
            _vote_above,
            ("=r", "r", "r", "r"),
            [bits_MN, force_M, LIMIT_BITS],
            gl.int32,
            is_pure=True,
        )
    else:
        return inline_asm(
            _vote_above, ("=r", "r", "r"), [bits_MN, LIMIT_BITS], gl.int32, is_pure=True
        )


@gluon.jit
def softmax_threshold(s_MN, m_M, l_ML, scale_log2, MAY_MASK_ROWS: gl.constexpr):
    """One more tile against old references, with a vote on the scores before the exponentials.

    Returns p, references, sums of p, what the output so far is to be scaled by, and whether this
    warp moved any reference: only then must it be scaled.
    """
    unset_M = m_M == float("-inf")
    shift_M = gl.where(unset_M, 0.0, m_M) if MAY_MASK_ROWS else m_M
    x_MN = s_MN * scale_log2 - shift_M[:, None]
    must_rescale = threshold_vote(x_MN, unset_M, MAY_MASK_ROWS)
    alpha_M = gl.full(m_M.shape, 1.0, gl.float32, m_M.type.layout)
    if must_rescale != 0:
        delta_M = gl.max(x_MN, 1) - TOP_LOG2
        if MAY_MASK_ROWS:
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
    return p_MN, m_M, l_ML + gl.sum(part_sums(p_MN), 1), alpha_M, must_rescale
