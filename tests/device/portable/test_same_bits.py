"""With numerics="invariant" a row has the same bits, whichever way a call computes it."""

import pytest
import torch

from heedful.core.registry.tiles import PART_KEYS
from support.problems import ways

pytestmark = pytest.mark.gpu

KINDS = (
    ((64, 64), torch.bfloat16),
    ((96, 96), torch.bfloat16),
    ((128, 128), torch.bfloat16),
    ((128, 128), torch.float16),
    ((192, 128), torch.bfloat16),
    ((256, 256), torch.bfloat16),
)
# A tile's keys, and a part's.
BORDERS = (64, PART_KEYS)


@pytest.mark.parametrize("options", ways.OPTIONS)
@pytest.mark.parametrize("head_dims, dtype", KINDS, ids=str)
def test_two_ways_give_the_same_bits(head_dims, dtype, options):
    kind = {"head_dims": head_dims, "dtype": dtype, "options": options, "device": "cuda"}
    found = ways.differing(range(24), "invariant", longest=9000, borders=BORDERS, **kind)
    assert not found


def test_fast_calls_differ_in_many_pairs():
    """So that the pairs above are those whose bits depend on the way."""
    kind = {"head_dims": (128, 128), "dtype": torch.bfloat16, "options": "causal"}
    drawn = {**kind, "longest": 9000, "borders": BORDERS, "device": "cuda"}
    assert len(ways.differing(range(60), "fast", **drawn)) >= 18
