"""Conversions round exactly as the target format demands, out-of-range values included."""

import math
from fractions import Fraction

import numpy as np
import pytest

from emulated.helpers.exact import round_exact
from emulated.helpers.snippets import vector
from heedful.emulator.floats import FP8


def floats(count: int = 512) -> np.ndarray:
    rng = np.random.default_rng(7)
    wild = rng.integers(0, 2**32, count // 2, dtype=np.uint64).astype(np.uint32).view(np.float32)
    near = rng.standard_normal(count // 2) * 2.0 ** rng.integers(-26, 18, count // 2)
    edges = [0.0, -0.0, math.inf, -math.inf, math.nan, 65504.0, 65520.0, -65519.99, 3.4e38]
    edges += [
        2.0**-14,
        2.0**-24,
        2.0**-25,
        1.00390625,
        1.01171875,
        448.0,
        464.0,
        240.0,
        248.0,
        57344.0,
    ]
    return np.concatenate([near.astype(np.float32), wild, np.array(edges, np.float32)])[-512:]


def decode(pattern: int, form: str) -> float:
    if form == "bf16":
        return float(np.uint32(pattern << 16).view(np.float32))
    return float(np.uint16(pattern).view(np.float16))


@pytest.mark.parametrize(
    ("text", "arch", "form"),
    [
        ("v_cvt_pk_bf16_f32 v20, v10, v10", "gfx950", "bf16"),
        ("v_cvt_pk_f16_f32 v20, v10, v10", "gfx950", "f16"),
        ("v_cvt_f16_f32_e32 v20, v10\nv_lshl_or_b32 v20, v20, 16, v20", "gfx942", "f16"),
    ],
)
def test_narrowing_is_to_nearest_even(text, arch, form):
    x = floats()
    (got,) = vector(text, [x], ["v20"], arch=arch)
    for result, value in zip(got, x.astype(float), strict=True):
        low, high = decode(int(result & 0xFFFF), form), decode(int(result >> 16), form)
        if math.isnan(value):
            assert math.isnan(low) and math.isnan(high)
            continue
        wanted = round_exact(Fraction(value), form) if math.isfinite(value) else value
        assert low == high == wanted and math.copysign(1, low) == math.copysign(1, value)


def test_narrowing_toward_zero_never_grows():
    x = floats()
    (got,) = vector("v_cvt_pkrtz_f16_f32 v20, v10, v10", [x], ["v20"])
    finite = sorted(abs(float(np.uint16(i).view(np.float16))) for i in range(0x7C00))
    for result, value in zip(got, x.astype(float), strict=True):
        low = decode(int(result & 0xFFFF), "f16")
        if math.isfinite(value):
            at = np.searchsorted(finite, abs(value), side="right") - 1
            assert abs(low) == finite[at]


@pytest.mark.parametrize(
    ("name", "low", "high"), [("u32", 0, 2**32 - 1), ("i32", -(2**31), 2**31 - 1)]
)
def test_float_to_integer_truncates_and_clamps(name, low, high):
    x = floats()
    (got,) = vector(f"v_cvt_{name}_f32_e32 v20, v10", [x], ["v20"])
    for result, value in zip(got, x.astype(float), strict=True):
        if math.isnan(value):
            wanted = 0
        elif math.isinf(value):
            wanted = high if value > 0 else low
        else:
            wanted = min(max(math.trunc(value), low), high)
        assert int(result) == wanted & 0xFFFFFFFF


@pytest.mark.parametrize(("name", "kind"), [("u32", np.uint32), ("i32", np.int32)])
def test_integer_to_float_rounds_to_nearest_even(name, kind):
    rng = np.random.default_rng(1)
    x = rng.integers(0, 2**32, 500, dtype=np.uint64).astype(np.uint32)
    (got,) = vector(f"v_cvt_f32_{name}_e32 v20, v10", [x], ["v20"])
    for result, value in zip(got.view(np.float32), x.view(kind), strict=True):
        assert float(result) == round_exact(Fraction(int(value)), "f32")


def fp8_value(code: int, exponent_bits: int, bias: int, kind: str) -> float:
    """One 8-bit float by its definition."""
    mantissa_bits = 7 - exponent_bits
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    fraction = code & (1 << mantissa_bits) - 1
    if kind == "fnuz" and code == 0x80:
        return math.nan
    if kind == "fn" and code & 0x7F == 0x7F:
        return math.nan
    if kind == "ieee" and exponent == (1 << exponent_bits) - 1:
        value = math.nan if fraction else math.inf
    elif exponent == 0:
        value = math.ldexp(fraction, 1 - bias - mantissa_bits)
    else:
        value = math.ldexp((1 << mantissa_bits) + fraction, exponent - bias - mantissa_bits)
    return -value if code >> 7 else value


FP8_FORMATS = {
    ("gfx942", "fp8"): (4, 8, "fnuz"),
    ("gfx942", "bf8"): (5, 16, "fnuz"),
    ("gfx950", "fp8"): (4, 7, "fn"),
    ("gfx950", "bf8"): (5, 15, "ieee"),
}


@pytest.mark.parametrize(("arch", "form"), FP8_FORMATS)
def test_fp8_tables_follow_the_formats(arch, form):
    for code in range(256):
        wanted, got = fp8_value(code, *FP8_FORMATS[arch, form]), float(FP8[arch][form][code])
        assert got == wanted or (math.isnan(got) and math.isnan(wanted)), hex(code)


@pytest.mark.parametrize(("arch", "form"), FP8_FORMATS)
def test_packing_fp8_takes_the_nearest_code_ties_to_even(arch, form):
    values = [fp8_value(c, *FP8_FORMATS[arch, form]) for c in range(128)]
    finite = [(Fraction(v), c) for c, v in enumerate(values) if math.isfinite(v)]
    largest = max(f for f, _ in finite)
    x = np.clip(floats(), -float(largest), float(largest))
    x = np.where(np.isnan(x), np.float32(1.0), x).astype(np.float32)
    text = f"v_mov_b32_e32 v20, 0\nv_cvt_pk_{form}_f32 v20, v10, v10 op_sel:[0,0,1]"
    (got,) = vector(text, [x], ["v20"], arch=arch)
    fnuz = FP8_FORMATS[arch, form][2] == "fnuz"
    for result, value in zip(got, x.astype(float), strict=True):
        size = abs(Fraction(value))
        gap = min(abs(size - f) for f, _ in finite)
        nearest = [c for f, c in finite if abs(size - f) == gap]
        code = nearest[0] if len(nearest) == 1 else next(c for c in nearest if c % 2 == 0)
        negative = math.copysign(1, value) < 0 and not (fnuz and code == 0)
        code |= 0x80 * negative
        assert int(result) == (code | code << 8) << 16, value


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_fp8_beyond_the_range_saturates_only_in_the_overflow_mode(arch):
    x = np.full(64, 1e6, np.float32)
    convert = "v_mov_b32_e32 v20, 0\nv_cvt_pk_fp8_f32 v20, v10, v10"
    (plain,) = vector(convert, [x], ["v20"], arch=arch)
    mode = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n"
    (capped,) = vector(mode + convert, [x], ["v20"], arch=arch)
    table = FP8[arch]["fp8"]
    assert np.isnan(table[plain & 0xFF]).all()
    assert (table[capped & 0xFF] == np.nanmax(table)).all()


def test_unpacking_fp8_reads_the_chosen_half():
    codes = np.arange(256, dtype=np.uint32)
    words = codes | (codes[::-1] << 8) | (codes << 16) | (codes << 24)
    table = FP8["gfx942"]["fp8"]
    text = """
        v_cvt_pk_f32_fp8_e32 v[20:21], v10
        v_cvt_pk_f32_fp8_sdwa v[22:23], v10 src0_sel:WORD_1
        v_cvt_f32_fp8_sdwa v24, v10 src0_sel:BYTE_1
    """
    out = vector(text, [words], ["v20", "v21", "v22", "v23", "v24"])
    wanted = [table, table[::-1], table, table, table[::-1]]
    for got, want in zip(out.view(np.float32), wanted, strict=True):
        assert np.array_equal(got, want, equal_nan=True)
