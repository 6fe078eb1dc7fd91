"""How large probabilities are while they wait for dP, and gradients until they are stored.

bfloat16 has 8 bits: dS of such probabilities would be rounded twice where others round once.
float16 has 11, but little range. So probabilities of bfloat16 problems are made 2^15 times as large
and wait as float16: at most 2^15, and with all 11 bits down to 2^-29. dV, dK and dQ come out 2^15
times as large and are divided where they are scaled. Powers of two round nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def doublings(dtype):
    """The base-2 logarithm of how many times as large they are in a problem of this dtype."""
    return 15.0 if dtype == gl.bfloat16 else 0.0


@gluon.constexpr_function
def unit(dtype):
    """What gradients are multiplied by in the end."""
    return 0.5 ** doublings(dtype)
