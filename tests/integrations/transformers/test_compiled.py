"""Models that are compiled as one graph."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from support.integrations.language_models import (
    COMMON,
    FAMILIES,
    model,
    padded_left,
    tokens,
)
from support.integrations.other_models import families, first_output, take
from support.problems.grids import slow_but

MOST_APART = 2e-5
# The others take a minute.
SAMPLE = ("llama",)
LANGUAGE = [
    family if family in SAMPLE else pytest.param(family, marks=pytest.mark.slow)
    for family in FAMILIES
]
# Transformers' own code there reads lengths of images, which a graph cannot.
NO_GRAPH = {"qwen2_vl"}
OTHERS = [
    (family, call)
    for family, each in families().items()
    for call in each.calls
    if family not in NO_GRAPH
]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(made):
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(made.forward, fullgraph=True, backend=counter), counter


@pytest.mark.parametrize("padding", slow_but({"left"}, ["none", "left"]))
@pytest.mark.parametrize("family", LANGUAGE)
def test_a_compiled_forward_is_one_graph_and_equals_eager(family, padding):
    made, given = model(family), {"input_ids": tokens(), "use_cache": False}
    if padding == "left":
        given["attention_mask"] = padded_left()
    made.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = made(**given).logits
        made.set_attn_implementation("heedful")
        forward, counter = compiled(made)
        found = forward(**given).logits
    rows = given.get("attention_mask", torch.ones_like(tokens())).bool()
    assert float((found - wanted).abs()[rows].max()) <= MOST_APART
    assert counter.frame_count == 1


@pytest.mark.parametrize("family", LANGUAGE)
def test_compiled_steps_over_a_static_cache_are_two_graphs(family):
    made, given = model(family), {"input_ids": tokens(), "attention_mask": padded_left()}
    how = {"max_new_tokens": 6, "do_sample": False}
    made.set_attn_implementation("eager")
    static = {"cache_implementation": "static", "disable_compile": True}
    try:
        wanted = made.generate(**given, **how, **static)
    except TypeError as error:
        pytest.skip(f"this transformers does not: {error}")
    made.set_attn_implementation("heedful")
    forward = made.forward
    made.forward, counter = compiled(made)
    try:
        found = made.generate(**given, **how, **static)
    finally:
        made.forward = forward
    assert torch.equal(found, wanted)
    assert counter.frame_count <= 2


def test_compiled_training_of_packed_documents_is_one_graph_without_a_mask_of_tokens_x_tokens():
    length = 509  # No other size of the model.
    made = hf.LlamaForCausalLM(hf.LlamaConfig(**{**COMMON, "max_position_embeddings": 600}))
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 99, (1, length), generator=drawn)
    positions = torch.cat([torch.arange(n) for n in (100, 200, 1, 208)])[None]
    given = {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False}
    made.set_attn_implementation("eager")
    loss: Any = made(**given).loss
    loss.backward()
    wanted = {n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None}
    made.zero_grad()
    made.set_attn_implementation("heedful")
    squares: list[str] = []
    graphs: list[int] = []

    def watching(graph, inputs):
        graphs.append(1)
        for node in graph.graph.nodes:
            value = node.meta.get("example_value")
            if isinstance(value, Tensor) and tuple(value.shape).count(length) > 1:
                squares.append(str(node))
        return graph.forward

    loss = torch.compile(made.forward, fullgraph=True, backend=watching)(**given).loss
    loss.backward()
    assert graphs == [1] and squares == []
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None
        most = 2e-4 * (float(wanted[name].abs().max()) + 1e-6)
        assert float((parameter.grad - wanted[name]).abs().max()) <= most, name


def test_compiled_code_refuses_a_mask_with_holes():
    made = model("llama")
    made.set_attn_implementation("heedful")
    mask = padded_left()
    mask[0, 5] = 0
    forward, _ = compiled(made)
    with torch.no_grad(), pytest.raises(RuntimeError, match="no attention_mask with holes"):
        forward(input_ids=tokens(), attention_mask=mask, use_cache=False)


def test_an_exported_model_equals_the_model():
    made, given = model("llama"), {"input_ids": tokens(), "use_cache": False}
    made.set_attn_implementation("heedful")
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    exported = torch.export.export(made, (), given, strict=False).module()
    with torch.no_grad():
        difference = exported(**given).logits - made(**given).logits
    assert float(difference.abs().max()) <= MOST_APART


@pytest.mark.slow
@pytest.mark.parametrize(("family", "call"), OTHERS)
def test_other_models_compiled_equal_eager(family, call):
    torch.manual_seed(0)
    each = families()[family]
    made, (given, counts) = each.make().eval(), each.calls[call]
    take(made, "eager")
    with torch.no_grad():
        wanted = first_output(made(**given))
        take(made, "heedful")
        forward, counter = compiled(made)
        difference = (first_output(forward(**given)) - wanted).abs()
    assert float((difference if counts is None else difference[counts]).max()) <= MOST_APART
    assert counter.frame_count == 1
