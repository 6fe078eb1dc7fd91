"""Rows far from 0 in the Hopper backward: of which one float32 does not hold the log-sum-exp well.

Consumers make probabilities as 2^(s c - L), of raw scores s, by one fused multiply-add, where L is
the log-sum-exp in base 2: so its rounding is all that is wrong with them, a factor of the row. The
prologue makes maximum m and sum l of far rows anew (common/statistics.py) and tells what
the factor is, f = 2^(L - m c) / l. Who loads queries multiplies cotangents and delta of far rows by
it, in shared memory. dV, dP and dS want nothing else, and no consumer knows of it.

Probabilities wait as float16 (p_scale.py), which 2^(s c - L) must not leave. So from 2^20
on L is m c instead, and without the scale of probabilities, which f has then: scores of 2^27 leave
it between 2^-8 and 2^8. Larger ones are less and less exact.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.common.constants import LOG2E, LOG2E_REST
from heedful.kernels.hopper.sm90.compat import inline_asm
from heedful.kernels.hopper.sm90.pipeline import box_rows

# In base 2: 2^10, as common/statistics.py has it, and a little more for the scale.
FAR_LOG2 = tl.constexpr(1496.0)
# The same as the bits of a float32.
FAR_LOG2_BITS = tl.constexpr(0x44BB0000)
# From where on the maximum stands for the log-sum-exp.
FARTHER_LOG2 = tl.constexpr(1048576.0)


@triton.jit
def lse_log2(lse_M, P_SCALE_LOG2: tl.constexpr):
    """What a row's logits in base 2 are less by, so that probabilities come out scaled. A row
    without any has no probabilities."""
    less_M = tl.fma(lse_M, LOG2E, -P_SCALE_LOG2)
    return tl.where(lse_M == float("-inf"), float("inf"), less_M)


@triton.jit
def is_far(lse_log2_M):
    """Which rows are far from 0."""
    size_M = tl.abs(lse_log2_M)
    return (size_M >= FAR_LOG2) & (size_M < float("inf"))


@triton.jit
def far_rows(lse_log2_M, m_M, l_M, P_SCALE_LOG2: tl.constexpr):
    """(lse_log2, scale of cotangents) of far rows, from maximum and sum in natural units."""
    is_farther_M = tl.abs(lse_log2_M) >= FARTHER_LOG2
    less_M = tl.where(is_farther_M, m_M * LOG2E, lse_log2_M)
    # m c is subtracted in two parts, its float32 by a fused multiply-add.
    above_M = tl.fma(m_M, -LOG2E_REST, tl.fma(m_M, -LOG2E, less_M))
    return less_M, tl.exp2(above_M + P_SCALE_LOG2) / l_M


@gluon.constexpr_function
def _vote_far(outputs, inputs):
    """Assembly: does any lane of the warp hold a number that `is_far`? As integers, floats without
    a sign keep their order, and one comparison without a sign bounds them on both sides."""
    (flag,), (values,) = outputs[0], inputs
    first = FAR_LOG2_BITS.value
    lines = ["{ .reg .pred p, q; .reg .b32 t; setp.ne.b32 p, 0, 0;"]
    for value in values:
        lines.append(f"and.b32 t, {value}, 0x7fffffff; sub.u32 t, t, {first};")
        lines.append(f"setp.lt.u32 q, t, {0x7F800000 - first}; or.pred p, p, q;")
    return " ".join(lines) + f" vote.sync.any.pred p, p, 0xffffffff; selp.b32 {flag}, 1, 0, p; }}"


@gluon.jit
def any_far(lse_log2_M):
    """Whether a warp has a row far from 0."""
    bits = lse_log2_M.to(gl.int32, bitcast=True)
    return inline_asm(_vote_far, ("=r", "r"), [bits], gl.int32, is_pure=True) != 0


@gluon.constexpr_function
def _scale_rows(rows, row_bytes, nbytes, dtype):
    """Assembly: a warp multiplies the rows of a box by numbers in shared memory, 16 bytes of a
    lane at a time. Swizzling leaves them in their row; a box of more columns is several, one after
    the other, of row_bytes each."""
    step = [
        "add.u32 at, $0, off; ld.shared.v4.b32 {a0, a1, a2, a3}, [at];",
        f"shr.u32 r, off, {row_bytes.bit_length() - 1}; and.b32 r, r, {rows - 1};",
        "shl.b32 r, r, 2; add.u32 r, r, $1; ld.shared.f32 f, [r];",
    ]
    for i in range(4):
        if dtype == gl.bfloat16:
            step.append(f"shl.b32 t, a{i}, 16; mov.b32 x, t; and.b32 t, a{i}, 0xffff0000;")
            step.append("mov.b32 y, t; mul.f32 x, x, f; mul.f32 y, y, f;")
            step.append(f"cvt.rn.bf16x2.f32 a{i}, y, x;")
        else:
            step.append(f"mov.b32 {{lo, hi}}, a{i}; cvt.f32.f16 x, lo; cvt.f32.f16 y, hi;")
            step.append(f"mul.f32 x, x, f; mul.f32 y, y, f; cvt.rn.f16x2.f32 a{i}, y, x;")
    return "\n".join(
        [
            "{ .reg .b32 off, at, r, t, a<4>; .reg .b16 lo, hi; .reg .f32 f, x, y; .reg .pred p;",
            "bar.warp.sync 0xffffffff; mov.u32 off, %laneid; shl.b32 off, off, 4;",
            'AGAIN: .pragma "nounroll";',
            *step,
            "st.shared.v4.b32 [at], {a0, a1, a2, a3};",
            f"add.u32 off, off, 512; setp.lt.u32 p, off, {nbytes}; @p bra AGAIN;",
            "fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff; }",
        ]
    )


@gluon.constexpr_function
def _row_bytes(shape):
    return min(2 * shape[-1], 128)


@gluon.jit
def scale_rows(box, scale_M):
    """A warp multiplies the rows of a box in shared memory by numbers there. Products see it."""
    shape: gl.constexpr = box.shape
    ROWS: gl.constexpr = box_rows(shape)
    NBYTES: gl.constexpr = 2 * ROWS * shape[-1]
    text: gl.constexpr = _scale_rows(ROWS, _row_bytes(shape), NBYTES, box.dtype)
    inline_asm(text, "r,r,~{memory}", [box, scale_M])
