"""Rows whose scores are far from 0 and close together, on the GPU: each kernel keeps to its budget.

The reasons and the lattice are in `support.far_scores`. How many counted is in junit's properties.
"""

import pytest

from support import far_draws
from support.hopper import ON_HOPPER, WITH_TRITON_3_9

HOPPER = [*ON_HOPPER, WITH_TRITON_3_9]
BACKENDS = [
    pytest.param("portable", marks=pytest.mark.gpu),
    pytest.param("decode", marks=pytest.mark.gpu),
    *(
        pytest.param(name, marks=HOPPER)
        for name in ("hopper", "hopper_decode", "mla", "mla_swap_ab", "fp8")
    ),
]


# The long grid's problems of a backend are drawn in parts, which run side by side.
PARTS = 10


def assert_within(name: str, count: int, record_property, seed: int = 0) -> None:
    tally = far_draws.check_many(name, count, seed)
    record_property("far scores", f"{name}: {tally}")
    assert tally.counted >= count and not tally.outside, tally


@pytest.mark.parametrize("name", BACKENDS)
def test_far_scores_are_within_their_error_budget(name, record_property):
    assert_within(name, 16, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, PARTS + 1))
@pytest.mark.parametrize("name", BACKENDS)
def test_two_thousand_far_problems_are_within_their_error_budgets(name, part, record_property):
    """7 x 10 x 29: what counts, see `far_scores.Verdict`."""
    assert_within(name, 29, record_property, part)
