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


def assert_within(name: str, count: int, record_property) -> None:
    tally = far_draws.check_many(name, count)
    record_property("far scores", f"{name}: {tally}")
    assert tally.counted >= count and not tally.outside, tally


@pytest.mark.parametrize("name", BACKENDS)
def test_far_scores_are_within_their_error_budget(name, record_property):
    assert_within(name, 16, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_two_thousand_far_problems_are_within_their_error_budgets(name, record_property):
    """7 x 290: what counts, see `far_scores.Verdict`."""
    assert_within(name, 290, record_property)
