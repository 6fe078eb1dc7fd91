"""Random problems with many tiles a program, or hardly any that sees a key: ten launches in a row,
all rows checked for soundness, sampled ones against float64."""

import pytest

from heedful.torch.base.device import toolchain
from support.hopper.device import ON_HOPPER
from support.problems import large

HOPPER = [pytest.param("hopper", marks=ON_HOPPER), pytest.param("portable", marks=pytest.mark.gpu)]
VARIANTS = large.variants()


def check(variant, backend, numbers):
    if not large.takes(variant, backend, toolchain().triton or ()):
        pytest.skip(f"{backend} has no kernel for {variant.dtype} here")
    for number in numbers:
        large.run(large.problem(variant, number), backend)


@pytest.mark.parametrize("backend", HOPPER)
@pytest.mark.parametrize("variant", VARIANTS[::5], ids=str)
def test_a_large_problem_is_within_its_error_budget(variant, backend):
    check(variant, backend, (0, 9, 16))


@pytest.mark.slow
@pytest.mark.parametrize("backend", HOPPER)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_two_thousand_large_problems_are_within_their_error_budgets(variant, backend):
    check(variant, backend, range(large.PROBLEMS_EACH))


@pytest.mark.parametrize("backend", HOPPER)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("sizes", [(8000, 1024), (20000, 16), (20000, 19000)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "window"])
def test_tiles_that_see_no_key_end_no_launch(sizes, causal, head_dim, backend):
    """Consumers race ahead of the producer there. Slots of queries that several consumers shared
    were then taken for filled, and the launch failed."""
    variant = large.Variant("bfloat16", head_dim, head_dim, causal, (1, -1) if causal else (1, 1))
    window = (100, -1 if causal else 0)
    for lengths in ((sizes,), (sizes,) * 3):
        large.run(large.Problem(variant, lengths, 12, 1, window, 0), backend)
