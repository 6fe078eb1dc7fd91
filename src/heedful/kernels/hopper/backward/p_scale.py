"""The scale of probabilities in the backward: 2^15 for bfloat16 problems, 1 for float16 ones.

Probabilities wait for dP in 16 bits. bfloat16 has 8 bits of precision, so dS would be rounded twice
where other kernels round once. float16 has 11 bits, but a small range. So probabilities of bfloat16
problems are scaled by 2^15 and wait as float16: at most 2^15, with all 11 bits down to 2^-29. dS,
dV, dK and dQ carry the scale until they are stored. A power of two rounds nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def p_scale_log2(dtype):
    """The base 2 logarithm of the scale for a dtype."""
    return 15.0 if dtype == gl.bfloat16 else 0.0


@gluon.constexpr_function
def p_descale(dtype):
    """The factor of gradients when they are stored: 1 / scale."""
    return 0.5 ** p_scale_log2(dtype)
