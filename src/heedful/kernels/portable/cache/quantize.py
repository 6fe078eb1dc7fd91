"""Quantises new values of a cache: to integers, or to float8 by integer arithmetic alone, which
every target has.

`update.append_rows` calls it. Shapes: N rows of a tile, D dims of a head.
"""

import triton
import triton.language as tl

from heedful.kernels.args.portable import GroupScale
from heedful.kernels.args.shared import Descale

# Adding and then subtracting this number rounds a float32 below 2**22 to an integer, half to even.
_ROUNDS = tl.constexpr(1.5 * 2.0**23)


@triton.constexpr_function
def is_float8(storage):
    """Whether a storage dtype is one of the 8-bit floats."""
    return storage[:6] == "float8"


@triton.constexpr_function
def mantissa_bits(storage):
    """Bits of the mantissa of an 8-bit float."""
    return 2 if storage == "float8_e5m2" else 3


@triton.constexpr_function
def least_exponent(storage):
    """The least exponent of normal numbers of an 8-bit float."""
    if storage == "float8_e5m2":
        return -14
    return -7 if storage == "float8_e4m3fnuz" else -6


@triton.jit
def rounded(x):
    """The nearest integer; half to even."""
    return (x + _ROUNDS) - _ROUNDS


@triton.jit
def float8_code(x, STORAGE: tl.constexpr):
    """The bits of the nearest float8, as int32. x: float32 numbers within its range."""
    MANTISSA: tl.constexpr = mantissa_bits(STORAGE)
    LEAST: tl.constexpr = least_exponent(STORAGE)
    bits = x.to(tl.int32, bitcast=True)
    exponent = tl.maximum(((bits >> 23) & 0xFF) - 127, LEAST)
    # Numbers with one exponent are evenly spaced: there are 2**MANTISSA up to the next power of
    # two.
    per_step = ((127 + MANTISSA - exponent) << 23).to(tl.float32, bitcast=True)
    code = ((exponent - LEAST) << MANTISSA) + rounded(tl.abs(x) * per_step).to(tl.int32)
    sign = ((bits >> 31) & 1) << 7
    if STORAGE == "float8_e4m3fnuz":
        # In this type a zero with a sign encodes NaN.
        sign = tl.where(code == 0, 0, sign)
    return code | sign


@triton.jit
def scaled_by_head(x_ND, scale: Descale, b, g):
    """(values - shift) / scale, with the scale and shift of (batch, KV head); the shift may be
    absent."""
    offset = b * scale.stride_b + g * scale.stride_h
    if scale.shift is not None:
        x_ND -= tl.load(scale.shift + offset)
    return tl.math.div_rn(x_ND, tl.zeros_like(x_ND) + tl.load(scale.ptr + offset))


@triton.jit
def scaled_by_group(
    x_ND,
    scale: GroupScale,
    at_N,
    exists,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """(values - shift) / scale, with scales of groups that it computes and stores: each group's
    largest magnitude becomes LIMIT. at_N: offset of each row's first group in the arrays of scales.
    """
    group_D = tl.arange(0, x_ND.shape[1]) // GROUP
    made_ND = x_ND
    for n in range(DIM // GROUP):
        here = (group_D == n)[None, :]
        less_ND = x_ND
        if scale.shift is not None:
            low_N = tl.min(tl.where(here, x_ND, float("inf")), 1)
            high_N = tl.max(tl.where(here, x_ND, float("-inf")), 1)
            shift_N = (low_N + high_N) * 0.5
            tl.store(scale.shift + at_N + n, shift_N, mask=exists)
            less_ND -= shift_N[:, None]
        most_N = tl.max(tl.where(here, tl.abs(less_ND), 0.0), 1)
        scale_N = tl.math.div_rn(most_N, tl.zeros_like(most_N) + LIMIT)
        scale_N = tl.where(scale_N > 0, scale_N, 1.0)
        tl.store(scale.ptr + at_N + n, scale_N, mask=exists)
        divisor_ND = tl.zeros_like(x_ND) + scale_N[:, None]
        made_ND = tl.where(here, tl.math.div_rn(less_ND, divisor_ND), made_ND)
    return made_ND


@triton.jit
def stored_codes(x_ND, base, STORAGE: tl.constexpr, LIMIT: tl.constexpr):
    """Scaled values in the dtype of the cache at `base`, clamped to LIMIT. Two int4 share a byte,
    the even one in its low bits."""
    x_ND = tl.minimum(tl.maximum(x_ND, -LIMIT), LIMIT)
    if is_float8(STORAGE):
        code_ND = float8_code(x_ND, STORAGE)
        return code_ND.to(tl.uint8).to(base.dtype.element_ty, bitcast=True)
    else:
        code_ND = rounded(x_ND).to(tl.int32)
        if STORAGE == "int4":
            pairs = tl.reshape(code_ND & 0xF, [x_ND.shape[0], x_ND.shape[1] // 2, 2])
            low, high = tl.split(pairs)
            return (low | (high << 4)).to(base.dtype.element_ty)
        else:
            return code_ND.to(base.dtype.element_ty)
