"""A log-sum-exp in two numbers keeps the logarithm of a sum whatever the maximum is.

The checks run in a process of their own: see `support.runs.interpreted`.
"""

import math

import pytest

pytest.importorskip("triton")

import numpy as np
import torch
import triton
import triton.language as tl

from heedful.kernels.common import constants
from heedful.kernels.common.log_sum import log_sum_exp, rounded_log_sum_exp
from heedful.kernels.common.parts import part_weights
from heedful.kernels.common.statistics import any_far, is_far, with_statistics
from heedful.launch.bind.portable import combine_call
from heedful.launch.spec import Program
from heedful.torch.base.arrays import array_spec
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import interpret

SUMS = torch.tensor([1.0, 3.0, 300.0, 1.7e5])
MAXIMA = (0.0, 0.01, 3.0, -700.0, 1e4, 1.7e7, -1e9, -1e30, torch.finfo(torch.float32).min)
LOG2E = float(torch.tensor(math.log2(math.e)))


@interpreted
def test_the_constants_of_logarithms_are_rounded_to_float32_and_what_that_leaves():
    names = "LOG2E", "LOG2E_REST", "LN2"
    found = [getattr(c, "value", c) for c in (getattr(constants, name) for name in names)]
    assert found[0] == pytest.approx(math.log2(math.e), rel=1e-15)
    assert found[1] == pytest.approx(math.log2(math.e) - float(np.float32(found[0])), rel=1e-6)
    assert found[2] == pytest.approx(math.log(2), rel=1e-15)


@starts_interpreter
def test_checks_pass_in_the_interpreter():
    pass_in_the_interpreter(__file__)


@triton.jit
def told(maxima, sums, lse, rest, IS_BASE_2: tl.constexpr):
    at = tl.arange(0, 4)
    lse_N, rest_N = log_sum_exp(tl.load(maxima + at), tl.load(sums + at), IS_BASE_2)
    tl.store(lse + at, lse_N)
    tl.store(rest + at, rest_N)


@triton.jit
def told_rounded(maxima, sums, lse, rest, IS_BASE_2: tl.constexpr):
    at = tl.arange(0, 4)
    lse_N, rest_N = rounded_log_sum_exp(tl.load(maxima + at), tl.load(sums + at), IS_BASE_2)
    tl.store(lse + at, lse_N)
    tl.store(rest + at, rest_N)


def pair(maxima, sums, base_2, kernel=told):
    lse, rest = torch.empty_like(sums), torch.empty_like(sums)
    kernel[(1,)](maxima, sums, lse, rest, base_2)
    return lse.double(), rest.double()


@interpreted
@pytest.mark.parametrize("base_2", [False, True])
@pytest.mark.parametrize("maximum", [m for m in MAXIMA if abs(m) < 1e10])
def test_a_rounded_sum_has_both_numbers_and_leaves_what_its_rounding_left(maximum, base_2):
    m = torch.full_like(SUMS, maximum)
    lse, rest = pair(m, SUMS, base_2)
    rounded, left = pair(m, SUMS, base_2, told_rounded)
    assert rounded.equal((lse + rest).float().double())
    # What is left is a float32, too.
    assert ((rounded + left) - (lse + rest)).abs().le(left.abs() * 2.0**-23).all()


@interpreted
@pytest.mark.parametrize("maximum", MAXIMA)
def test_natural_units_keep_the_logarithm_at_any_distance(maximum):
    m = torch.full_like(SUMS, maximum)
    lse, rest = pair(m, SUMS, False)
    # Exact in float64: both are near the maximum.
    kept = (lse - m.double()) + rest
    # Half a unit of log2, of its product with LN2, and of the sum of a maximum that is smaller.
    bound = 4 * 2.0**-24 * SUMS.double().log()
    assert ((kept - SUMS.double().log()).abs() <= bound).all(), (lse, rest)


@interpreted
@pytest.mark.parametrize("maximum", [m for m in MAXIMA if abs(m) < 1e10])
def test_base_2_keeps_what_float32_of_LOG2E_made(maximum):
    m = torch.full_like(SUMS, maximum)
    lse, rest = pair(m, SUMS, True)
    kept = (lse - m.double() / LOG2E) + rest
    bound = 4 * 2.0**-24 * SUMS.double().log() + 2.0**-47 * abs(maximum)
    assert ((kept - SUMS.double().log()).abs() <= bound).all(), (lse, rest)


@interpreted
@pytest.mark.parametrize("base_2", [False, True])
def test_rows_that_saw_nothing_leave_no_rest(base_2):
    lse, rest = pair(torch.tensor([-math.inf, 0.0] * 2), torch.tensor([0.0, 1.0] * 2), base_2)
    assert lse.tolist() == [-math.inf, 0.0] * 2 and rest.tolist() == [0.0] * 4


@triton.jit
def look(lse, far, reference, factor, anys, IS_EXACT: tl.constexpr):
    at = tl.arange(0, 4)
    lse_M = tl.load(lse + at)
    tl.store(far + at, is_far(lse_M, IS_EXACT).to(tl.int32))
    reference_M, factor_M = with_statistics(lse_M, lse_M - 1, lse_M * 0 + 4, IS_EXACT)
    tl.store(reference + at, reference_M)
    tl.store(factor + at, factor_M)
    tl.store(anys, any_far(lse_M, IS_EXACT))


@interpreted
@pytest.mark.parametrize("exact, least", [(False, 1024.0), (True, 64.0)])
def test_rows_are_far_from_the_least_such_magnitude_on(exact, least):
    """Such rows have their maximum for a reference and the inverse of their sum for a factor."""
    below = math.nextafter(least, 0) - 0.01
    for rows, far in (
        ([least, -least, below, -below], [1, 1, 0, 0]),
        ([below, 0.0, -math.inf, math.inf], [0, 0, 0, 0]),
        ([-below, 1e30, 0.0, -math.inf], [0, 1, 0, 0]),
    ):
        lse = torch.tensor(rows)
        found, anys = torch.full((4,), -1, dtype=torch.int32), torch.full((1,), -1)
        reference, factor = torch.zeros(4), torch.zeros(4)
        look[(1,)](lse, found, reference, factor, anys, exact)
        assert found.tolist() == far and anys.item() == max(far)
        at_maximum = torch.tensor(far) == 1
        assert reference.equal(torch.where(at_maximum, lse - 1, lse))
        assert factor.tolist() == [0.25 if is_one else 1.0 for is_one in far]


@triton.jit
def weigh(lse, rest, new_lse, new_rest, told, N: tl.constexpr):
    at = tl.arange(0, N)
    given = tl.load(lse + at), tl.load(rest + at), tl.load(new_lse + at), tl.load(new_rest + at)
    top_M, top_rest_M, old_M, new_M = part_weights(given[0], given[1], given[2], given[3])
    tl.store(told + at, top_M)
    tl.store(told + N + at, top_rest_M)
    tl.store(told + 2 * N + at, old_M)
    tl.store(told + 3 * N + at, new_M)


@interpreted
@pytest.mark.parametrize("base", [0.0, 3.0, -1e6])
@pytest.mark.parametrize("swapped", [False, True])
def test_both_weights_of_a_merge_have_the_digits_of_float32(base, swapped):
    """Whichever part is the larger."""
    # Multiples of 1/16, so that sums are exact.
    steps = torch.arange(64.0) / 16
    top, rests = torch.full((64,), base), (steps / 16 - 0.125, 0.125 - steps / 8)
    lses = (top - 16 * steps, top) if swapped else (top, top - 16 * steps)
    told = torch.empty(4, 64)
    weigh[(1,)](lses[0], rests[0], lses[1], rests[1], told, tl.constexpr(64))
    largest = told[0].double() + told[1].double()
    wants = [lse.double() + rest.double() for lse, rest in zip(lses, rests, strict=True)]
    assert torch.equal(largest, torch.maximum(*wants))
    for want, found in zip(wants, told[2:], strict=True):
        want = (want - largest).exp()
        # Two units of the exponential, whose argument is as exact however far it is from 0.
        assert ((found.double() / want - 1).abs() <= 4 * 2.0**-24).all()


@interpreted
def test_a_part_that_saw_nothing_has_no_weight_beside_one_that_did_or_did_not():
    none, some = -math.inf, 5.0
    lse, new_lse = torch.tensor([none, some, none, 0.0]), torch.tensor([some, none, none, 0.0])
    told = torch.empty(4, 4)
    weigh[(1,)](lse, torch.zeros(4), new_lse, torch.zeros(4), told, tl.constexpr(4))
    assert told[2].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert told[3].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert told[0].tolist() == [some, some, none, 0.0]


@interpreted
@pytest.mark.parametrize("more", [(), ("apart",), ("apart", "sink")], ids=str)
@pytest.mark.parametrize("size", [0.0, -1e6, 3e7])
def test_parts_in_two_numbers_are_merged_with_the_digits_of_both(size, more):
    """Whatever they are: numbers of float32 near 3e7 are 2 apart."""
    heads, rows, dim, splits = 2, 5, 8, 3
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(4, heads, rows, generator=generator, dtype=torch.float64) * 3 + size
    # A part without keys, and a row without any.
    exact[0, 0, 0] = exact[:, 1, 3] = -math.inf
    lse = exact.float()
    # Beside -inf nothing need be written.
    rest = torch.where(exact.isfinite(), exact - lse.double(), math.nan).float()
    exact = torch.where(exact.isfinite(), lse.double() + rest.double(), exact)
    parts = torch.randn(4, rows, heads, dim, generator=generator)
    sink = torch.randn(heads, generator=generator) + size
    x = {"partial_out": parts[:splits], "partial_lse": lse[:splits], "partial_rest": rest[:splits]}
    x |= {"out": torch.empty(rows, heads, dim), "lse": torch.empty(heads, rows)}
    x["rest"] = torch.full((heads, rows), math.nan)
    taken = [*exact[:splits]]
    if "apart" in more:
        x |= {"apart_out": parts[3], "apart_lse": lse[3], "apart_rest": rest[3]}
        taken.append(exact[3])
    values = parts[: len(taken)].double()
    if "sink" in more:
        x["sink"] = sink
        taken.append(sink.double()[:, None].expand(heads, rows))
        values = torch.cat([values, torch.zeros_like(values[:1])])
    interpret(Program((combine_call({n: array_spec(t) for n, t in x.items()}),), ()), x)

    every = torch.stack(taken)
    total = every.logsumexp(0)
    # Near the size, where float64 has digits left.
    got, is_any = x["lse"].double() + x["rest"].double(), total.isfinite()
    assert ((got - total).abs() <= 2.0**-21)[is_any].all(), (got - total).abs()
    assert x["lse"][~is_any].tolist() == [-math.inf] * int((~is_any).sum())
    assert (x["rest"][~is_any] == 0).all()
    weights = (every - torch.where(is_any, total, 0.0)).exp().mT[..., None]
    want = (weights * values).sum(0)
    assert ((x["out"].double() - want).abs() <= 2.0**-19 * values.abs().amax()).all()
