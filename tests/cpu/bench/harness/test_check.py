"""What the check of a benchmark says of a wrong result: what is wrong, where, and by how much."""

import dataclasses
import random
import re

import pytest
import torch

from heedful.bench.harness import check, exact
from heedful.bench.harness.cases import Case
from heedful.bench.harness.check import Checker
from heedful.bench.harness.exact import Results
from heedful.bench.harness.peers import Inputs, draw
from heedful.core.call.mask import MaskSpec
from heedful.core.call.operands import Operands
from heedful.core.call.problem import AttentionProblem
from heedful.reference import oracle

CPU = torch.device("cpu")


def dense(direction="forward", sizes=(2, 40, 50, 4, 2, 16), **facts) -> Case:
    facts = {"dtype": "float32", "needs_grad": direction == "backward"} | facts
    return Case("forward", AttentionProblem.dense(*sizes, **facts), direction)


def packed(lengths: tuple[int, ...] = (33, 1, 70)) -> Case:
    total, longest = sum(lengths), max(lengths)
    sizes = (len(lengths), longest, longest, 4, 2, 16)
    problem = AttentionProblem.dense(
        *sizes, dtype="float32", causal=True, total_q=total, total_k=total
    )
    return Case("shapes", problem, lengths=lengths)


def truth(case: Case, inputs: Inputs) -> Results:
    """The oracle's results in the case's dtype."""
    q, k, v, dout = (x.double().numpy() for x in inputs)
    x = Operands(q, k, v)
    found = [oracle.forward(case.problem, x)[0]]
    if case.direction == "backward":
        found += oracle.backward(case.problem, x, dout)[:3]
    return Results(*(torch.from_numpy(a).float() for a in found))


@pytest.mark.parametrize("mask", [(-1, -1), (-1, 0), (9, 0), (3, 5)], ids=str)
@pytest.mark.parametrize("sizes", [(2, 40, 50, 4, 2, 16), (1, 50, 40, 3, 1, 16)], ids=str)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_right_results_pass_rows_without_keys_too(direction, sizes, mask):
    case = dense(direction, sizes, mask=MaskSpec(*mask), head_dim_v=8)
    inputs = draw(case, CPU)
    right = truth(case, inputs)
    checker = Checker(case, inputs)
    assert checker.why_wrong(right) is None
    for group in checker.groups:
        for name, want in group.exact.items():
            whole = getattr(right, name)
            own = group.of(name, whole, case.problem.group)
            torch.testing.assert_close(want, own, rtol=1e-5, atol=1e-6)
            assert want.dtype == torch.float64 and want.isfinite().all()


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("causal", [False, True])
def test_every_tensor_of_a_check_lies_on_the_device_that_is_named(direction, causal):
    case = dense(direction, causal=causal)
    with torch.device("meta"):
        inputs = draw(case, CPU)
        checker = Checker(case, inputs)
    right = truth(case, inputs)
    assert right.out is not None
    with torch.device("meta"):
        assert checker.why_wrong(right) is None
        assert "out" in str(checker.why_wrong(right._replace(out=right.out + 1)))


def test_what_no_budget_excuses_is_said_by_name():
    forward, backward = dense(), dense("backward")
    inputs = draw(forward, CPU)
    out, dq, dk, dv = truth(backward, inputs)
    assert out is not None and dk is not None
    nan = out.clone()
    nan[1, 7, 3, 5:7] = torch.inf
    nan[1, 9, 0, 0] = torch.nan
    for case, got, words in (
        (forward, Results(None), "out is missing"),
        (backward, Results(out), "dq is missing"),
        (backward, Results(out, dq, dk), "dv is missing"),
        (forward, Results(out, dq), "dq was not asked for"),
        (forward, Results(out, None, None, dv), "dv was not asked for"),
        (forward, Results(out[:, :-1]), "out has shape (2, 39, 4, 16), not (2, 40, 4, 16)"),
        (backward, Results(out, dq, dq, dv), "dk has shape (2, 40, 4, 16), not (2, 50, 2, 16)"),
        (forward, Results(out.double()), "out has dtype torch.float64, not torch.float32"),
        (
            backward,
            Results(out, dq, dk.half(), dv),
            "dk has dtype torch.float16, not torch.float32",
        ),
        (forward, Results(inputs.q), "out is the memory of an input"),
        (forward, Results(inputs.dout[:]), "out is the memory of an input"),
        (forward, Results(nan), "out is not finite: 3 elements, the first at (1, 7, 3, 5)"),
    ):
        assert Checker(case, inputs).why_wrong(got) == words


def test_the_output_of_8_bit_inputs_is_wider_than_they():
    case = dense(dtype="float8_e4m3fn")
    inputs = draw(case, CPU)
    out = truth(case, inputs).out
    assert out is not None
    assert Checker(case, inputs).why_wrong(Results(out.bfloat16())) is None
    found = Checker(case, inputs).why_wrong(Results(out))
    assert found == "out has dtype torch.float32, not torch.bfloat16"


@pytest.mark.parametrize("batch", range(2))
@pytest.mark.parametrize("kv_head", range(2))
@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_an_error_is_placed_and_measured(name, kv_head, batch):
    case = dense("backward")
    inputs = draw(case, CPU)
    right = truth(case, inputs)
    wrong = getattr(right, name).clone()
    head = kv_head if name in ("dk", "dv") else 2 * kv_head + 1
    wrong[batch, -1, head, 3] += 0.5
    found = Checker(case, inputs).why_wrong(right._replace(**{name: wrong})) or ""
    place = rf"{name} of batch {batch}, KV head {kv_head}"
    pattern = rf"{place} is outside of its error budget: largest error 0\.5, allowed"
    assert re.match(pattern, found), found
    budget = float(found.split()[-1])
    assert 0 < budget < 1e-4


def test_an_error_of_a_packed_sequence_is_placed_by_its_first_token():
    case = packed()
    inputs = draw(case, CPU)
    checker = Checker(case, inputs)
    right = torch.zeros(1, 104, 4, 16)
    for group in checker.groups:
        for part, want in enumerate(group.exact["out"]):
            start, kv_head = int(group.starts[part]), int(group.kv_heads[part])
            rows = start + group.rows[part]
            right[0, rows, 2 * kv_head : 2 * kv_head + 2] = want.float()
    assert checker.why_wrong(Results(right)) is None
    for start, where in (
        (0, "batch 0"),
        (33, "the sequence from token 33"),
        (34, "the sequence from token 34"),
    ):
        wrong = right.clone()
        wrong[0, start, 3] += 1
        found = checker.why_wrong(Results(wrong)) or ""
        assert found.startswith(f"out of {where}, KV head 1 is outside")


def test_errors_everywhere_are_found_by_their_mean():
    """Each is within the budget of the largest."""
    case = dense()
    inputs = draw(case, CPU)
    right = truth(case, inputs).out
    assert right is not None
    checker = Checker(case, inputs, most_draws=1)
    ((twin, once),) = (group.budgets["out"] for group in checker.groups)
    ((band, error),) = twin.items()
    largest, mean = 2 * error.largest + once[band].largest, 2 * error.rms + once[band].rms
    assert mean < largest
    found = checker.why_wrong(Results(right + (mean + largest) / 2 * 0.9)) or ""
    pattern = r"out of batch \d, KV head \d is outside of its error budget: rms error"
    assert re.match(pattern, found), found


@pytest.mark.parametrize(
    ("batch", "heads", "draws"), [(1, 1, 16), (2, 2, 4), (5, 1, 4), (4, 4, 1), (8, 4, 1), (3, 5, 2)]
)
def test_so_many_inputs_are_drawn_that_a_budget_rests_on_sixteen(batch, heads, draws):
    case = dense(sizes=(batch, 6, 6, heads, heads, 16))
    inputs = draw(case, CPU)
    for most, want in ((16, draws), (3, min(3, draws)), (1, 1)):
        checker = Checker(case, inputs, most)
        made = 1
        while checker._draw_again():
            made += 1
        assert made == want
    assert Checker(case, inputs)._most_draws == draws


def test_the_rarest_length_decides_how_many_are_drawn():
    for lengths, groups in (((33, 1, 70), 3), ((9, 9, 20, 9), 2), ((20, 9, 9), 2)):
        checker = Checker(packed(lengths), draw(packed(lengths), CPU))
        assert len(checker.groups) == groups and checker._most_draws == 8
    even = Checker(packed((9, 9)), draw(packed((9, 9)), CPU))
    assert len(even.groups) == 1 and even._most_draws == 4


def test_every_checker_of_a_case_compares_the_same_rows():
    case = dense(sizes=(2, 300, 200, 4, 2, 16))
    one, other = (Checker(case, draw(case, CPU, seed)).groups[0] for seed in range(2))
    assert torch.equal(one.rows, other.rows) and torch.equal(one.keys, other.keys)
    assert one.rows.shape == (4, 18) and one.rows.max() == 299 and one.keys.max() == 199


@pytest.mark.parametrize(("count", "strata"), [(3, 3), (16, 16), (100, 16), (1024, 16), (1025, 17)])
def test_one_row_of_each_stratum_is_compared(count, strata):
    seen = set()
    for seed in range(60):
        first, *inner, last = check.sampled(count, random.Random(seed))
        assert (first, last) == (0, count - 1) and len(inner) == strata
        assert inner == sorted(inner)
        for number, row in enumerate(inner):
            assert number * count // strata <= row < (number + 1) * count // strata
        seen |= set(inner)
    # Any row may be drawn, those at a stratum's ends too.
    assert count > 100 or seen == set(range(count))


def test_rows_are_computed_in_blocks_of_bounded_size(monkeypatch):
    case = dense("backward")
    inputs = draw(case, CPU)
    q, dout = (x[0, :, :2].transpose(0, 1) for x in (inputs.q, inputs.dout))
    x = exact.Operands(q, inputs.k[0, :, 0], inputs.v[0, :, 0], dout)
    assert exact.BLOCK_BYTES == 512 * 2**20
    sizes = []
    softmax = exact._Head._softmax
    monkeypatch.setattr(
        exact._Head, "_softmax", lambda head, rows: sizes.append(len(rows)) or softmax(head, rows)
    )
    monkeypatch.setattr(exact, "BLOCK_BYTES", 2 * 50 * 8 * 15)
    exact.exact(case, x, torch.arange(32), torch.arange(5))
    # Fifteen rows of two heads in float64: of the rows asked for, then of all for the keys.
    assert sizes == [15, 15, 2, 15, 15, 10]
    sizes.clear()
    exact.eager(case, x._replace(dout=None), torch.arange(32), torch.arange(5))
    assert sizes == [30, 2]
    sizes.clear()
    monkeypatch.setattr(exact, "BLOCK_BYTES", 1)
    exact.exact(case, x._replace(dout=None), torch.arange(3), torch.arange(5))
    assert sizes == [1, 1, 1]


def test_eager_rounds_what_it_stores():
    case = dense("backward", dtype="bfloat16")
    inputs = draw(case, CPU)
    q, dout = (x[0, :, :2].transpose(0, 1) for x in (inputs.q, inputs.dout))
    x = exact.Operands(q, inputs.k[0, :, 0], inputs.v[0, :, 0], dout)
    every = torch.arange(40), torch.arange(50)
    rounded, right = exact.eager(case, x, *every), exact.exact(case, x, *every)
    for name, got, want in zip(Results._fields, rounded, right, strict=True):
        assert got is not None and want is not None
        assert got.dtype == torch.bfloat16 and want.dtype == torch.float64
        assert got.shape == want.shape, name
        error = (got.double() - want).abs().max() / want.abs().max()
        assert 1e-4 < error < 5e-2, name


def test_scores_of_leading_keys_are_no_benchmarks():
    case = dense(mask=MaskSpec(5, 0, 2))
    with pytest.raises(AssertionError, match="leading keys"):
        Checker(case, draw(dataclasses.replace(case, lengths=()), CPU))
