"""Constants of exponentials and logarithms in base 2."""

import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# LOG2E minus its rounding to float32.
LOG2E_REST: tl.constexpr = tl.constexpr(1.925963033500e-08)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
