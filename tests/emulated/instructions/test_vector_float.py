"""Float instructions return what IEEE 754 defines, special values and denormals included."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from emulated.helpers.exact import float_of, round_exact, same
from emulated.helpers.snippets import bits, vector

SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    3.0,
    1e-45,
    -1e-45,
    1.1754942e-38,
    1.1754944e-38,
    -1.1754944e-38,
]
SPECIAL += [
    3.4028235e38,
    -3.4028235e38,
    math.inf,
    -math.inf,
    math.nan,
    1.0000001,
    16777216.0,
    1.5e-39,
]


def samples(columns: int, count: int = 400) -> list[np.ndarray]:
    """All pairs of special values, then random bit patterns and numbers of nearby magnitude."""
    rng = np.random.default_rng(columns)
    special = np.array(list(itertools.product(SPECIAL, repeat=2)), np.float32)
    third = rng.choice(np.array(SPECIAL, np.float32), (len(special), 1))
    special = np.concatenate([special, third], axis=1)
    wild = rng.integers(0, 2**32, (count // 2, 3), dtype=np.uint64).astype(np.uint32)
    near = rng.standard_normal((count // 2, 3)) * 2.0 ** rng.integers(-12, 12, (count // 2, 3))
    table = np.concatenate([special, wild.view(np.float32), near.astype(np.float32)])
    return [np.ascontiguousarray(table[:, i]) for i in range(columns)]


def exact(operation, *values: float) -> float:
    """The correctly rounded result; non-finite and signed-zero cases by Python's IEEE doubles."""
    with np.errstate(all="ignore"):
        if not all(map(math.isfinite, values)):
            return float(np.float32(operation(*map(np.float64, values))))
        result = operation(*map(Fraction, values))
        if result == 0:
            return float(np.float32(operation(*map(np.float64, values))))
        return round_exact(result, "f32")


def add(a, b):
    return a + b


def subtract(a, b):
    return a - b


def multiply(a, b):
    return a * b


def fused(a, b, c):
    return a * b + c


@pytest.mark.parametrize(
    ("text", "operation", "columns"),
    [
        ("v_add_f32_e32 v20, v10, v11", add, 2),
        ("v_sub_f32_e32 v20, v10, v11", subtract, 2),
        ("v_subrev_f32_e32 v20, v11, v10", subtract, 2),
        ("v_mul_f32_e32 v20, v10, v11", multiply, 2),
        ("v_add_f32_e64 v20, v10, -v11", subtract, 2),
        ("v_mul_f32_e64 v20, |v10|, -v11", lambda a, b: abs(a) * -b, 2),
        ("v_fma_f32 v20, v10, v11, v12", fused, 3),
        ("v_mov_b32_e32 v20, v12\nv_fmac_f32_e32 v20, v10, v11", fused, 3),
        ("v_fma_f32 v20, -v10, v11, |v12|", lambda a, b, c: -a * b + abs(c), 3),
        ("v_fmamk_f32 v20, v10, 0x3fc00000, v11", lambda a, b: a * type(a)(1.5) + b, 2),
        ("v_fmaak_f32 v20, v10, v11, 0x3fc00000", lambda a, b: a * b + type(a)(1.5), 2),
        (
            "v_pk_mul_f32 v[20:21], v[10:11], v[12:13] op_sel_hi:[0,0]",
            lambda a, b, c: a * c,
            3,
        ),
    ],
)
def test_arithmetic_is_correctly_rounded(text, operation, columns):
    inputs = samples(columns)
    if "v13" in text or "[12:13]" in text:
        inputs = [*inputs, inputs[0]]
    (got,) = vector(text, inputs, ["v20"])
    rows = zip(got, *inputs[:columns], strict=True)
    wrong = [r for r in rows if not same(r[0], exact(operation, *map(float, r[1:])))]
    assert not wrong, [(float_of(r[0]), *r[1:]) for r in wrong[:5]]


def test_fma_breaks_ties_by_what_a_double_cannot_hold():
    a = np.float32(1 + 2.0**-12)
    cases = [
        (a, a, c) for c in (np.float32(2.0**-80), np.float32(-(2.0**-80)), np.float32(2.0**-24))
    ]
    cases += [(np.float32(2.0**-12), np.float32(2.0**-12), np.float32(s * 1.0)) for s in (1, -1)]
    inputs = [np.array(column) for column in zip(*cases, strict=True)]
    (got,) = vector("v_fma_f32 v20, v10, v11, v12", inputs, ["v20"])
    for result, row in zip(got, cases, strict=True):
        assert same(result, exact(fused, *map(float, row))), row


@pytest.mark.parametrize(
    ("text", "choose"),
    [
        ("v_max_f32_e32 v20, v10, v11", max),
        ("v_min_f32_e32 v20, v10, v11", min),
        ("v_max3_f32 v20, v10, v11, v10", max),
        ("v_min3_f32 v20, v10, v11, v11", min),
    ],
)
def test_extremes_prefer_numbers_to_nans(text, choose):
    a, b = samples(2)
    (got,) = vector(text, [a, b], ["v20"])
    for result, x, y in zip(got, a, b, strict=True):
        numbers = [float(v) for v in (x, y) if not math.isnan(v)]
        wanted = choose(numbers) if numbers else math.nan
        value = float_of(result)
        assert value == wanted or (math.isnan(value) and math.isnan(wanted)), (x, y)


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("v_exp_f32_e32 v20, v10", lambda x: 2.0**x if x < 128 else math.inf),
        ("v_log_f32_e32 v20, v10", lambda x: math.log2(x) if x > 0 else math.nan),
        ("v_rcp_f32_e32 v20, v10", lambda x: 1 / x if x else math.copysign(math.inf, x)),
        ("v_sqrt_f32_e32 v20, v10", lambda x: math.sqrt(x) if x >= 0 else math.nan),
        ("v_rsq_f32_e32 v20, v10", lambda x: x**-0.5 if x > 0 else math.nan),
    ],
)
def test_transcendentals_are_within_one_ulp_and_flush_denormals(text, function):
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.uniform(-140, 130, 200), 2.0 ** rng.uniform(-149, 127, 300), [0.0]])
    x = x.astype(np.float32)
    (got,) = vector(text, [x], ["v20"])
    tiny = 2.0**-126
    for result, value in zip(got.view(np.float32), x.astype(float), strict=True):
        seen = value if abs(value) >= tiny else math.copysign(0.0, value)
        if "log" in text and seen == 0:
            assert result == -math.inf
            continue
        if ("rsq" in text) and seen == 0:
            assert result == math.inf
            continue
        wanted = function(seen)
        if math.isnan(wanted):
            assert math.isnan(result)
        elif abs(wanted) < tiny:
            assert result == 0
        else:
            with np.errstate(over="ignore"):
                exact32 = np.float32(wanted)
                ulp = np.spacing(np.abs(exact32)) if np.isfinite(exact32) else np.float32(0)
            assert result == exact32 or abs(float(result) - wanted) <= float(ulp), (text, value)


def test_division_sequence_gives_the_ieee_quotient_everywhere():
    numerator, denominator = samples(2, 600)
    sequence = """
        v_div_scale_f32 v20, s[10:11], v11, v11, v10
        v_rcp_f32_e32 v21, v20
        v_div_scale_f32 v22, vcc, v10, v11, v10
        v_fma_f32 v23, -v20, v21, 1.0
        v_fma_f32 v21, v23, v21, v21
        v_mul_f32_e32 v24, v22, v21
        v_fma_f32 v25, -v20, v24, v22
        v_fma_f32 v24, v25, v21, v24
        v_fma_f32 v20, -v20, v24, v22
        v_div_fmas_f32 v20, v20, v21, v24
        v_div_fixup_f32 v20, v20, v11, v10
    """
    (got,) = vector(sequence, [numerator, denominator], ["v20"])
    with np.errstate(all="ignore"):
        wanted = numerator / denominator
    # A denormal quotient is rounded a second time when it is scaled back, so it may be one off.
    gap = np.abs(got.view(np.int32).astype(np.int64) - wanted.view(np.int32).astype(np.int64))
    normal = ~(np.abs(wanted) < np.finfo(np.float32).tiny)
    nan = np.isnan(wanted)
    assert np.isnan(got.view(np.float32)[nan]).all()
    assert (gap[normal & ~nan] == 0).all()
    assert (gap[~normal] <= 1).all()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("v_mul_f32_e64 v20, v10, v11 clamp", lambda a, b: min(max(a * b, 0.0), 1.0)),
        ("v_mul_f32_e64 v20, v10, v11 mul:2", lambda a, b: a * b * 2),
        ("v_add_f32_e64 v20, v10, v11 div:2", lambda a, b: (a + b) / 2),
    ],
)
def test_output_modifiers_follow_the_rounded_result(text, wanted):
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(64).astype(np.float32) for _ in range(2))
    (got,) = vector(text, [a, b], ["v20"])
    for result, x, y in zip(got, a, b, strict=True):
        base = round_exact(Fraction(float(x)) * Fraction(float(y)), "f32")
        if "add" in text:
            base = round_exact(Fraction(float(x)) + Fraction(float(y)), "f32")
        assert float_of(result) == wanted(base, 1.0 if "add" not in text else 0.0)


def test_denormals_are_flushed_only_in_the_flushing_mode():
    a = np.array([1e-40, -1e-40, 1.2e-38, 1.0], np.float32)
    b = np.array([1.0, 1.0, 0.5, 1e-40], np.float32)
    (kept,) = vector("v_mul_f32_e32 v20, v10, v11", [a, b], ["v20"], denormals=3)
    (flushed,) = vector("v_mul_f32_e32 v20, v10, v11", [a, b], ["v20"], denormals=0)
    assert (kept.view(np.float32) == a * b).all() and (kept.view(np.float32) != 0).all()
    assert flushed.tolist() == bits(np.array([0.0, -0.0, 0.0, 0.0], np.float32)).tolist()


def test_packed_float_selects_and_negates_each_half():
    rng = np.random.default_rng(4)
    a, b, c, d = (rng.standard_normal(64).astype(np.float32) for _ in range(4))
    text = "v_pk_add_f32 v[20:21], v[10:11], v[12:13] op_sel:[1,0] op_sel_hi:[0,1] neg_lo:[0,1]"
    low, high = vector(text, [a, b, c, d], ["v20", "v21"])
    assert (low.view(np.float32) == b - c).all()
    assert (high.view(np.float32) == a + d).all()


def test_packed_float_reads_both_halves_before_it_writes():
    a, b = np.arange(64, dtype=np.float32), np.arange(64, dtype=np.float32) + 100
    text = "v_pk_mul_f32 v[10:11], v[10:11], v[10:11] op_sel:[1,1] op_sel_hi:[0,0]"
    low, high = vector(text, [a, b], ["v10", "v11"])
    assert (low.view(np.float32) == b * b).all() and (high.view(np.float32) == a * a).all()


@pytest.mark.parametrize(("name", "operation"), [("add", add), ("mul", multiply)])
def test_half_precision_is_correctly_rounded(name, operation):
    rng = np.random.default_rng(5)
    a, b = (rng.integers(0, 2**16, 512).astype(np.uint32) for _ in range(2))
    (got,) = vector(f"v_{name}_f16_e32 v20, v10, v11", [a, b], ["v20"])
    packed = f"v_pk_{name}_f16 v20, v10, v11 op_sel_hi:[0,0]"
    (both,) = vector(packed, [a, b], ["v20"])
    halves = [x.astype(np.uint16).view(np.float16).astype(float) for x in (a, b)]
    for result, pair, x, y in zip(got, both, *halves, strict=True):
        value = float(np.uint16(result & 0xFFFF).view(np.float16))
        if math.isfinite(x) and math.isfinite(y):
            assert value == round_exact(operation(Fraction(x), Fraction(y)), "f16")
            assert pair & 0xFFFF == pair >> 16 == result
        else:
            with np.errstate(all="ignore"):
                wanted = operation(np.float64(x), np.float64(y))
            assert value == wanted or (math.isnan(value) and math.isnan(wanted))


def test_pack_takes_the_chosen_halves_with_their_signs():
    rng = np.random.default_rng(6)
    a, b = (rng.integers(0, 2**32, 64, dtype=np.uint64).astype(np.uint32) for _ in range(2))
    text = "v_pack_b32_f16 v20, v10, v11\nv_pack_b32_f16 v21, -v10, v11 op_sel:[1,0,0]"
    plain, chosen = vector(text, [a, b], ["v20", "v21"])
    assert (plain == ((a & 0xFFFF) | (b << 16))).all()
    assert (chosen == (((a >> 16) ^ 0x8000) | (b << 16))).all()
