"""Converts probabilities to 8-bit operands without moving them between lanes.

In the layout of scores, a lane has keys 8 j + 4 half + (0 to 3) of each tile, in float32. As an
operand of 8-bit products it needs 8 or 16 adjacent keys. But a sum of products may have any order.
So rows of V lie in LDS in the order of `stored_keys`, in which the lane's own keys are adjacent.

Shapes: M query rows, N key rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def stored_keys(rows, WIDTH: gl.constexpr):
    """Which key of a tile each row of V in LDS holds, for WIDTH adjacent keys; 4 changes
    nothing."""
    i = rows % 4
    j = rows // 4 % (WIDTH // 4)
    half = rows // WIDTH % 2
    return rows // (2 * WIDTH) * (2 * WIDTH) + 8 * j + 4 * half + i


@gluon.jit
def side_by_side(a_MN, b_MN):
    """Concatenates (M, N) and (M, N) to (M, 2 N)."""
    M: gl.constexpr = a_MN.shape[0]
    N: gl.constexpr = a_MN.shape[1]
    return gl.join(a_MN, b_MN).permute([0, 2, 1]).reshape([M, 2 * N])


@gluon.jit
def _words(p_MN):
    """Rounds four neighbours to e4m3 in one int32: (M, N) -> (M, N / 4).

    Two conversions fill the halves of a register. The compiler would take a register for each half
    and combine them. This code must respect the wait states itself: a conversion must not directly
    follow that of its other half, or the exponential that it reads, and products come two
    instructions later.
    """
    M: gl.constexpr = p_MN.shape[0]
    N: gl.constexpr = p_MN.shape[1]
    even, odd = gl.split(p_MN.reshape([M, N // 4, 2, 2]))
    p0, p2 = gl.split(even)
    p1, p3 = gl.split(odd)
    return gl.inline_asm_elementwise(
        "s_nop 0\n"
        "v_cvt_pk_fp8_f32 $0, $2, $4\n"
        "v_cvt_pk_fp8_f32 $1, $3, $5\n"
        "v_cvt_pk_fp8_f32 $0, $6, $8 op_sel:[0,0,1]\n"
        "v_cvt_pk_fp8_f32 $1, $7, $9 op_sel:[0,0,1]\n"
        "s_nop 1",
        "=&v,=&v,v,v,v,v,v,v,v,v",
        [p0, p1, p2, p3],
        dtype=gl.int32,
        is_pure=True,
        pack=2,
    )


@gluon.constexpr_function
def _words_layout(operand):
    """The layout of the words of an operand: every four neighbours are one word."""
    reg, lane, warp = operand.reg_bases, operand.lane_bases, operand.warp_bases
    assert reg[:2] == [[0, 1], [0, 2]]
    reg, lane, warp = ([[m, n // 4] for m, n in bases] for bases in (reg[2:], lane, warp))
    return gl.DistributedLinearLayout(
        reg, lane, warp, [], [operand.shape[0], operand.shape[1] // 4]
    )


@gluon.jit
def fp8_operand(p_MN, dtype: gl.constexpr, OPERAND: gl.constexpr):
    """Probabilities in `dtype`, the target's e4m3, as an operand, in the order of `stored_keys`."""
    M: gl.constexpr = p_MN.shape[0]
    N: gl.constexpr = p_MN.shape[1]
    WIDTH: gl.constexpr = OPERAND.k_width
    words = _words(p_MN).reshape([M, N // (2 * WIDTH), WIDTH // 4, 2])
    words = words.permute([0, 1, 3, 2]).reshape([M, N // 4])
    # Here, whole registers are renamed. With bytes, the compiler would combine words.
    WORDS: gl.constexpr = _words_layout(gl.to_linear_layout(OPERAND, [M, N]))
    words = gl.convert_layout(words, WORDS)
    even = gl.join(words.to(gl.int8), (words >> 16).to(gl.int8))
    odd = gl.join((words >> 8).to(gl.int8), (words >> 24).to(gl.int8))
    p_MN = gl.join(even, odd).reshape([M, N]).to(dtype, bitcast=True)
    return gl.convert_layout(p_MN, OPERAND)


@gluon.jit
def _positive(scale):
    """The magnitude of a scale, with which the maximum commutes, and which leaves masked scores at
    -inf. 0, which descales may give, becomes the least normal number."""
    size = gl.abs(scale)
    return gl.where(size < 2.0**-126, 2.0**-126, size)


@gluon.jit
def _with_sign_of(scale, q_MD):
    """Queries whose products have the sign that `scale` gives them. Zeros keep their sign: e4m3fnuz
    has only one zero, and the bits of the other are NaN. NaN stays NaN."""
    bits_MD = q_MD.to(gl.int8, bitcast=True)
    # This is arithmetic, since a comparison takes a pair of scalar registers for each byte.
    has_size_MD = (bits_MD & 0x7F) + 0x7F
    sign = gl.where(scale < 0, -128, 0).to(gl.int8)
    return (bits_MD ^ (has_size_MD & sign)).to(q_MD.dtype, bitcast=True)


@gluon.jit
def split_sign(scale, q_MD):
    """(magnitude of the scale of scores, queries that have its sign)."""
    return _positive(scale), _with_sign_of(scale, q_MD)
