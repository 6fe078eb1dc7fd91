"""The scale of probabilities in the Hopper backward: 2^15, and 1 in float16 problems.

Probabilities wait for dP with 16 bits. bfloat16 has 8 bits of precision: dS would be rounded twice
where others round once. float16 has 11, but little range. Scaled by 2^15, probabilities of bfloat16
problems wait as float16: at most 2^15, and with all 11 bits down to 2^-29. dS, dV, dK and dQ carry
the scale until they are stored. A power of two rounds nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def p_scale_log2(dtype):
    """The base-2 logarithm of the scale, by the problem's dtype."""
    return 15.0 if dtype == gl.bfloat16 else 0.0


@gluon.constexpr_function
def p_descale(dtype):
    """What gradients are multiplied by as they are stored: one over the scale."""
    return 0.5 ** p_scale_log2(dtype)
