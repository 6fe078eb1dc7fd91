"""A step of decoding whose keys are spread over ranks is the step of one rank that has them all."""

from typing import Any

import pytest
import torch

from heedful.distributed import attention_with_kvcache
from support.distributed.decoding import DIM, HEADS, HEADS_K, stepped
from support.runs.ranks import Ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    made = Ranks(3, tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("tokens", "owner", "has_sink", "pages"),
    [(1, 0, False, 0), (1, 2, True, 0), (4, 1, True, 0), (3, 2, False, 16), (2, None, False, 0)],
)
def test_a_step_is_that_of_one_cache(ranks, tokens, owner, has_sink, pages, name):
    for out, lse in ranks.run(stepped, tokens, owner, has_sink, pages, name):
        # float32 sums in another order, three parts of them; else one rounding of out.
        assert out <= (8 if name == "float32" else 1)
        assert lse <= 8


def refused(rank: int, count: int, more: dict[str, Any]) -> str:
    """What is said, without any transfer: only rank 0 calls it."""
    if rank:
        return ""
    q, cache = torch.zeros(1, 1, HEADS, DIM), torch.zeros(1, 8, HEADS_K, DIM)
    arguments: dict[str, Any] = {"q": q, "k_cache": cache, "v_cache": cache.clone()} | more
    with pytest.raises((TypeError, ValueError)) as caught:
        attention_with_kvcache(**arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"owner": 3}, "owner must be a rank of the group from 0 to 2, got 3"),
        ({"owner": 0}, "k and v must be tensors on rank 0, the owner"),
        ({"k": torch.zeros(1, 1, HEADS_K, DIM)}, "owner must be a rank where k and v"),
        ({"q": [1.0]}, "q must be a torch.Tensor, got list"),
        ({"v_cache": torch.zeros(9)}, "v_cache must have 4 dims, got shape (9,)"),
        ({"return_lse": "yes"}, "return_lse must be a bool, got str"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_sent(ranks, more, said):
    found, *_ = ranks.run(refused, more)
    assert said in found
