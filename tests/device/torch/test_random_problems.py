"""Random problems over the whole feature product on the GPU, each against the float64 oracle."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.problems.budget import run
from support.problems.variants import problems, sample
from support.runs.prepared import Prepared

# 150 x 14 = 2,100 problems; few in the default tier, which need fewer compiled kernels.
VARIANTS, EACH = sample(150), 14


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS[:12], ids=str)
@settings(max_examples=EACH)
@given(data=st.data())
def test_a_random_problem_is_within_its_error_budget(variant, data):
    run(Prepared("portable"), data.draw(problems(variant)), "cuda")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS[12:], ids=str)
@settings(max_examples=EACH)
@given(data=st.data())
def test_two_thousand_random_problems_are_within_their_error_budgets(variant, data):
    run(Prepared("portable"), data.draw(problems(variant)), "cuda")
