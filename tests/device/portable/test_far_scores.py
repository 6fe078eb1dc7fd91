"""Rows whose scores are far from 0 and close together, on the GPU: each kernel keeps to its budget.

The reasons and the lattice are in `support.problems.far_scores`. How many counted is in junit's
properties.
"""

import pytest
import torch

import heedful
from support.hopper.device import ON_HOPPER, WITH_TRITON_3_9
from support.problems import far_draws, far_scores

HOPPER = [*ON_HOPPER, WITH_TRITON_3_9]
BACKENDS = [
    pytest.param("portable", marks=pytest.mark.gpu),
    pytest.param("decode", marks=pytest.mark.gpu),
    *(
        pytest.param(name, marks=HOPPER)
        for name in ("hopper", "hopper_decode", "mla", "mla_swap_ab", "fp8")
    ),
]


# The long grid's problems of a backend are drawn in parts, which run side by side. One of 72
# kernels took longer than its limit of 130 s: now a part has up to five, the grid 55 (H200).
PARTS = 10


def assert_within(tally: far_scores.Tally, name: str, count: int, record_property) -> None:
    record_property("far scores", f"{name}: {tally}")
    assert tally.counted >= count and not tally.outside, tally


@pytest.mark.parametrize("name", BACKENDS)
def test_far_scores_are_within_their_error_budget(name, record_property):
    assert_within(far_draws.check_many(name, 16), name, 16, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, PARTS + 1))
@pytest.mark.parametrize("name", BACKENDS)
def test_two_thousand_far_problems_are_within_their_error_budgets(name, part, record_property):
    """7 x 10 x 29: what counts, see `far_scores.Verdict`."""
    assert_within(far_draws.check_part(name, 29, part), name, 29, record_property)


SIDES = [
    *(pytest.param(None, dtype, marks=pytest.mark.gpu) for dtype in ("float32", "bfloat16")),
    *(pytest.param("portable", dtype, marks=pytest.mark.gpu) for dtype in ("float32", "float16")),
    pytest.param("decode", "float16", marks=pytest.mark.gpu),
    *(
        pytest.param(name, dtype, marks=HOPPER)
        for name in ("hopper", "hopper_decode")
        for dtype in ("float16", "bfloat16")
    ),
]


def prefixed(problem, **more) -> None:
    by_shared_prefix = far_scores.by_shared_prefix(problem.prefix, **more)
    far_scores.check(problem, by_shared_prefix, device="cuda")


@pytest.mark.parametrize(("backend", "dtype"), SIDES)
def test_a_shared_prefix_is_within_its_error_budget(backend, dtype):
    """Both sides of the merge are results of this backend."""
    for problem in far_scores.prefix_grid(dtype):
        prefixed(problem, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_shared_prefix_of_latents_is_within_its_error_budget(dtype):
    for problem in far_scores.prefixed_latents(dtype):
        prefixed(problem)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_compiled_shared_prefix_is_within_its_error_budget(dtype):
    call = torch.compile(heedful.flash_attn_with_kvcache, fullgraph=True)
    for problem in far_scores.prefix_grid(dtype)[::3]:
        prefixed(problem, call=call)
