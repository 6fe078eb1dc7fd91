"""Softmax of the fp8 forward: p in e4m3, and references that move only where p would exceed e4m3.

M query rows, N keys, J words of four keys, L lanes that share a row, C sums of a lane's row.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.sm90.softmax import peaks
from heedful.kernels.hopper.sm90.speculative_softmax import TOP_LOG2

# log2 of the largest e4m3.
LIMIT: gl.constexpr = gl.constexpr(math.log2(448.0))
# Limits as the bits of float32: the largest e4m3, and the largest p from which a row can be
# rescaled.
E4M3_BITS: gl.constexpr = gl.constexpr(0x43E00000)  # 448
FINITE_BITS: gl.constexpr = gl.constexpr(0x7B800000)  # 2^120
# Keys of a row that one vote covers; a lane sums its quarter of them, see
# sm90/speculative_softmax.py.
VOTE_N: gl.constexpr = gl.constexpr(64)


@gluon.jit
def to_words(p_MN):
    """Packs non-negative float32 values, in the layout of a product's result, as e4m3 words (M, J /
    4, 4).

    A lane holds keys 2t, 2t + 1, 8 + 2t, 9 + 2t of 16 in a result, but 4t to 4t + 3 in an operand.
    It passes its values on in the places of the latter: V's keys are stored in the matching order
    (transpose_v_kernel.py).
    """
    # ptxas: bytes would be carried through the loop one by one, and put together again there.
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
    """The left operand (M, N) that the words hold, four bytes each."""
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
    """Sums over the keys that one lane holds of each 64 keys, (M, C, L)."""
    M: gl.constexpr = p_MN.shape[0]
    C: gl.constexpr = p_MN.shape[1] // VOTE_N
    return gl.sum(gl.sum(p_MN.reshape([M, C, VOTE_N // 8, 4, 2]), 4), 2)


@gluon.jit
def reference(s_MN, scale_log2):
    """The reference that gives the largest p of each row 2^TOP_LOG2; -inf where all keys are
    masked."""
    return peaks(s_MN, scale_log2, False, True) - TOP_LOG2
