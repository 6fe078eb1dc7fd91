"""New tokens that a GPU quantises as it appends them are stored as a CPU stores them."""

from typing import Any

import pytest
import torch

import heedful.torch as heedful
from heedful.core.registry.by_hand import forced
from support.captures import graph_capture

pytestmark = pytest.mark.gpu

BATCH, CAPACITY, NEW, DIM = 3, 48, 4, 128
STORED = ("int4", "int8", "float8_e4m3fn", "float8_e5m2")


def case(storage: str, group: int, shifted: bool, page_size: int) -> dict[str, Any]:
    """A cache on the CPU, and tokens of a sequence that is absent, one with room, one without."""
    torch.manual_seed(0)
    rows = (BATCH * CAPACITY // page_size, page_size) if page_size else (BATCH, CAPACITY)
    x = {"q": torch.randn(BATCH, NEW, 8, DIM, dtype=torch.bfloat16)}
    for name in "kv":
        values = torch.randn(*rows, 2, DIM)
        stored, scale, shift = heedful.quantize_kv(values, storage, group or DIM, shifted)
        x |= {name: torch.randn(BATCH, NEW, 2, DIM, dtype=torch.bfloat16), f"{name}_cache": stored}
        x[f"{name}_descale"] = scale if group else torch.rand(BATCH, 2) + 0.1
        if shifted and shift is not None:
            x[f"{name}_shift"] = shift if group else torch.randn(BATCH, 2)
    x["cache_seqlens"] = torch.tensor([-1, 7, CAPACITY - 2], dtype=torch.int32)
    if page_size:
        table = torch.randperm(rows[0]).int().view(BATCH, -1)
        x["block_table"] = table
    return x


def on_gpu(x: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.cuda() for name, tensor in x.items()}


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8))


def appended(name: str) -> bool:
    return name.endswith(("_cache", "_descale", "_shift"))


@pytest.mark.parametrize("page_size", [0, 16])
# No kernel for a GPU takes a shift of a head.
@pytest.mark.parametrize(
    "group, shifted", [(0, False), (32, False), (32, True), (DIM, False), (DIM, True)]
)
@pytest.mark.parametrize("storage", STORED)
def test_caches_and_scales_are_those_of_the_cpu_and_attention_reads_them(
    storage, group, shifted, page_size
):
    x = case(storage, group, shifted, page_size)
    x["cache_seqlens"][2] = CAPACITY - NEW
    given = on_gpu(x)
    out = heedful.flash_attn_with_kvcache(**given, causal=True)
    heedful.flash_attn_with_kvcache(**x, causal=True)
    for name in filter(appended, x):
        assert equal(given[name], x[name]), name
    lengths = given["cache_seqlens"]
    reads = {name: t for name, t in given.items() if name not in ("k", "v")}
    reads["cache_seqlens"] = torch.where(lengths < 0, lengths, lengths + NEW)
    assert torch.equal(heedful.flash_attn_with_kvcache(**reads, causal=True), out)


def test_what_has_no_room_is_not_written():
    x = case("int8", DIM, True, 0)
    given, room = on_gpu(x), 2
    heedful.flash_attn_with_kvcache(**given, causal=True)
    for name in filter(appended, x):
        got, was = given[name].cpu(), x[name]
        assert torch.equal(got[0], was[0]), name
        assert torch.equal(got[2, :-room], was[2, :-room])
        assert not torch.equal(got[2, -room:], was[2, -room:])


def test_a_replayed_graph_quantises_anew():
    x = on_gpu(case("int8", 32, True, 16))
    x["cache_seqlens"].fill_(3)
    heedful.flash_attn_with_kvcache(**x, causal=True)
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        out = heedful.flash_attn_with_kvcache(**x, causal=True)
    for length in (0, 11, 40):
        for name in ("q", "k", "v"):
            x[name].copy_(torch.randn_like(x[name]))
        x["cache_seqlens"].fill_(length)
        graph.replay()
        kept = {name: x[name].clone() for name in filter(appended, x)}
        assert torch.equal(heedful.flash_attn_with_kvcache(**x, causal=True), out)
        assert all(torch.equal(x[name], kept[name]) for name in kept)


@pytest.mark.parametrize("storage", ["int4", "int8"])
def test_rotated_keys_are_at_most_a_step_from_those_of_the_cpu(storage):
    """A rotation may be rounded once less: its value lies by a rounding elsewhere."""
    x = case(storage, 0, False, 0)
    x["cache_seqlens"].fill_(5)
    x |= {name: torch.randn(CAPACITY, DIM // 4).bfloat16() for name in ("rotary_cos", "rotary_sin")}
    given = on_gpu(x)
    heedful.flash_attn_with_kvcache(**given, causal=True)
    heedful.flash_attn_with_kvcache(**x, causal=True)
    ones = torch.ones(BATCH, CAPACITY, 2, 1)
    got, want = (heedful.dequantize_kv(c["k_cache"].cpu(), ones) for c in (given, x))
    assert (got - want).abs().max() <= 1
    assert equal(given["v_cache"], x["v_cache"])


def latent_case(page_size: int, heads: int) -> dict[str, Any]:
    """Rows of latent vectors and new ones: of a sequence that is absent, one with room, one
    without."""
    torch.manual_seed(0)
    rows = (BATCH * CAPACITY // page_size, page_size) if page_size else (BATCH, CAPACITY)
    new = 3 * torch.randn(BATCH, NEW, 1, 576, dtype=torch.bfloat16)
    new[1, 2, :, 128:256] = 0
    x = {"q": torch.randn(BATCH, NEW, heads, 576, dtype=torch.bfloat16)}
    x |= {"k": new, "v": new[..., :512]}
    x |= {"k_cache": heedful.pack_latent(torch.randn(*rows, 1, 576))}
    x["cache_seqlens"] = torch.tensor([-1, 7, CAPACITY - NEW], dtype=torch.int32)
    if page_size:
        x["block_table"] = torch.randperm(rows[0]).int().view(BATCH, -1)
    return x


@pytest.mark.parametrize("backend", [None, "decode/portable"])
@pytest.mark.parametrize("heads", [4, 32])
@pytest.mark.parametrize("page_size", [0, 16])
def test_new_rows_of_latent_vectors_are_those_of_pack_latent(page_size, heads, backend):
    x = latent_case(page_size, heads)
    given, rows = on_gpu(x), x["k_cache"].clone()
    out = heedful.flash_attn_with_kvcache(
        **given, v_cache=given["k_cache"], causal=True, backend=forced(backend) if backend else None
    )
    packed = heedful.pack_latent(x["k"])
    for b, start in enumerate(x["cache_seqlens"].tolist()):
        for at in range(start, start + NEW if start >= 0 else start):
            entry, row = (b, at)
            if page_size:
                entry, row = x["block_table"][b, at // page_size], at % page_size
            rows[entry, row] = packed[b, at - start]
    assert torch.equal(given["k_cache"].cpu(), rows)
    want = heedful.flash_attn_with_kvcache(**x, v_cache=x["k_cache"], causal=True)
    assert torch.equal(x["k_cache"], rows)
    assert (out.cpu().float() - want.float()).abs().max() <= 0.02 * want.float().abs().max()
