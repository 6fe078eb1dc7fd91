"""Rows whose scores are far from 0: a float32 log-sum-exp does not hold them well enough."""

# Least |lse| of rows whose probabilities are made of their maximum and sum, not of their lse, which
# is rounded by up to 2^-14 there: as much as float16 rounds a probability, and less than bfloat16.
# The kernels have the same number.
FAR_LSE = 2.0**10
