"""Public calls need no kernel that the wheel's list of problems lacks."""

from itertools import accumulate
from typing import Any

import pytest

pytest.importorskip("triton")

import torch

from heedful import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    pack_latent,
    quantize_kv,
)
from heedful.bench import steps
from heedful.bench.harness import cases
from heedful.core.base.device import by_name
from heedful.core.call.problem import LATENT_ROWS
from heedful.launch import record
from kernel_wheel import problems
from support.listed import Listed
from support.problems.grids import in_turns
from support.runs import standin

H200, H100 = by_name("H200"), by_name("H100")


def some(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, requires_grad=grad)


def trained(batch, tokens, heads_q, heads_k, dim, dim_v=None, **options) -> None:
    rows = ((heads_q, dim), (heads_k, dim), (heads_k, dim_v or dim))
    q, k, v = (some(batch, tokens, *row, grad=True) for row in rows)
    out = flash_attn_func(q, k, v, **options)
    out.backward(torch.zeros_like(out))


def clipped(batch, tokens, heads_q, heads_k, dim) -> None:
    q, k, v = (some(batch, tokens, n, dim, grad=True) for n in (heads_q, heads_k, heads_k))
    out, _ = flash_attn_func(q, k, v, causal=True, return_max_logits=True)
    out.backward(torch.zeros_like(out))


def packed(lengths, heads_q, heads_k, dim, **options) -> None:
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    rows = ((heads_q, dim), (heads_k, dim), (heads_k, dim))
    q, k, v = (some(sum(lengths), *row, grad=True) for row in rows)
    longest = max(lengths)
    out = flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, **options)
    out.backward(torch.zeros_like(out))


def part(*shape: int) -> None:
    q, k, v = (some(*shape) for _ in "qkv")
    flash_attn_func(q, k, v, return_lse=True, out=torch.zeros(shape))


def served(tokens, heads_q, heads_k, dim, page_size, appends=True, **options: Any) -> None:
    storage = (4 * 4096 // page_size, page_size) if page_size else (4, 4096)
    caches = [some(*storage, heads_k, dim) for _ in "kv"]
    if page_size:
        options["block_table"] = torch.zeros(4, 4096 // page_size, dtype=torch.int32)
    if appends:
        options |= {name: some(4, tokens, heads_k, dim) for name in "kv"}
    lengths = torch.full((4,), 100, dtype=torch.int32)
    q = some(4, tokens, heads_q, dim)
    flash_attn_with_kvcache(q, caches[0], caches[1], cache_seqlens=lengths, causal=True, **options)


def rotary(dim: int) -> dict[str, Any]:
    """Tables of a rotation of neighbouring pairs, the default of a call."""
    return {name: some(8192, dim // 2) for name in ("rotary_cos", "rotary_sin")}


def batch(lengths, heads_q, heads_k, dim, page_size, dtype=torch.bfloat16, **options: Any) -> None:
    """Prompts and steps of an engine over one cache."""
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    pages = some(len(lengths) * 4096 // page_size, page_size, heads_k, dim).to(dtype)
    table = torch.zeros(len(lengths), 4096 // page_size, dtype=torch.int32)
    used = torch.full((len(lengths),), 3000, dtype=torch.int32)
    options |= {"block_table": table, "seqused_k": used, "causal": True}
    q = some(sum(lengths), heads_q, dim)
    flash_attn_varlen_func(q, pages, pages.clone(), starts, None, max(lengths), 4096, **options)


CALLS = {
    "Llama trains": lambda: trained(1, 2048, 32, 8, 128, causal=True),
    "Qwen trains, 14 heads over 2": lambda: trained(2, 1000, 14, 2, 64, causal=True),
    "BERT trains": lambda: trained(8, 512, 12, 12, 64),
    "ViT trains": lambda: trained(8, 197, 12, 12, 64),
    "DeepSeek trains": lambda: trained(1, 2048, 16, 16, 192, 128, causal=True),
    "Gemma trains": lambda: trained(1, 2048, 16, 8, 256, causal=True, softcap=50.0),
    "bits repeat": lambda: trained(1, 2048, 32, 8, 128, causal=True, deterministic=True),
    "QK-clip trains": lambda: clipped(1, 2048, 32, 8, 128),
    "head dim 512 trains": lambda: trained(1, 2048, 16, 8, 512, causal=True),
    "head dim 512 decodes": lambda: served(1, 16, 8, 512, 16, appends=False),
    "packed documents train": lambda: packed([700, 1, 1000], 32, 8, 128, causal=True),
    "gpt-oss trains": lambda: packed(
        [700, 300], 64, 8, 64, causal=True, window_size=(127, 0), sink=torch.zeros(64)
    ),
    "Llama decodes": lambda: served(1, 32, 8, 128, 0),
    "GPT-J decodes from pages": lambda: served(1, 32, 8, 128, 16, **rotary(128)),
    "Llama decodes from pages": lambda: served(1, 32, 8, 128, 256),
    "Llama prefills pages": lambda: served(512, 32, 8, 128, 16),
    "an engine decodes from pages": lambda: served(1, 32, 8, 128, 16, appends=False),
    "an engine serves a batch": lambda: batch([1] * 60 + [700], 32, 8, 128, 16),
    "an engine serves an e4m3 cache": lambda: batch(
        [1] * 9 + [50], 32, 8, 128, 16, torch.float8_e4m3fn
    ),
    "an engine serves gpt-oss": lambda: batch(
        [1] * 60 + [700], 64, 8, 64, 16, window_size=(127, 0), sink=torch.zeros(64)
    ),
    "no bit depends on the batch": lambda: trained(
        1, 2048, 32, 8, 128, causal=True, numerics="invariant"
    ),
    "parts of the keys": lambda: part(2, 512, 32, 128),
    "gpt-oss decodes": lambda: served(1, 64, 8, 64, 16, window_size=(127, 0), sink=torch.zeros(64)),
}


@pytest.fixture(scope="module")
def listed() -> Listed:
    return Listed(problems.entries())


@pytest.mark.parametrize(
    "name, device", in_turns(CALLS, [H200, H100]), ids=lambda value: getattr(value, "name", value)
)
def test_calls_of_models_need_no_kernel_that_is_not_listed(name, device, listed, tmp_path):
    with standin.gpu(device.name), record.record(tmp_path / "list"):
        CALLS[name]()
    needed = record.load(tmp_path / "list")
    assert needed and not listed.lacks(needed, device)


@pytest.mark.parametrize("group", ["forward", "backward", "kv_heads", "shapes", "splits", "decode"])
def test_tables_need_no_kernel_that_is_not_listed(group, listed):
    found = [case for case in cases.cases(group) if case.problem.dtype == "bfloat16"]
    directions = ("forward", "backward") if found[0].direction == "backward" else ("forward",)
    entries = [record.Entry(case.problem, way) for case in found for way in directions]
    assert not listed.lacks(entries, H200)


def unwritten(step: steps.Step, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys as a step's cache has them, whose bytes nobody writes: they take no memory."""
    if not step.stored:
        return x, None
    if step.by_head:
        scales = torch.ones(len(step.lengths), x.shape[-2])
        return torch.empty(x.shape, dtype=getattr(torch, step.stored)), scales
    row = torch.ones(1, 1, *x.shape[2:], dtype=x.dtype)
    made = (pack_latent(row),) if step.stored == LATENT_ROWS else quantize_kv(row, step.stored)[:2]
    stored = [torch.empty(*x.shape[:2], *part.shape[2:], dtype=part.dtype) for part in made]
    return stored[0], stored[1] if len(stored) > 1 else None


# What the list leaves out: a page of one key.
STEPS = [step for step in steps.STEPS if step.page != 1]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_steps_need_no_kernel_that_is_not_listed(step, listed, monkeypatch, tmp_path):
    monkeypatch.setattr(steps, "_stored", unwritten)
    monkeypatch.setattr(
        steps.Drawn, "normal", lambda self, *shape: torch.empty(shape, dtype=torch.bfloat16)
    )
    with standin.gpu(H200.name), record.record(tmp_path / "list"):
        steps.heedful(step, steps.draw(step, torch.device("cpu")))()
    assert not listed.lacks(record.load(tmp_path / "list"), H200)


def test_an_unknown_group_is_named_with_those_that_there_are():
    with pytest.raises(ValueError, match="no groups nothing: there are training,.*fp8"):
        problems.entries(["nothing"])
