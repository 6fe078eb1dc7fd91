"""The check of large problems, on small ones: it passes what is right and fails what is not."""

import pytest
import torch

from support.problems import large

VARIANTS = [
    large.Variant("bfloat16", 64, 64, True, (-1, -1), packed=True, sink=True),
    large.Variant("float16", 64, 32, True, (1, -1), softcap=5.0),
    large.Variant("bfloat16", 32, 32, False, (1, 1), pages=16),
    large.Variant("bfloat16", 64, 64, True, (-1, -1), lengths=True),
]


def problem(variant):
    lengths = ((70, 30), (0, 40), (50, 0), (33, 90)) if variant.packed else ((90, 33),) * 2
    left, right = (20 if w >= 0 else -1 for w in variant.window)
    return large.Problem(variant, lengths, 2, 2, (left, right), 0)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_right_results_pass(variant):
    large.run(problem(variant), "cpu", "cpu")


def scaled(x, out, lse):
    return out * 1.1, lse


def without_last_key(x, out, lse):
    x.k[-1], x.v[-1] = -100.0, 100.0
    return out, lse


def poisoned_row(x, out, lse):
    out[len(out) // 2, 1] = torch.nan
    return out, lse


def blind_row_written(x, out, lse):
    out[0] = 1e-3
    return out, lse


def lse_in_base_2(x, out, lse):
    return out, lse * 1.4427


@pytest.mark.parametrize("variant", VARIANTS[:2], ids=str)
@pytest.mark.parametrize(
    "wrong", [scaled, without_last_key, poisoned_row, blind_row_written, lse_in_base_2]
)
def test_wrong_results_fail(wrong, variant):
    it = problem(variant)
    x = large.build(it, "cpu")
    out, lse = wrong(x, *large.call(it, x, "cpu")(None))
    with pytest.raises(AssertionError):
        large.check(it, x, out, lse)


def test_the_grid_holds_what_is_hard_on_a_scheduler():
    """Of every fifth variant, to be quick: a fifth of 2,000 problems, 300 and 300."""
    found = [
        large.problem(variant, number)
        for variant in large.variants()[::5]
        for number in range(large.PROBLEMS_EACH)
    ]
    assert len(found) >= 400
    assert sum(it.mostly_empty for it in found) >= 60
    assert sum(it.tiles_each > 100 for it in found) >= 60
    assert all(2 <= it.tiles_each <= 200 and it.flops <= large.MOST_FLOPS for it in found)
