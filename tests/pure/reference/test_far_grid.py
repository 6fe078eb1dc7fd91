"""The grid of scores far from 0 is what it says: exact in float32, sharp, and fair to an honest
kernel."""

from itertools import islice

import numpy as np
import pytest
import torch

from heedful.core.base.device import by_name
from heedful.core.planning.plan import plan
from heedful.reference import eager, oracle
from heedful.reference.budget import twin_results
from heedful.reference.convert import operands_as_numpy
from support.problems import far_draws, far_scores
from support.problems.cases import Case, build
from support.problems.far_scores import Far, far
from support.runs.planned import kernels_by

# Of 576 columns: float64 takes seconds for a few.
FEW = {"mla": 2, "mla_swap_ab": 2}
DTYPES = ("float32", "float16", "bfloat16")
HERE = [
    problem
    for dtype in DTYPES
    for base in [Case(**{**vars(far_scores.SMALL), "dtype": dtype})]
    for problem in (*far_scores.grid(base), *far_scores.forward_grid(base))
]


def twin(built):
    return twin_results(built.problem, built.x, built.dout, built.dlse, far_scores=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_problem_counts_and_an_honest_kernel_passes(dtype):
    problems = [problem for problem in HERE if problem.case.dtype == dtype]
    tally = far_scores.run_many(problems, twin, len(problems))
    assert tally.counted == tally.drawn == len(problems), tally
    assert not tally.outside, tally


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_usual_twin_is_no_judge_of_them(dtype):
    """By lse in float32 it loses what the grid is about."""
    problem = far(Case(dtype=dtype), (-1e9,), bias_dtype="float32")
    built = far_scores.built(problem)
    usual = twin_results(built.problem, built.x, built.dout, built.dlse)
    assert "dv" in far_scores.verdict(problem, lambda _: usual).wrong


def _scores(problem: Far) -> np.ndarray:
    """Every score of a problem without softcap, in float64."""
    built = far_scores.built(problem)
    found = []
    for block in oracle._blocks(built.problem, operands_as_numpy(built.x)):
        found.append(block.q_HMD @ block.k_HND.swapaxes(1, 2) * built.problem.scale)
    return np.concatenate([scores.ravel() for scores in found])


@pytest.mark.parametrize("name", far_draws.TAKES)
def test_float32_has_every_score_of_q_and_k(name):
    for problem in islice(far_draws.drawn(name), FEW.get(name, 12)):
        scores = _scores(problem)
        assert np.array_equal(scores, scores.astype(np.float32)), problem
        unit = 2.0**problem.fine
        assert np.array_equal(scores, np.round(scores / unit) * unit), problem
        if problem.score is not None:
            assert abs(scores).max() <= 2 ** (problem.score + 2)


@pytest.mark.parametrize("bias", (-1e4, -1e9))
def test_float32_has_every_score_beside_a_bias(bias):
    problem = far(Case(), (bias,), bias_dtype="float32", where="parts")
    built = far_scores.built(problem)
    biased = _scores(problem).reshape(built.x.bias.shape) + built.x.bias.numpy().astype(np.float64)
    assert np.array_equal(biased, biased.astype(np.float32))


@pytest.mark.parametrize("name", [n for n in far_draws.TAKES if n not in ("cpu", "scan", "cdna")])
def test_every_variant_is_one_of_its_backend(name):
    for case in far_draws.variants(name):
        plan(build(case).problem, by_name("H200"), backend=far_draws.backend_of(name))


@pytest.mark.parametrize("name", far_draws.TAKES)
def test_most_problems_count(name):
    count = FEW.get(name, 10)
    tally = far_scores.run_many(islice(far_draws.drawn(name), count), twin, count)
    assert tally.counted >= 0.8 * count and not tally.outside, tally


def test_parts_of_the_long_grid_share_kernels_and_no_problem():
    kernels = kernels_by(far_draws.backend_of("fp8"))
    parts = (1, 1 + far_draws.GROUPS)
    first, later = (list(islice(far_draws.sharing("fp8", part, kernels), 4)) for part in parts)
    assert not set(map(str, first)) & set(map(str, later))
    sets = [kernels(far_scores.built(problem).problem) for problem in (*first, *later)]
    assert 1 < len(frozenset().union(*sets)) <= far_draws.MOST_KERNELS


@pytest.mark.slow
def test_the_long_grid_compiles_fewer_than_sixty_kernels():
    found = set()
    for name in (name for name in far_draws.TAKES if name not in ("cpu", "scan", "cdna")):
        some = far_draws.groups(name, kernels_by(far_draws.backend_of(name)))
        assert len(some) == far_draws.GROUPS
        found |= {(name, key) for _, own in some for key in own}
    assert len(found) < 60


def test_a_bias_that_its_dtype_does_not_hold_is_no_problem():
    with pytest.raises(ValueError, match="float16 does not hold"):
        far(Case(), (-1e9,), bias_dtype="float16")


def test_the_far_twin_of_rows_without_keys_is_zero():
    built = far_scores.built(far(Case(), (-1e9,), hidden=True))
    x = built.x._replace(bias=torch.full_like(built.x.bias, -torch.inf))
    out, lse, _ = eager.forward(built.problem, x, far_scores=True)
    assert not out.any() and bool((lse == -torch.inf).all())
