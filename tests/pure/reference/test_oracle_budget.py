"""The error budget lets an honest kernel pass and catches a wrong one; the twin is attention."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from heedful.core.call.operands import Gradients
from heedful.reference import eager
from heedful.reference.budget import Results, judge
from heedful.reference.convert import as_numpy
from support.problems.budget import (
    backend_results,
    check,
    oracle_results,
    run,
    twin_errors,
    twin_results,
)
from support.problems.cases import LAYOUTS, Case, build, damages, twins, variants

BASE = Case(heads_q=4, seqlen_q=19, seqlen_k=23, head_dim=16)
FEATURES = [
    BASE,
    *variants(
        BASE,
        causal=[True],
        window=[(5, 2, 3)],
        softcap=[2.0],
        dropout_p=[0.3],
        alibi=["bh"],
        bias=["hqk", "bk"],
        rel_bias=[7],
        sink=[True],
        tree_mask=[True],
        varlen=["qk"],
        used=["qk"],
        page_size=[4],
        kv_batch_idx=[True],
        leftpad_k=[True],
        return_probs=[True],
        layout=LAYOUTS[1:],
        batch=[0],
        seqlen_k=[0],
    ),
    Case(kv_dtype="int8", kv_group=8, kv_shift=True, backward=False),
    Case(kv_dtype="int4", kv_group=8, backward=False, page_size=3),
    Case(dtype="float8_e4m3fn", backward=False, layout="offset"),
]


class Twin:
    """The eager twin as a backend, with one of its results spoilt by `damage`."""

    def __init__(self, damage=None):
        self.damage = damage or {}

    def forward(self, problem, x, out):
        made, lse, probs = eager.forward(problem, x)
        made = self.damage.get("out", lambda a: a)(made)
        return out.copy_(made), self.damage.get("lse", lambda a: a)(lse), probs

    def backward(self, problem, x, out, lse, dout, dlse=None):
        grads = eager.backward(problem, x, dout, dlse)
        return Gradients(
            *(
                self.damage.get(f"d{n}", lambda a: a)(g)
                for n, g in zip(("q", "k", "v", "bias", "sink", "rel_bias"), grads, strict=True)
            )
        )


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_float32_twin_is_within_the_worst_case_of_its_sums(case):
    built = build(case)
    want, got = oracle_results(built), twin_results(built)
    # Rounding of every sum of n terms is at most n eps of the sum of magnitudes; results nest
    # three sums, over head_dim, keys and rows, of terms that standard normals seldom take past 6.
    terms = case.head_dim + case.seqlen_q + case.seqlen_k
    fp8 = case.dtype != "float32"
    eps = np.finfo(np.float32).eps if not fp8 else 2.0**-4 / 3  # P is rounded to 3 bits
    for name, exact in want._asdict().items():
        if exact is not None:
            twin = getattr(got, name)
            assert np.array_equal(np.isinf(twin), np.isinf(exact)), name
            finite = np.isfinite(exact)
            difference = np.abs(twin[finite] - exact[finite])
            assert difference.max(initial=0) <= 6 * (3 if fp8 else terms) * eps, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_twin_itself_is_within_the_budget(dtype):
    run(Twin(), Case(heads_q=4, dtype=dtype, causal=True, sink=True, bias="hqk", rel_bias=9))


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv", "dbias", "dsink", "drel_bias"])
def test_a_relative_error_of_sixteen_eps_or_one_nan_is_out_of_budget(name):
    case = Case(dtype="bfloat16", sink=True, bias="hqk", rel_bias=9)
    eps = torch.finfo(torch.bfloat16).eps

    def scaled(a):
        return (a.float() * (1 + 16 * eps)).to(a.dtype)

    def one_nan(a):
        a[..., -1] = torch.nan
        return a

    for damage in (scaled, one_nan):
        with pytest.raises(AssertionError, match=name):
            run(Twin({name: damage}), case)


def test_an_unwritten_element_shows_as_nan():
    class Lazy(Twin):
        def forward(self, problem, x, out):
            made, lse, probs = eager.forward(problem, x)
            out[1:] = made[1:]
            return out, lse, probs

    case = Case(backward=False)
    built = build(case)
    with pytest.raises(AssertionError, match="NaN"):
        check(built, backend_results(Lazy(), built))


def test_another_dropout_mask_is_out_of_budget_by_its_signs():
    case = Case(dropout_p=0.5, return_probs=True, backward=False)
    built = build(case)
    other = built.x._replace(seed=built.x.seed + 1)

    class Other(Twin):
        def forward(self, problem, x, out):
            made, lse, _ = eager.forward(problem, x)
            return out.copy_(made), lse, eager.forward(problem, other)[2]

    with pytest.raises(AssertionError, match="mask"):
        run(Other(), case)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_hold_the_same_values(layout):
    plain, other = build(BASE), build(variants(BASE, layout=[layout])[0])
    assert torch.equal(plain.x.q, other.x.q) and other.x.q.stride(-1) == 1
    assert other.problem.aligned == (layout != "offset")
    assert (other.x.q.stride() == plain.x.q.stride()) == (layout == "contiguous")


EDGES = [
    Case(batch=1, seqlen_q=9, seqlen_k=keys, heads_q=1, heads_k=1, causal=True, backward=False)
    for keys in (53, 300, 600)
]


@cache
def worst_errors(case: Case):
    """The twin's errors over all draws."""
    *_, errors = twin_errors(case)
    return errors


def spoilt(case: Case, name: str) -> list[str]:
    """What the budget says of eager PyTorch on a damaged problem."""
    built = build(case)
    wrong = damages(built)[name]
    found = eager.forward(wrong.problem, wrong.x)
    got = Results(*(as_numpy(result) for result in found))
    judged = judge(got, oracle_results(built), case.dtype, [worst_errors(case)])
    return [judgement.wrong for judgement in judged.values() if judgement.wrong]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("case", EDGES, ids=str)
def test_an_edge_the_diagonal_or_the_scale_wrong_is_out_of_budget(case, dtype):
    case = replace(case, dtype=dtype)
    passed = [name for name in damages(build(case)) if not spoilt(case, name)]
    assert not passed


def test_bfloat16_needs_its_twins():
    """What passes there: every grid in bfloat16 is one in another dtype too."""
    case = replace(EDGES[1], dtype="bfloat16")
    assert not spoilt(case, "scale 0.8 % too large")
    assert {twin.dtype for twin in twins([case], "float16")} == {"bfloat16", "float16"}
