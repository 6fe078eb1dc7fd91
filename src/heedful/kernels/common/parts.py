"""Parts of the keys of a row, merged one after the other (numerics="invariant").

All kernels that merge such parts run these functions. Sums of products are explicit fused
multiply-adds, where the compiler might else contract one of two copies. A part that saw no key
changes nothing, and one that is merged with none before it returns its own bits.

M query rows, E v dim.
"""

import triton
import triton.language as tl

from heedful.kernels.common.constants import LN2
from heedful.kernels.common.scores import exponential, finite_or_zero


@triton.jit
def part_weights(lse_M, rest_M, new_lse_M, new_rest_M):
    """(largest log-sum-exp in two numbers, factor of the parts so far, weight of one more part).
    lse, rest: the same of the parts so far; new_lse, new_rest: of one more."""
    top_M = tl.maximum(lse_M, new_lse_M)
    base_M = finite_or_zero(top_M)
    # If log-sum-exps round to the same number, the rests say which is larger.
    old_M = (lse_M - base_M) + rest_M
    new_M = (new_lse_M - base_M) + new_rest_M
    top_rest_M = finite_or_zero(tl.maximum(old_M, new_M))
    old_M = exponential(old_M - top_rest_M, True)
    new_M = exponential(new_M - top_rest_M, True)
    return top_M, top_rest_M, old_M, new_M


@triton.jit
def plus_part(out_ME, old_M1, part_ME, new_M1):
    """Weighted outputs and those of one more part. Whatever the output of a part without weight
    holds, it is not added."""
    part_ME = tl.where(new_M1 == 0.0, 0.0, part_ME)
    return tl.fma(part_ME, new_M1, out_ME * old_M1)


@triton.jit
def all_parts(lse_M, rest_M, total_M):
    """(log-sum-exp of all parts in two numbers, what outputs are divided by)."""
    sum_rest_M = tl.fma(tl.log2(total_M), LN2, rest_M)
    sum_M = lse_M + sum_rest_M
    sum_rest_M = (lse_M - sum_M) + sum_rest_M
    sum_rest_M = tl.where(tl.abs(sum_M) < float("inf"), sum_rest_M, 0.0)
    return sum_M, sum_rest_M, tl.where(total_M == 0.0, 1.0, total_M)
