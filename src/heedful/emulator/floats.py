"""Number formats and roundings of the CDNA float units, as vectorised NumPy functions."""

import numpy as np

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
I8 = np.int8
I16, I32, I64 = np.int16, np.int32, np.int64
F16, F32, F64 = np.float16, np.float32, np.float64

_TINY32 = np.finfo(F32).tiny
# A float64 whose dropped bits are exactly one half of the last bit of a float32.
_DROPPED, _HALF = U64(0x1FFFFFFF), U64(0x10000000)
_ONE_NAN = U32(0x7FC0)


def flush(x):
    """Replace float32 denormals by zeros of the same sign."""
    small = np.abs(x) < _TINY32
    return np.where(small, np.copysign(F32(0), x), x) if np.count_nonzero(small) else x


def fma32(a, b, c):
    """float32 a * b + c with one rounding.

    The product is exact in float64; the sum is rounded twice (float64, float32), which can only
    go wrong where the float64 sum looks like a tie, so those lanes are nudged by the sum's error.
    """
    product = np.multiply(a, b, dtype=F64)
    total = product + c
    if np.count_nonzero((total.view(U64) & _DROPPED) == _HALF):
        total = _break_ties(total, product, c)
    return total.astype(F32)


def _break_ties(total, product, c):
    """Move a float64 sum that only looks like a float32 tie to the side of its true value."""
    c = np.broadcast_to(np.asarray(c, F64), total.shape)
    head = total - product
    error = (product - (total - head)) + (c - head)
    tie = ((total.view(U64) & _DROPPED) == _HALF) & (error != 0) & np.isfinite(total)
    toward = np.where(error > 0, np.inf, -np.inf)
    return np.where(tie, np.nextafter(total, toward), total)


def bf16_bits(x):
    """float32 to bfloat16 bit patterns (uint32), to nearest even, NaNs quiet."""
    bits = np.ascontiguousarray(x, F32).view(U32)
    rounded = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
    return np.where(np.isnan(x), (bits >> U32(16)) | U32(0x40), rounded)


def bf16_values(bits):
    """bfloat16 bit patterns in the low half of uint32 to float32."""
    return (np.asarray(bits, U32) << U32(16)).view(F32)


def f16_bits(x):
    """float32 to float16 bit patterns (uint32), to nearest even."""
    return np.asarray(x, F32).astype(F16).view(U16).astype(U32)


def f16_bits_rtz(x):
    """float32 to float16 bit patterns (uint32), toward zero; overflow gives the largest finite."""
    x = np.asarray(x, F32)
    half = x.astype(F16)
    away = np.abs(half.astype(F32)) > np.abs(x)
    bits = half.view(U16).astype(U32)
    return np.where(away & np.isfinite(x), bits - U32(1), bits)


def f16_values(bits):
    """float16 bit patterns in the low half of uint32 to float32."""
    return (np.asarray(bits, U32) & U32(0xFFFF)).astype(U16).view(F16).astype(F32)


def _table(exponent_bits: int, bias: int, kind: str):
    """All 256 values of an 8-bit float; `kind` is "ieee", "fn" or "fnuz"."""
    mantissa_bits = 7 - exponent_bits
    code = np.arange(256)
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    normal = (1 + fraction) * 2.0 ** (exponent - bias)
    value = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal)
    value = np.where(code >= 128, -value, value)
    if kind == "fnuz":
        value[0x80] = np.nan
    elif kind == "fn":
        value[0x7F] = value[0xFF] = np.nan
    else:
        top = exponent == (1 << exponent_bits) - 1
        value = np.where(top, np.where(fraction == 0, np.copysign(np.inf, value), np.nan), value)
    return value.astype(F32)


# CDNA3 reads and writes the fnuz forms, CDNA4 those of the OCP standard.
FP8 = {
    "gfx942": {"fp8": _table(4, 8, "fnuz"), "bf8": _table(5, 16, "fnuz")},
    "gfx950": {"fp8": _table(4, 7, "fn"), "bf8": _table(5, 15, "ieee")},
}
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], F32)


def fp8_bits(x, table, saturate: bool = False):
    """float32 to 8-bit float codes (uint32), to nearest even.

    Beyond the largest finite value the result is that value where `saturate` (the mode bit
    FP16_OVFL), else infinity or, in a format without one, NaN.
    """
    x = np.asarray(x, F32)
    finite = table[:128][np.isfinite(table[:128])].astype(F64)
    largest = finite[-1]
    size = np.abs(x).astype(F64)
    clipped = np.minimum(size, largest)
    above = np.searchsorted(finite, clipped).clip(0, len(finite) - 1)
    below = np.maximum(above - 1, 0)
    down, up = clipped - finite[below], finite[above] - clipped
    code = np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above).astype(U32)
    fnuz = bool(np.isnan(table[0x80]))
    nan = U32(0x80 if fnuz else 0x7F)
    if not saturate:
        beyond = size >= largest + (largest - finite[-2]) / 2
        infinity = U32(0x7C) if np.isinf(table[0x7C]) else nan
        code = np.where(beyond, infinity, code)
    negative = np.signbit(x) & ~((code == 0) & fnuz)
    code = np.where(negative & (code != 0x80), code | U32(0x80), code)
    return np.where(np.isnan(x), nan, code).astype(U32)
