"""Language models of 20 families equal themselves with eager attention: as they read, with padding,
packed, as they learn and as they generate."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import Cache, QuantizedLayer

from heedful.integrations.transformers import paths, reset_paths
from support.integrations.language_models import (
    BATCH,
    DOCUMENTS,
    FAMILIES,
    LENGTH,
    model,
    packed,
    padded_left,
    tokens,
)
from support.problems.grids import in_turns

# In float32 of logits of order 1: both round differently.
MOST_APART, MOST_GRADIENTS_APART = 2e-5, 2e-4
# What a family may run with a mask of queries x keys, and why.
DENSE = {"llama4": {"dense: attention in chunks"}}
HOLES = "dense: an attention_mask with holes inside of a sequence"


def both(made, run) -> list:
    """What run(made) gives with eager attention, and with heedful."""
    found = []
    for name in ("eager", "heedful"):
        made.set_attn_implementation(name)
        reset_paths()
        found.append(run(made))
    return found


def logits(made, **given) -> Tensor:
    with torch.no_grad():
        return made(**given).logits


def apart(one: Tensor, other: Tensor, mask: Tensor | None = None) -> float:
    difference = (one - other).abs()
    return float((difference if mask is None else difference[mask.bool()]).max())


def dense_paths() -> set[str]:
    return {way for way in paths() if way.startswith("dense")}


@pytest.mark.parametrize("family, padding", in_turns(FAMILIES, ["left", "none", "right"]))
def test_a_forward_equals_eager(family, padding):
    left = padded_left()
    mask = {"none": None, "left": left, "right": left.flip(1)}[padding]
    given = {"input_ids": tokens(), "attention_mask": mask}
    found = both(model(family), lambda made: logits(made, **given))
    assert apart(*found, mask=mask) <= MOST_APART
    assert paths() and dense_paths() <= DENSE.get(family, set())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_with_holes_is_dense_and_says_so(family):
    mask = padded_left()
    mask[0, 5] = 0
    given = {"input_ids": tokens(), "attention_mask": mask}
    found = both(model(family), lambda made: logits(made, **given))
    assert apart(*found, mask=mask) <= MOST_APART
    assert HOLES in dense_paths() and dense_paths() <= {HOLES, *DENSE.get(family, set())}


# Their chunks begin with the row in transformers 5.17, with each document in 5.24.
CHUNKED = {"llama4"}


def documents_alone(made) -> Tensor:
    parts = packed()["input_ids"].split(DOCUMENTS, 1)
    return torch.cat([logits(made, input_ids=part, use_cache=False) for part in parts], 1)


# Their other layers carry a state from one document to the next.
RECURRENT = {"lfm2", "qwen3_next"}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - RECURRENT - CHUNKED))
def test_packed_documents_equal_each_alone(family):
    made = model(family)
    made.set_attn_implementation("eager")
    alone = documents_alone(made)
    made.set_attn_implementation("heedful")
    reset_paths()
    together = logits(made, **packed(), use_cache=False)
    assert apart(alone, together) <= (1e-6 if family == "gpt_oss" else MOST_APART)
    assert dense_paths() <= DENSE.get(family, set())


@pytest.mark.parametrize("family", sorted(RECURRENT | CHUNKED))
def test_packed_documents_equal_eager(family):
    found = both(model(family), lambda made: logits(made, **packed(), use_cache=False))
    assert apart(*found) <= MOST_APART
    assert dense_paths() <= DENSE.get(family, set())


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_lengths_that_are_given_equal_each_document_alone(family):
    made = model(family)
    made.set_attn_implementation("eager")
    alone = documents_alone(made)
    made.set_attn_implementation("heedful")
    reset_paths()
    cu = torch.tensor((0, *DOCUMENTS)).cumsum(0)
    given = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 14, "max_length_k": 14}
    assert apart(alone, logits(made, **packed(), **given, use_cache=False)) <= MOST_APART
    assert paths() == {"given": 2}


def gradients(made, **given) -> dict[str, Tensor]:
    made.train()
    made.zero_grad()
    made(**given, use_cache=False).loss.backward()
    made.eval()
    return {n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None}


def farthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of gradients, over the largest of the same parameter."""
    assert one.keys() == other.keys()
    return max(apart(one[n], other[n]) / (float(one[n].abs().max()) + 1e-6) for n in one)


@pytest.mark.parametrize("family, padding", in_turns(FAMILIES, ["none", "left", "checkpointed"]))
def test_gradients_equal_eager(family, padding):
    made, given = model(family), {"input_ids": tokens(), "labels": tokens()}
    if padding != "none":
        mask = padded_left()
        labels = tokens().masked_fill(mask == 0, -100)
        labels[1, 4] = labels[2, 9] = -100  # From the last padding token.
        given.update(attention_mask=mask, labels=labels)
    if padding == "checkpointed":
        made.gradient_checkpointing_enable()
    assert farthest(*both(made, lambda m: gradients(m, **given))) <= MOST_GRADIENTS_APART


WAYS = {
    "greedy": {},
    "beams": {"num_beams": 2},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "prefill in chunks": {"prefill_chunk_size": 4},
    "static, prefill in chunks": {
        "cache_implementation": "static",
        "disable_compile": True,
        "prefill_chunk_size": 4,
    },
}


def generated(made, given: dict, how: dict) -> Tensor:
    return made.generate(**given, max_new_tokens=10, do_sample=False, **how)


@pytest.mark.parametrize("family, way", in_turns(FAMILIES, ["greedy", "beams", "static"]))
def test_generation_after_left_padding_equals_eager(family, way):
    made, given = model(family), {"input_ids": tokens(), "attention_mask": padded_left()}
    made.set_attn_implementation("eager")
    try:
        wanted = generated(made, given, WAYS[way])
    except TypeError as error:
        pytest.skip(f"this transformers does not: {error}")
    made.set_attn_implementation("heedful")
    reset_paths()
    assert torch.equal(generated(made, given, WAYS[way]), wanted)
    assert paths() and dense_paths() <= DENSE.get(family, set())


@pytest.mark.parametrize("way", ["prefill in chunks", "static, prefill in chunks"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_generation_with_other_caches_equals_eager(family, way):
    given = {"input_ids": tokens(), "attention_mask": padded_left()}
    found = both(model(family), lambda made: generated(made, given, WAYS[way]))
    assert torch.equal(*found)


class Int8(QuantizedLayer):
    """A cache's layer as those that need a package of quantisation."""

    def _quantize(self, tensor, axis):
        scale = tensor.abs().amax(-1, keepdim=True) / 127 + 1e-9
        return (tensor / scale).round().to(torch.int8), scale

    def _dequantize(self, q_tensor):
        numbers, scale = q_tensor
        return numbers * scale


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss"])
def test_generation_with_a_quantised_cache_equals_eager(family):
    given = {"input_ids": tokens(), "attention_mask": padded_left()}

    def run(made) -> Tensor:
        layers: Any = [Int8(residual_length=4) for _ in range(made.config.num_hidden_layers)]
        return generated(made, given, {"past_key_values": Cache(layers=layers)})

    assert torch.equal(*both(model(family), run))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_assisted_generation_equals_eager(family):
    given = {"input_ids": tokens()[:1]}
    looked_up = {"prompt_lookup_num_tokens": 3}
    assert torch.equal(*both(model(family), lambda made: generated(made, given, looked_up)))


def test_assisted_generation_by_another_model_equals_eager():
    helper, given = model("qwen3"), {"input_ids": tokens()[:1]}
    helper.set_attn_implementation("heedful")
    how = {"assistant_model": helper}
    assert torch.equal(*both(model("llama"), lambda made: generated(made, given, how)))


def test_dropout_follows_the_seed():
    made = model("llama", attention_dropout=0.5)
    made.set_attn_implementation("heedful")
    made.train()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(made(input_ids=tokens(), use_cache=False).logits)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_weights_are_computed_where_they_are_asked_for(family, padding):
    mask = None if padding == "none" else padded_left()
    given = {"input_ids": tokens(), "attention_mask": mask, "output_attentions": True}
    with torch.no_grad():
        theirs, ours = both(model(family), lambda made: made(**given).attentions)
    rows = torch.ones(BATCH, LENGTH) if mask is None else mask
    for one, other in zip(theirs, ours, strict=True):
        assert one.shape == other.shape
        assert apart(one.transpose(1, 2), other.transpose(1, 2), rows) <= MOST_APART
