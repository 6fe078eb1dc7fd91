"""Requests that an engine serves over the plug-in's classes, and the judgement of its logits."""

import random
from functools import cache
from typing import Any

import torch

from heedful.reference.budget import Error, over_budget
from support.integrations.engine import Engine, Request
from support.integrations.tiny_model import Facts, Model
from support.integrations.vllm_layers import LatentStep, PlainStep, configured

# Prompts, and how many tokens follow.
_LENGTHS = ((3, 9), (30, 7), (14, 12), (1, 9), (45, 5))


@cache
def continued(facts: Facts) -> list[tuple[int, list[int]]]:
    """Sequences of several lengths as the model continues them, and how long their prompts are."""
    draws, found, model = random.Random(0), [], Model.drawn(facts)
    for prompt, more in _LENGTHS:
        tokens = [draws.randrange(60) for _ in range(prompt)]
        found.append((prompt, model.continued(tokens, prompt + more)))
    return found


def served(facts: Facts, where: tuple, layers: Any, **how: Any) -> Engine:
    """An engine that has served all requests. where: the model's device and dtype.

    All logits are within the budget: twice what the eager model of this dtype errs, and one
    rounding. Each sequence is judged by its own tokens: in 16 bits another may be the likeliest.
    """
    device, dtype = where
    exact = Model.drawn(facts).to(device)
    model = exact.to(dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # As vLLM does while it makes layers.
    try:
        engine = Engine(model, layers, **how)
    finally:
        torch.set_default_dtype(before)
    given = [Request(tokens[:prompt], tokens) for prompt, tokens in continued(facts)]
    engine.run(given)
    if dtype == torch.float32:
        assert [r.tokens for r in given] == [r.continued for r in given]
    judged, worst = [], Error(0.0, 0.0)
    for request in given:
        tokens = request.tokens[:-1]
        assert sorted(request.logits) == list(range(len(tokens)))
        got = torch.stack([request.logits[n] for n in range(len(tokens))]).double().cpu().numpy()
        want = exact.dense(tokens).cpu().numpy()
        judged.append((got, want))
        for twin in model.ways():
            worst = worst.worst(Error.between(twin.dense(tokens).double().cpu().numpy(), want))
    for got, want in judged:
        wrong = over_budget("out", got, want, worst, str(dtype).removeprefix("torch."))
        assert not wrong, wrong
    return engine


def plain(
    vllm: dict, layout: str = "LBHNC", mode: str = "FULL_AND_PIECEWISE", captures: bool = False
) -> Any:
    """A function that makes the layers of an engine. vllm: the package's modules. layout, mode:
    names of vLLM's. captures: whether one graph runs all steps."""
    from heedful.integrations.vllm.backend import HeedfulBackend

    common = vllm["vllm.v1.attention.backend"].CommonAttentionMetadata
    modes = vllm["vllm.config.compilation"].CUDAGraphMode
    order = vllm["vllm.v1.kv_cache_layout"].KVCacheLayout[layout].value
    config = configured(modes[mode])
    return lambda engine: PlainStep(engine, HeedfulBackend, common, config, order, captures)


def latent(vllm: dict) -> Any:
    """The same of latent attention."""
    from heedful.integrations.vllm.mla import HeedfulMLABackend, HeedfulMLAPrefill

    common = vllm["vllm.v1.attention.backend"].CommonAttentionMetadata
    return lambda engine: LatentStep(engine, HeedfulMLABackend, common, None, HeedfulMLAPrefill)
