"""A NaN among queries or keys is seen in every result that it takes part in, and in no other."""

from typing import Any

import pytest
import torch

import heedful
from heedful.cpu import sdpa
from support.problems.cases import Case, build
from support.problems.grids import in_turns
from support.problems.nan import PLACES, SIZES, assert_passed_on
from support.runs import standin
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter

sizes = pytest.mark.parametrize("size", SIZES, ids=str)
places = pytest.mark.parametrize("place", PLACES, ids=str)


@sizes
@places
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", [None, "cpu"])
def test_nan_is_passed_on_with_and_without_gradients(size, place, causal, backend):
    for grad in (False, True):
        for lse in (False, True):
            assert_passed_on(size, place, backend, causal, grad, lse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@sizes
@places
def test_nan_is_passed_on_in_16_bits(size, place, dtype):
    for causal in (False, True):
        assert_passed_on(size, place, None, causal, dtype=dtype)
        assert_passed_on(size, place, "cpu", causal, dtype=dtype)


@sizes
@places
def test_nan_passes_every_way_of_making_scores(size, place):
    sink = torch.tensor([0.5, -0.5])
    ways: list[dict[str, Any]] = [{"sink": sink}, {"softcap": 2.0}, {"softmax_scale": -0.3}]
    for more in ways:
        assert_passed_on(size, place, "cpu", **more)
        assert_passed_on(size, place, None, **more)


@pytest.mark.parametrize("size", [(4, 3), (4, 4), (1, 1), (9, 12)])
def test_nan_changes_no_bit_of_other_rows(size):
    q, k, v = (torch.randn(3, n, 2, 128) for n in (size[0], size[1], size[1]))
    # Zeros that are right, in part of a row and in whole ones.
    v[0, ..., 0] = 0.0
    v[2] = 0.0
    want = heedful.flash_attn_func(q, k, v)
    q = q.clone()
    q[1, 0, 1] = torch.nan
    given = torch.empty_like(want)
    for out in (None, given):
        got = heedful.flash_attn_func(q, k, v, out=out)
        same = torch.ones(got.shape[:-1], dtype=torch.bool)
        same[1, 0, 1] = False
        assert torch.equal(got[same], want[same]) and got[1, 0, 1].isnan().all()
    assert given is got


def test_nan_is_passed_on_where_the_mask_leaves_few_of_many_keys():
    """As SDPA aligns a causal mask: the first queries see the first keys alone."""
    case = Case(causal=True, bottom_right=False, seqlen_q=4, seqlen_k=100, backward=False)
    built = build(case)
    q = built.x.q.clone()
    q[1, 2, 1] = torch.nan
    out, _, _ = sdpa.forward(built.problem, built.x._replace(q=q))
    want = torch.zeros(out.shape[:-1], dtype=torch.bool)
    want[1, 2, 1] = True
    assert torch.equal(out.isnan().all(-1), want) and torch.equal(out.isnan().any(-1), want)


@interpreted
@pytest.mark.parametrize(
    "place, causal, num_splits", in_turns(PLACES, (False, True), (1, 3)), ids=str
)
def test_portable_kernels_pass_nan_on(place, causal, num_splits):
    with standin.gpu(interprets=True, tiles=(16, 16)):
        for size in SIZES:
            assert_passed_on(size, place, "portable", causal, lse=True, num_splits=num_splits)
        sink = torch.tensor([0.5, -0.5])
        for size in SIZES[1:4]:
            assert_passed_on(size, place, "portable", causal, num_splits=num_splits, sink=sink)


@pytest.mark.slow
@starts_interpreter
def test_portable_kernels_pass_nan_on_in_the_interpreter():
    pass_in_the_interpreter(__file__)
