"""On a GPU too, a NaN among queries or keys is seen in every result that it takes part in."""

from typing import Any

import pytest
import torch

from heedful.core.registry.by_hand import forced
from support.problems.nan import PLACES, SIZES, assert_passed_on

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [*SIZES, (300, 200), (150, 900)], ids=str)
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_nan_is_passed_on(size, place, causal, backend):
    for dim in (64, 128, 256):
        for grad in (False, True):
            how: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "dim": dim}
            assert_passed_on(size, place, backend, causal, grad, True, **how)
            assert_passed_on(size, place, backend, causal, grad, False, **how)


@pytest.mark.parametrize("size", [(1, 15), (4, 700), (1, 5000)], ids=str)
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("backend", ["hopper", "portable", forced("decode/portable")])
def test_nan_is_passed_on_through_splits_and_sinks(size, place, backend):
    how: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "dim": 128, "lse": True}
    sink = torch.tensor([0.5, -0.5], device="cuda")
    for splits in (1, 3):
        assert_passed_on(size, place, backend, num_splits=splits, **how)
        assert_passed_on(size, place, backend, num_splits=splits, sink=sink, **how)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_nan_is_passed_on_in_e4m3(size, place):
    for causal in (False, True):
        how: dict[str, Any] = {"device": "cuda", "dtype": torch.float8_e4m3fn, "dim": 128}
        assert_passed_on(size, place, "hopper", causal, lse=True, **how)
