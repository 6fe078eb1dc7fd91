"""Rows whose scores are far from 0 and close together, in JAX's scan: see
`support.problems.far_scores`."""

from dataclasses import replace

import pytest

jax = pytest.importorskip("jax")
import numpy as np  # noqa: E402
from jax import numpy as jnp  # noqa: E402

from heedful.jax import flash_attn_func  # noqa: E402
from support.problems import far_draws, far_scores  # noqa: E402
from support.problems.far_scores import SMALL, by_backend, far  # noqa: E402
from support.runs import jax_backend  # noqa: E402
from support.runs.jax_api import by_shared_prefix  # noqa: E402

SINK = replace(SMALL, sink=True, causal=True, seqlen_q=53)
FEW = [
    far(SMALL, (-1e9, -1e30), bias_dtype="float32", where="rows", hidden=True),
    far(SINK, (far_scores.LEAST["float32"],), "bk", bias_dtype="float32", where="left"),
    far(replace(SINK, dtype="float16", heads_q=4), score=23, below=True, far_sink=True),
    far(replace(SMALL, backward=False, num_splits=3, return_probs=True), score=26),
]


@pytest.mark.parametrize("problem", FEW, ids=str)
def test_the_scan_is_within_its_error_budget(problem):
    far_scores.check(problem, by_backend(jax_backend))


@pytest.mark.slow
@pytest.mark.parametrize("problem", far_scores.grid() + far_scores.forward_grid(), ids=str)
def test_the_grid_is_within_its_error_budget(problem):
    far_scores.check(problem, by_backend(jax_backend))


@pytest.mark.slow
def test_random_far_problems_are_within_their_error_budgets():
    tally = far_scores.run_many(far_draws.drawn("scan"), by_backend(jax_backend), 100)
    assert not tally.outside, tally


PREFIXES = far_scores.prefix_grid()


@pytest.mark.parametrize(
    "problem",
    [*PREFIXES[:2], *(pytest.param(p, marks=pytest.mark.slow) for p in PREFIXES[2:])],
    ids=str,
)
def test_a_shared_prefix_is_within_the_budget(problem):
    far_scores.check(problem, by_shared_prefix(problem.prefix))


@pytest.mark.parametrize("size", (1e9, pytest.param(1e4, marks=pytest.mark.slow)))
def test_three_keys_under_one_bias_share_a_row(size):
    """dV was 1 for each. Under vmap both branches run: rows that are near stay as they are."""
    q, k = jnp.zeros((2, 1, 1, 1, 8)), jnp.zeros((2, 1, 3, 1, 8))
    v = jnp.asarray(np.random.default_rng(0).standard_normal((2, 1, 3, 1, 8)), jnp.float32)
    bias = jnp.zeros((2, 1, 1, 1, 3)).at[0].set(-size)

    def gradient(v, bias, q, k):
        return jax.grad(lambda v: flash_attn_func(q, k, v, bias=bias).sum())(v)

    for dv in (gradient(v[0], bias[0], q[0], k[0]), jax.vmap(gradient)(v, bias, q, k)):
        np.testing.assert_allclose(dv, 1 / 3, rtol=1e-6)
