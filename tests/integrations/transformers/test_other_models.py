"""Encoders, encoder-decoders, vision, audio and mixed models of 18 families equal themselves with
eager attention."""

import pytest
import torch
from torch import Tensor

from heedful.integrations.transformers import paths, reset_paths
from support.integrations.other_models import Call, families, first_output, take

MOST_APART, MOST_GRADIENTS_APART = 2e-5, 5e-4
CALLS = [(family, call) for family, each in families().items() for call in each.calls]
# What a family runs with a mask of queries x keys, and why.
DENSE = {
    "t5": {"dense: a bias of positions"},
    "gemma3_embedding": {"dense: the model adds a mask function of its own"},
    "gemma3_image": {
        "dense: the model adds a mask function of its own",
        "dense: tokens that see each other both ways, or another union of masks",
    },
}


def drawn(family: str, call: str) -> tuple:
    torch.manual_seed(0)
    each = families()[family]
    return each.make().eval(), each.calls[call]


def with_each(made, run) -> list:
    found = []
    for name in ("eager", "heedful"):
        take(made, name)
        reset_paths()
        found.append(run())
    assert paths()
    return found


@pytest.mark.parametrize(("family", "call"), CALLS)
def test_a_forward_equals_eager(family, call):
    made, (given, counts) = drawn(family, call)
    with torch.no_grad():
        one, other = with_each(made, lambda: first_output(made(**given)))
    difference = (one - other).abs()
    assert float((difference if counts is None else difference[counts]).max()) <= MOST_APART
    dense = {way for way in paths() if way.startswith("dense")}
    assert dense <= DENSE.get(family, set())


def gradients(made, call: Call) -> dict[str, Tensor]:
    made.train()
    made.zero_grad()
    torch.manual_seed(3)
    out = first_output(made(**call.arguments))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    if call.counts is not None:
        weights = weights * call.counts[..., None]
    (out * weights).sum().backward()
    return {n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("family", "call"), CALLS)
def test_gradients_equal_eager(family, call):
    made, given = drawn(family, call)
    one, other = with_each(made, lambda: gradients(made, given))
    assert one.keys() == other.keys()
    # Of parameters that hardly matter, what is left of rounding.
    floor = 1e-3 * max(float(each.abs().max()) for each in one.values())
    for name, each in one.items():
        most = MOST_GRADIENTS_APART * (float(each.abs().max()) + floor)
        assert float((each - other[name]).abs().max()) <= most, name


GENERATING = ["t5", "bart", "whisper", "llava", "gemma3_image", "qwen2_vl"]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", GENERATING)
def test_generation_equals_eager(family, cache):
    (call,) = families()[family].calls
    made, (given, _) = drawn(family, call)
    given = {name: value for name, value in given.items() if name != "decoder_input_ids"}
    if cache == "static":
        given.update(cache_implementation="static", disable_compile=True)
    found = with_each(made, lambda: made.generate(**given, max_new_tokens=6, do_sample=False))
    assert torch.equal(*found)
