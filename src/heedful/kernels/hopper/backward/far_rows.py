"""Rows far from 0 in the backward: rows whose log-sum-exp one float32 does not hold well.

Consumers compute probabilities as 2^(s c - L), with raw scores s, by one fused multiply-add. L is
the log-sum-exp in base 2, and c, a float32, converts scores to base 2. So the only error is one
factor for each row: the rounding of L, and that of c times the row's maximum. The prologue
recomputes the logits s c of far rows with the same c, their maximum t and the sum l of 2^(s c - t),
and stores this factor, f = 2^(L - t) / l. The producer multiplies the cotangents and the delta of
far rows by it, in shared memory. This is enough to correct dV, dP and dS, and consumers need not
know of it.

Probabilities wait as float16 (p_scale.py), whose range 2^(s c - L) must not leave, and cotangents
of float16 lose digits to a small factor. So from 2^20 on, L is t + log2(l), rounded, for float16,
whose probabilities have no scale, and t for bfloat16, where the scale goes into f. Scores of 2^26
have steps of 16 in base 2: a float16 row's probabilities or cotangents are up to 2^8 times too
small there, and gradients with cotangents near 2^-11 lose up to 3 % of the largest. Larger scores
become less and less exact.

M query rows.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.common.constants import LOG2E
from heedful.kernels.hopper.sm90.compat import inline_asm
from heedful.kernels.hopper.sm90.pipeline import box_rows

# The bound in base 2: 2^10, as in common/statistics.py, and a little more for the scale.
FAR_LOG2 = tl.constexpr(1496.0)
# The same bound as the bits of a float32.
FAR_LOG2_BITS = tl.constexpr(0x44BB0000)
# From this magnitude on, L is not the log-sum-exp that the forward stored.
FARTHER_LOG2 = tl.constexpr(1048576.0)


@triton.jit
def lse_log2(lse_M, P_SCALE_LOG2: tl.constexpr):
    """The number to subtract from a row's logits in base 2, so that probabilities are scaled. A row
    without any key gets +inf: its probabilities are 0."""
    less_M = tl.fma(lse_M, LOG2E, -P_SCALE_LOG2)
    return tl.where(lse_M == float("-inf"), float("inf"), less_M)


@triton.jit
def is_far(lse_log2_M):
    """Which rows are far from 0."""
    size_M = tl.abs(lse_log2_M)
    return (size_M >= FAR_LOG2) & (size_M < float("inf"))


@triton.jit
def far_rows(lse_log2_M, top_M, sum_M, P_SCALE_LOG2: tl.constexpr):
    """(lse_log2, scale of cotangents) of far rows. top_M, sum_M: the maximum of logits in base 2,
    and the sum of 2^(logit - maximum)."""
    farther_M = top_M
    if P_SCALE_LOG2 == 0.0:
        farther_M += tl.log2(sum_M)
    less_M = tl.where(tl.abs(lse_log2_M) >= FARTHER_LOG2, farther_M, lse_log2_M)
    return less_M, tl.exp2(less_M - top_M + P_SCALE_LOG2) / sum_M


@gluon.constexpr_function
def _vote_far(outputs, inputs):
    """Assembly: does any lane of the warp hold a number that `is_far`? Without their signs, floats
    keep their order as integers, and one unsigned comparison tests both bounds."""
    (flag,) = outputs[0]
    (values,) = inputs
    first = FAR_LOG2_BITS.value
    lines = ["{ .reg .pred p, q; .reg .b32 t; setp.ne.b32 p, 0, 0;"]
    for value in values:
        lines.append(f"and.b32 t, {value}, 0x7fffffff; sub.u32 t, t, {first};")
        lines.append(f"setp.lt.u32 q, t, {0x7F800000 - first}; or.pred p, p, q;")
    return " ".join(lines) + f" vote.sync.any.pred p, p, 0xffffffff; selp.b32 {flag}, 1, 0, p; }}"


@gluon.jit
def any_far(lse_log2_M):
    """Whether any row of the warp is far from 0."""
    bits = lse_log2_M.to(gl.int32, bitcast=True)
    return inline_asm(_vote_far, ("=r", "r"), [bits], gl.int32, is_pure=True) != 0


@gluon.constexpr_function
def _scale_rows(rows, row_bytes, nbytes, dtype):
    """Assembly: a warp multiplies the rows of a box by numbers in shared memory; a lane takes 16
    bytes at a time. Swizzling does not move bytes to another row. A wide box is several ones, one
    after the other, of row_bytes each."""
    step = [
        "add.u32 at, $0, off; or.b32 at, at, $2; ld.shared.v4.b32 {a0, a1, a2, a3}, [at];",
        f"shr.u32 r, off, {row_bytes.bit_length() - 1}; and.b32 r, r, {rows - 1};",
        "shl.b32 r, r, 2; add.u32 r, r, $1; or.b32 r, r, $2; ld.shared.f32 f, [r];",
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
    """Bytes of a row of a box: TMA cuts wider tiles into boxes of 128 bytes."""
    return min(2 * shape[-1], 128)


@gluon.jit
def scale_rows(box, scale_M, base=0):
    """A warp multiplies the rows of a box in shared memory by numbers in shared memory. Products
    see the result. base: the program's place in its cluster, times 2^24."""
    shape: gl.constexpr = box.shape
    ROWS: gl.constexpr = box_rows(shape)
    NBYTES: gl.constexpr = 2 * ROWS * shape[-1]
    text: gl.constexpr = _scale_rows(ROWS, _row_bytes(shape), NBYTES, box.dtype)
    inline_asm(text, "r,r,r,~{memory}", [box, scale_M, gl.to_tensor(base)])
