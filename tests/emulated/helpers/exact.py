"""Rounding by the definition, in exact rational arithmetic: what a float unit must return."""

import math
import struct
from fractions import Fraction

# precision in bits (with the hidden one), exponent of the smallest normal, largest finite
FORMATS = {
    "f32": (24, -126, Fraction(2**24 - 1) * Fraction(2) ** 104),
    "f16": (11, -14, Fraction(65504)),
    "bf16": (8, -126, Fraction(2**8 - 1) * Fraction(2) ** 120),
}


def round_exact(value: Fraction, form: str) -> float:
    """The nearest number of a format, ties to even, overflow to infinity (IEEE 754)."""
    precision, smallest, largest = FORMATS[form]
    if value == 0:
        return 0.0
    size = abs(value)
    exponent = max(_floor_log2(size), smallest)
    unit = Fraction(2) ** (exponent - precision + 1)
    quotient = size / unit
    lower = quotient.numerator // quotient.denominator
    rest = quotient - lower
    up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and lower % 2 == 1)
    rounded = (lower + up) * unit
    result = math.inf if rounded > largest else float(rounded)
    return -result if value < 0 else result


def _floor_log2(value: Fraction) -> int:
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


def float_of(bits: int) -> float:
    """The float32 with these bits."""
    return struct.unpack("<f", struct.pack("<I", int(bits)))[0]


def same(got_bits: int, wanted: float) -> bool:
    """Equal as float32, NaNs alike; the sign of zero counts."""
    got = float_of(got_bits)
    if math.isnan(wanted):
        return math.isnan(got)
    return got == wanted and math.copysign(1, got) == math.copysign(1, wanted)
