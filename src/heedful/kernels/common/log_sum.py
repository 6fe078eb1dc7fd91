"""A log-sum-exp in two float32 numbers, so that parts whose scores are far from 0 can be merged.

One float32 of 1e9 has no digits left for the logarithm of a sum: its neighbours are 64 away. Here
`lse` is rounded as ever, and `rest` is what its rounding left. Of a maximum in natural units they
tell the logarithm to float32's digits, however far from 0 the maximum is; of one in base 2 to 2^-48
of the maximum.
"""

import triton
import triton.language as tl

from heedful.kernels.common.constants import LN2

# What a maximum in base 2 is multiplied by: 1 over the float32 LOG2E that scores were multiplied
# by, which is ln 2 in float32, and what that leaves.
NATURAL = tl.constexpr(0.6931471824645996)
NATURAL_REST = tl.constexpr(7.348693061389e-09)


@triton.jit
def log_sum_exp(maximum, total, IS_BASE_2: tl.constexpr):
    """(lse, rest), whose sum is maximum + ln(total), tensors of any shape and layout. maximum: of
    scores in natural units or, IS_BASE_2, of scores times float32(LOG2E). total: of
    exp(score - maximum). Rows that saw nothing, -inf and 0, have -inf and 0.

    Every product that enters a sum is a fused multiply-add by name, or may become one: `rest` is
    of the `lse` that it is told beside, whatever rounded that.
    """
    log = tl.log2(total) * LN2
    if IS_BASE_2:
        lse = tl.fma(maximum, NATURAL, log)
        rest = tl.fma(maximum, NATURAL_REST, tl.fma(maximum, NATURAL, -lse) + log)
    else:
        lse = maximum + log
        rest = (maximum - lse) + log
    return lse, tl.where(tl.abs(lse) < float("inf"), rest, 0.0)
