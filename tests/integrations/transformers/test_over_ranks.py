"""Models inside of `with plan:`, whose tokens are spread over ranks, equal the whole model."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from heedful.distributed import plan
from heedful.integrations.transformers.over_ranks import attention_over_ranks, mask_over_ranks
from heedful.integrations.transformers.patterns import Pattern
from support.integrations import over_ranks
from support.runs.ranks import Ranks

# In float32 of logits of order 1: both round differently.
MOST_APART, MOST_GRADIENTS_APART = 2e-5, 2e-4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    made = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


@pytest.mark.parametrize("strategy", ["gather", "heads", "ring"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_logits_loss_and_gradients_are_those_of_the_whole_model(ranks, family, strategy):
    for (logits, loss, grads), paths in ranks.run(
        over_ranks.compared, family, False, {"strategy": strategy}
    ):
        assert logits <= MOST_APART and loss <= MOST_APART and grads <= MOST_GRADIENTS_APART
        assert paths == {"over ranks": 2}


def test_layers_that_a_backward_computes_again_are_spread_too(ranks):
    for (*_, grads), paths in ranks.run(over_ranks.compared, "gemma2", True, {}):
        assert grads <= MOST_GRADIENTS_APART
        assert paths == {"over ranks": 4}


@pytest.fixture
def alone(tmp_path):
    """A plan of one rank."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield plan(lengths=[3, 5], heads_q=2, heads_k=1, head_dim=8, dtype=torch.float32)
    dist.destroy_process_group()


def test_what_a_plan_has_no_part_of_is_refused_by_name(alone):
    rows: Any = tuple(torch.randn(1, 8, heads, 8) for heads in (2, 1, 1))
    for name in ("cu_seq_lens_q", "position_bias", "output_attentions"):
        with pytest.raises(ValueError, match=f"{name} must be None inside of a plan"):
            attention_over_ranks(alone, rows, None, 0.0, {}, {name: True})
    with pytest.raises(ValueError, match="attention_mask must be None inside of a plan"):
        attention_over_ranks(alone, rows, torch.ones(1, 1, 8, 8), 0.0, {}, {})
    with pytest.raises(ValueError, match="attention_mask must be None inside of a plan"):
        mask_over_ranks(Pattern(True), torch.ones(1, 8), 8, "cpu")
    with pytest.raises(ValueError, match="does not serve attention in chunks"):
        mask_over_ranks("attention in chunks", None, 8, "cpu")
    with pytest.raises(ValueError, match="dropout_seed must be an int"):
        attention_over_ranks(alone, rows, None, 0.1, {"causal": True}, {})


def test_a_masks_window_is_the_layers(alone):
    rows: Any = tuple(torch.randn(1, 8, heads, 8) for heads in (2, 1, 1))
    q, k, v = rows
    mask = mask_over_ranks(Pattern(True, 1), None, 8, "cpu")
    found = attention_over_ranks(alone, rows, mask, 0.0, {"causal": True}, {})
    # A window of two keys in documents of 3 and 5.
    places = torch.arange(8)
    distance, document = places[:, None] - places, torch.tensor([0] * 3 + [1] * 5)
    sees = (distance >= 0) & (distance <= 1) & (document[:, None] == document)
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        sees,
        enable_gqa=True,
    )
    torch.testing.assert_close(found, want.transpose(1, 2))
