"""Rows whose scores are far from 0, so that a float32 log-sum-exp is not exact enough for them."""

# From this |lse| on, probabilities are made from a row's maximum and sum, not from its lse. An lse
# of 2^10 is rounded by up to 2^-14, as much as float16 rounds a probability, and less than
# bfloat16; one of 2^6 by up to 2^-19, which is what a row's sums lose in float32. The kernels have
# the same numbers.
FAR_LSE = 2.0**10
FAR_LSE_OF_FLOAT32 = 2.0**6


def far_lse(item_bytes: int) -> float:
    """The |lse| from which on a row is far from 0. item_bytes: bytes of an element of the
    queries."""
    return FAR_LSE_OF_FLOAT32 if item_bytes >= 4 else FAR_LSE
