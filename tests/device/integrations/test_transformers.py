"""Models of transformers on a GPU equal themselves with eager attention, in float32: as they read,
learn and generate, also with caches that live on the host in between. Layers never wait."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

hf = pytest.importorskip("transformers")

import heedful  # noqa: E402
from heedful.integrations import transformers as plug_in  # noqa: E402
from heedful.integrations.transformers.attention import attention  # noqa: E402
from support.integrations.language_models import (  # noqa: E402
    BATCH,
    FAMILIES,
    model,
    packed,
    padded_left,
    tokens,
)
from support.integrations.other_models import families, first_output, take  # noqa: E402

pytestmark = pytest.mark.gpu

# As on a CPU: both round differently.
MOST_APART, MOST_GRADIENTS_APART = 2e-5, {"language": 2e-4, "other": 5e-4}
CALLS = [(family, call) for family, each in families().items() for call in each.calls]


@pytest.fixture(autouse=True)
def registered(monkeypatch) -> Iterator[None]:
    # Convolutions of 10 bits would make rounding errors a thousand times as large.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    plug_in.register()
    plug_in.reset_paths()
    yield
    plug_in.unregister()


def on_gpu(given: Any) -> Any:
    return tree_map(lambda x: x.cuda() if isinstance(x, Tensor) else x, given)


def both(made, run: Callable[[], Any]) -> list:
    """What run() gives with eager attention, and with heedful."""
    found = []
    for name in ("eager", "heedful"):
        take(made, name)
        plug_in.reset_paths()
        found.append(run())
    assert plug_in.paths()
    return found


def gradients(made, run: Callable[[], Any]) -> dict[str, Tensor]:
    """Of every parameter, of a scalar that run() computes."""
    made.train()
    made.zero_grad()
    torch.manual_seed(3)
    run().backward()
    return {n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None}


def near(one: dict[str, Tensor], other: dict[str, Tensor], most: float) -> None:
    assert one.keys() == other.keys()
    # Of parameters that hardly matter, what is left of rounding.
    floor = 1e-3 * max(float(each.abs().max()) for each in one.values())
    for name, each in one.items():
        apart = float((each - other[name]).abs().max())
        assert apart <= most * (float(each.abs().max()) + floor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_language_model_reads_and_learns_as_with_eager(family):
    made: Any = model(family).cuda()
    mask = padded_left()
    given = on_gpu({"input_ids": tokens(), "attention_mask": mask})
    with torch.no_grad():
        one, other = both(made, lambda: made(**given).logits)
    assert float((one - other)[mask.bool().cuda()].abs().max()) <= MOST_APART
    labels = tokens().masked_fill(mask == 0, -100)
    labels[1, 4] = labels[2, 9] = -100  # From the last padding token.
    given["labels"] = labels.cuda()

    def run() -> dict[str, Tensor]:
        return gradients(made, lambda: made(**given, use_cache=False).loss)

    first, second = both(made, run)
    near(first, second, MOST_GRADIENTS_APART["language"])


@pytest.mark.parametrize(("family", "call"), CALLS)
def test_another_model_reads_and_learns_as_with_eager(family, call):
    torch.manual_seed(0)
    each = families()[family]
    made: Any = each.make().eval().cuda()
    given, counts = on_gpu(tuple(each.calls[call]))
    with torch.no_grad():
        one, other = both(made, lambda: first_output(made(**given)))
    apart = (one - other).abs()
    assert float((apart if counts is None else apart[counts]).max()) <= MOST_APART
    weights = torch.randn(one.shape, generator=torch.Generator().manual_seed(7)).cuda()
    if counts is not None:
        weights = weights * counts[..., None]

    def run() -> dict[str, Tensor]:
        return gradients(made, lambda: (first_output(made(**given)) * weights).sum())

    first, second = both(made, run)
    near(first, second, MOST_GRADIENTS_APART["other"])


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_packed_documents_equal_eager(family):
    made, given = model(family).cuda(), on_gpu(packed())
    # For gpt-oss transformers' own eager attention lets documents see each other.
    made.set_attn_implementation("eager")
    lengths = (given["position_ids"][0] == 0).nonzero().flatten().tolist()[1:]
    with torch.no_grad():
        parts = given["input_ids"].tensor_split(lengths, dim=1)
        alone = torch.cat([made(input_ids=each, use_cache=False).logits for each in parts], 1)
        made.set_attn_implementation("heedful")
        together = made(**given, use_cache=False).logits
    assert float((alone - together).abs().max()) <= MOST_APART


CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "offloaded": {"cache_implementation": "offloaded"},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "offloaded static": {"cache_implementation": "offloaded_static", "disable_compile": True},
    "static, compiled": {"cache_implementation": "static"},
}


def generated(made, cache: str) -> Tensor:
    given = on_gpu({"input_ids": tokens(), "attention_mask": padded_left()})
    return made.generate(**given, max_new_tokens=10, do_sample=False, **CACHES[cache])


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_generation_equals_eager_with_each_cache(family, cache):
    if cache == "static, compiled" and family != "llama":
        pytest.skip("one family is compiled")
    if cache == "offloaded static" and family == "mistral":
        pytest.skip("transformers has no such cache where all layers slide: it finds none to fetch")
    made = model(family).cuda()
    assert torch.equal(*both(made, lambda: generated(made, cache)))


@pytest.mark.parametrize("cache", [None, "static"])
def test_layers_wait_for_nothing(cache):
    made = model("llama").cuda()
    made.set_attn_implementation("heedful")
    expected = generated(made, cache or "dynamic")
    steps = []

    def watched(*args, **kwargs):
        steps.append(args[1].shape[2])
        torch.cuda.set_sync_debug_mode("error")
        try:
            return attention(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with mock.patch.dict(hf.AttentionInterface._global_mapping, heedful=watched):
        assert torch.equal(generated(made, cache or "dynamic"), expected)
    layers = made.config.num_hidden_layers
    assert steps == [tokens().shape[1]] * layers + [1] * (9 * layers) and BATCH > 1


@pytest.mark.parametrize("facts", [{}, {"sliding_window": 100}, {"softcap": 20.0}], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_a_layer_that_came_before_gives_what_a_new_one_gives(dim, facts):
    heedful.configure()
    draw = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    q, k, v = leaves = [draw(2, heads, 300, dim).requires_grad_() for heads in (8, 2, 2)]
    dout, module, found, nodes = draw(2, 300, 8, dim), torch.nn.Module(), [], []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(8):
            out, _ = attention(module, q, k, v, None, is_causal=True, **facts)
            nodes.append(type(out.grad_fn).__name__)
            with torch.no_grad():
                again, _ = attention(module, q, k, v, None, is_causal=True, **facts)
            found.append([out, again, *torch.autograd.grad(out, leaves, dout)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert nodes[0] == "AttentionBackward" and nodes[-1] == "HeadsFirstBackward"
    for results in found:
        for one, first in zip(results, found[0], strict=True):
            assert torch.equal(one, first) and one.stride() == first.stride()
