"""Rows whose scores are far from 0 and close together, on the CPU: probabilities are those of a
row's maximum and sum, forward and backward. The problems are those of
`support.problems.far_scores`."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

import heedful.torch as heedful
from heedful import cpu
from heedful.cpu import tiled_forward
from support.problems import far_draws, far_scores
from support.problems.budget import backend_results, oracle_results
from support.problems.cases import Case, build
from support.problems.far_scores import SMALL, by_backend, far
from support.runs import api

DTYPES = ("float32", "float16", "bfloat16")


def gradients(q, k, v, **more):
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = heedful.flash_attn_func(*leaves, **more)
    return out, torch.autograd.grad(out, leaves, torch.ones_like(out))


@pytest.mark.parametrize("bias", (-1e4, -1e9, -1e30, far_scores.LEAST["float32"], 1e30))
def test_three_keys_under_one_bias_share_a_row(bias):
    """dV was 1 for each."""
    q, k, v = torch.zeros(1, 1, 1, 8), torch.zeros(1, 3, 1, 8), torch.randn(1, 3, 1, 8)
    out, (_, _, dv) = gradients(q, k, v, bias=torch.full((1, 1, 1, 3), bias))
    torch.testing.assert_close(out[0, 0], v.detach().mean(1)[0])
    torch.testing.assert_close(dv, torch.full_like(dv, 1 / 3))


@pytest.mark.parametrize("size", (2**10, 2**13, 2**16))
def test_three_equal_scores_share_a_row(size):
    q, k = torch.zeros(1, 1, 1, 64), torch.zeros(1, 3, 1, 64)
    q[..., 0], k[..., 0] = size, size
    _, (_, _, dv) = gradients(q.bfloat16(), k.bfloat16(), torch.randn(1, 3, 1, 64).bfloat16())
    torch.testing.assert_close(dv.float(), torch.full(dv.shape, 1 / 3), atol=1e-3, rtol=0)


@pytest.mark.parametrize("score", (300.0, 700.0, 1000.0))
def test_three_equal_scores_of_hundreds_share_a_row_of_float32(score):
    """Their log-sum-exp is known to 2^-15, a probability to 2^-23."""
    q, k = torch.full((1, 1, 1, 1), score), torch.ones(1, 3, 1, 1)
    _, (_, _, dv) = gradients(q, k, torch.randn(1, 3, 1, 1), softmax_scale=1.0)
    torch.testing.assert_close(dv, torch.full_like(dv, 1 / 3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_grid_is_within_its_error_budget(dtype):
    base = replace(SMALL, dtype=dtype)
    problems = far_scores.grid(base) + far_scores.forward_grid(base)
    tally = far_scores.run_many(problems, by_backend(cpu), len(problems))
    assert tally.counted == len(problems) and not tally.outside, tally


def test_random_far_problems_are_within_their_error_budgets():
    tally = far_scores.run_many(far_draws.drawn("cpu"), by_backend(cpu), 60)
    assert not tally.outside, tally


@pytest.mark.slow
def test_many_random_far_problems_are_within_their_error_budgets():
    tally = far_scores.run_many(far_draws.drawn("cpu", 200, 1), by_backend(cpu), 1000)
    assert not tally.outside, tally


@pytest.mark.parametrize("number", range(0, 40, 3))
def test_public_calls_are_within_the_budget(number):
    problem = far_scores.grid()[number]
    far_scores.check(problem, api.results)


@pytest.mark.parametrize("problem", far_scores.prefix_grid(), ids=str)
def test_a_shared_prefix_is_within_the_budget(problem):
    """Both calls' log-sum-exps have lost what the merge needs."""
    far_scores.check(problem, far_scores.by_shared_prefix(problem.prefix))


@pytest.mark.parametrize("number", (1, 7))
def test_a_compiled_shared_prefix_is_within_the_budget(number):
    problem = far_scores.prefix_grid()[number]
    call = torch.compile(heedful.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    far_scores.check(problem, far_scores.by_shared_prefix(problem.prefix, call))


# More rows and keys than a tile has, a prime number of them: tiles of several kinds.
LONG = Case(batch=1, seqlen_q=521, seqlen_k=613, heads_q=1, heads_k=1, head_dim=16)


@pytest.mark.parametrize(
    "problem",
    [
        far(LONG, (-1e9, -1e30), bias_dtype="float32", where="rows"),
        far(replace(LONG, causal=True), (-1e9,), "k", bias_dtype="float32", where="left"),
        far(replace(LONG, window=(100, 20), sink=True), score=23, below=True, far_sink=True),
        far(replace(LONG, heads_q=3, dropout_p=0.25), score=20),
    ],
    ids=str,
)
def test_rows_of_several_tiles_are_within_the_budget(problem):
    far_scores.check(problem, by_backend(cpu))


@pytest.mark.parametrize("score", far_scores.SCORES)
def test_returned_probabilities_of_far_rows_are_shares(score):
    problem = far(replace(SMALL, return_probs=True, dropout_p=0.25), score=score, below=True)
    built = far_scores.built(problem)
    got = backend_results(cpu, built).probs
    want = oracle_results(built).probs
    assert abs(got - want).max() <= 1e-6 < abs(want).max()


@pytest.mark.parametrize("score", far_scores.SCORES)
@pytest.mark.parametrize("causal", (False, True))
def test_calls_that_torch_answers_are_within_the_budget(causal, score):
    """Without a log-sum-exp they are SDPA's."""
    base = replace(SMALL, backward=False, causal=causal, seqlen_q=37, seqlen_k=37)
    for below in (False, True):
        built = far_scores.built(far(base, score=score, below=below))
        x, scale = built.x, built.problem.scale
        given = (x.q, x.k, x.v, 0.0, scale, causal)
        assert "forward   sdpa" in heedful.explain(heedful.flash_attn_func, *given)
        out = heedful.flash_attn_func(*given)
        want = oracle_results(built).out
        # Of sums of 37 products with probabilities, each rounded once.
        assert abs(out.double().numpy() - want).max() <= 37 * 2**-24 * abs(x.v).max()


def test_a_row_is_no_other_beside_far_ones():
    """Rows of one tile: those that are not far have the same bits with and without far ones."""
    built = far_scores.built(far(SMALL, (-1e9,), "q", bias_dtype="float32", where="rows"))
    is_far = built.x.bias[0, 0, :, 0] < 0
    plain = replace(built, x=built.x._replace(bias=torch.zeros_like(built.x.bias)))
    with_far, without = (backend_results(cpu, one) for one in (built, plain))
    near = (~is_far).numpy()
    assert 0 < near.sum() < len(near)
    assert (with_far.dq[:, near] == without.dq[:, near]).all()
    assert (with_far.out[:, near] == without.out[:, near]).all()


def test_near_rows_and_rows_without_keys_are_not_made_anew():
    def made_anew(built) -> bool:
        out, lse, _ = cpu.forward(built.problem, built.x)
        running = tiled_forward._by_running_maximum
        with mock.patch.object(tiled_forward, "_by_running_maximum", wraps=running) as anew:
            cpu.backward(built.problem, built.x, out, lse, built.dout, built.dlse)
        return anew.called

    for case in (Case(), Case(causal=True, seqlen_q=60), Case(sink=True, used="qk", varlen="q")):
        assert not made_anew(build(case))
    assert made_anew(far_scores.built(far(SMALL, (-1e9,), bias_dtype="float32")))
