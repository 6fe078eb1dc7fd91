"""A log-sum-exp in two float32 numbers, so that partial results whose scores are far from 0 can be
merged.

One float32 near 1e9 has no digits left for the logarithm of a sum: its neighbours are 64 away. Here
`lse` is the rounded log-sum-exp, and `rest` is the part that its rounding lost. If the maximum is
in natural units, both together know the logarithm to float32's digits, however far from 0 the
maximum is. If it is in base 2, they know it to 2^-48 of the maximum. Kernels whose results are
merged later call it.
"""

import triton
import triton.language as tl

from heedful.kernels.common.constants import LN2

# The factors from base 2 to natural units. Scores were multiplied by float32(LOG2E), so the factor
# is 1 / float32(LOG2E): ln 2 in float32, and the remainder.
NATURAL = tl.constexpr(0.6931471824645996)
NATURAL_REST = tl.constexpr(7.348693061389e-09)


@triton.jit
def log_sum_exp(maximum, total, IS_BASE_2: tl.constexpr):
    """(lse, rest), whose sum is maximum + ln(total); tensors of any shape and layout.

    maximum: of scores in natural units or, if IS_BASE_2, of scores times float32(LOG2E). total: the
    sum of exp(score - maximum). Rows that saw nothing (-inf and 0) get -inf and 0.

    Each product that enters a sum is an explicit fused multiply-add. The compiler might contract
    only one of two equal expressions, and `rest` would then belong to another `lse`.
    """
    log = tl.log2(total) * LN2
    if IS_BASE_2:
        lse = tl.fma(maximum, NATURAL, log)
        rest = tl.fma(maximum, NATURAL_REST, tl.fma(maximum, NATURAL, -lse) + log)
    else:
        lse = maximum + log
        rest = (maximum - lse) + log
    return lse, tl.where(tl.abs(lse) < float("inf"), rest, 0.0)


@triton.jit
def rounded_log_sum_exp(maximum, total, IS_BASE_2: tl.constexpr):
    """`log_sum_exp` with lse as the rounded sum of both numbers. A merge of one part then returns
    that very lse."""
    lse, rest = log_sum_exp(maximum, total, IS_BASE_2)
    rounded = lse + rest
    rest = (lse - rounded) + rest
    return rounded, tl.where(tl.abs(rounded) < float("inf"), rest, 0.0)
