"""New tokens that come as values into a quantised cache are stored as a caller would store them."""

from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from heedful import dequantize_kv, flash_attn_with_kvcache, quantize_kv
from heedful.torch.eager.cache_update import rotate

BATCH, CAPACITY, NEW, DIM = 2, 24, 3, 32
STORED = ("int4", "int8", "float8_e4m3fn", "float8_e5m2")
START = torch.tensor([5, 11], dtype=torch.int32)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step(seed: int = 0) -> dict[str, Any]:
    """Queries, new tokens and rotary tables."""
    shapes = {"q": (BATCH, NEW, 4, DIM), "k": (BATCH, NEW, 2, DIM), "v": (BATCH, NEW, 2, DIM)}
    shapes |= {"rotary_cos": (CAPACITY, 8), "rotary_sin": (CAPACITY, 8)}
    return {name: drawn(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}


def grouped(storage: str, group: int, shifted: bool) -> dict[str, Any]:
    x: dict[str, Any] = {}
    for seed, name in enumerate("kv"):
        values = drawn(BATCH, CAPACITY, 2, DIM, seed=10 + seed)
        stored, scale, shift = quantize_kv(values, storage, group, shifted)
        x |= {f"{name}_cache": stored, f"{name}_descale": scale, f"{name}_shift": shift}
    return x


def copied(x: dict[str, Any]) -> dict[str, Any]:
    return {name: t if t is None else t.clone() for name, t in x.items()}


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def with_place(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    for b, start in enumerate(START.tolist()):
        tensor[b, start : start + NEW] = rows[b]
    return tensor


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("group", [8, DIM])
@pytest.mark.parametrize("storage", STORED)
def test_groups_are_stored_with_their_scales_as_quantize_kv_stores_them(storage, group, shifted):
    """With rotary: as if keys had been rotated before."""
    x, new = grouped(storage, group, shifted), step()
    got, want = copied(x), copied(x)
    out = flash_attn_with_kvcache(**new, **got, cache_seqlens=START, causal=True)
    turned = rotate(new["k"], new["rotary_cos"], new["rotary_sin"], START, True)
    for name, values in (("k", turned), ("v", new["v"])):
        parts = quantize_kv(values, storage, group, shifted)
        for kind, part in zip(("cache", "descale", "shift"), parts, strict=True):
            if part is not None:
                whole = with_place(want[f"{name}_{kind}"], part)
                assert equal(got[f"{name}_{kind}"], whole), (name, kind)
    turned_q = rotate(new["q"], new["rotary_cos"], new["rotary_sin"], START, True)
    reads = flash_attn_with_kvcache(turned_q, **want, cache_seqlens=START + NEW, causal=True)
    assert torch.equal(out, reads)


@pytest.mark.parametrize("given", ["none", "one", "heads", "shifted"])
@pytest.mark.parametrize("storage", STORED)
def test_scales_of_heads_are_used_and_not_changed(storage, given):
    """What is read back is the nearest that the storage has: half a step of int8, or a sixteenth of
    a number of e4m3, at most."""
    cache = grouped(storage, DIM, False)
    x = {name: cache[f"{name}_cache"].clone() for name in "kv"}
    scale, shift = {
        "none": (None, None),
        "one": (torch.tensor(0.5), None),
        "heads": (torch.tensor([[0.5, 0.6], [0.7, 0.8]]), None),
        "shifted": (torch.tensor([[0.5, 0.6], [0.7, 0.8]]), torch.full((BATCH, 2), 0.1)),
    }[given]
    scales: dict[str, Any] = {f"{name}_descale": scale for name in "kv"}
    scales |= {f"{name}_shift": shift for name in "kv"}
    kept = copied(scales)
    new = {name: tensor for name, tensor in step().items() if not name.startswith("rotary")}
    flash_attn_with_kvcache(
        new["q"], x["k"], x["v"], new["k"], new["v"], cache_seqlens=START, **scales
    )
    assert all(t is None or torch.equal(t, kept[name]) for name, t in scales.items())
    factor = torch.ones(BATCH, 2) if scale is None else scale.expand(BATCH, 2)
    step_size = {"int4": 1.0, "int8": 1.0}.get(storage)
    most = {"int4": 7.0, "int8": 127.0}.get(storage, torch.inf)
    for b, start in enumerate(START.tolist()):
        stored = x["v"][b, start : start + NEW]
        ones = torch.ones(NEW, 2, 1)
        read = dequantize_kv(stored, ones)
        wanted = new["v"][b] if shift is None else new["v"][b] - shift[b, :, None]
        wanted = (wanted / factor[b, :, None]).clamp(-most, most)
        relative = {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}.get(storage, 0.0)
        least = {"float8_e4m3fn": 2**-10, "float8_e5m2": 2**-17}.get(storage, 0.0)
        bound = 0.5 * step_size if step_size else wanted.abs() * relative + least
        assert ((read - wanted).abs() <= bound + 1e-6).all()


def test_values_that_come_stored_are_stored_as_they_are():
    x, new = grouped("int8", DIM, False), step()
    got = copied(x)
    tokens: dict[str, Any] = {name: quantize_kv(new[name], "int8")[0] for name in "kv"}
    flash_attn_with_kvcache(new["q"], **got, **tokens, cache_seqlens=START)
    assert torch.equal(got["k_cache"], with_place(x["k_cache"].clone(), tokens["k"]))
    assert torch.equal(got["k_descale"], x["k_descale"])


def test_a_compiled_step_stores_what_an_eager_one_stores():
    x, new = grouped("int8", 8, True), step()
    eager, compiled = copied(x), copied(x)
    call = torch.compile(flash_attn_with_kvcache, backend="eager", fullgraph=True)
    want = flash_attn_with_kvcache(**new, **eager, cache_seqlens=START, causal=True)
    got = call(**new, **compiled, cache_seqlens=START, causal=True)
    assert torch.equal(got, want)
    for name in x:
        assert equal(compiled[name], eager[name]), name


def test_pages_and_their_scales_are_written_where_the_table_says():
    pages = torch.tensor([[3, 0, 5], [4, 1, 2]], dtype=torch.int32)
    dense, new = grouped("int4", 8, True), step()
    paged = {}
    for name, tensor in dense.items():
        assert tensor is not None
        whole = torch.empty(6, 8, *tensor.shape[2:], dtype=tensor.dtype)
        for b in range(BATCH):
            for i in range(3):
                whole[pages[b, i]] = tensor[b, 8 * i : 8 * i + 8]
        paged[name] = whole
    want = flash_attn_with_kvcache(**new, **dense, cache_seqlens=START, causal=True)
    got = flash_attn_with_kvcache(
        **new, **paged, cache_seqlens=START, block_table=pages, causal=True
    )
    assert torch.equal(got, want)
    for name, tensor in dense.items():
        for b in range(BATCH):
            read = torch.cat([paged[name][pages[b, i]] for i in range(3)])
            assert equal(read.contiguous(), tensor[b].contiguous()), name


def test_autocast_casts_new_tokens_as_it_casts_queries():
    x = grouped("int8", 8, False)
    new = {name: tensor for name, tensor in step().items() if not name.startswith("rotary")}
    got, want = copied(x), copied(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn_with_kvcache(**new, **got, cache_seqlens=START)
    half = {name: tensor.bfloat16() for name, tensor in new.items()}
    assert torch.equal(out, flash_attn_with_kvcache(**half, **want, cache_seqlens=START))
    assert equal(got["k_cache"], want["k_cache"])


@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.int8])
def test_a_latent_vector_is_stored_once_and_values_are_its_first_columns(storage):
    largest = 448 if storage is torch.float8_e4m3fn else 127
    latents, new = drawn(2, 64, 1, 576, seed=0), drawn(2, 1, 1, 576, seed=1).bfloat16()
    scale = latents.abs().amax() / largest
    before = stored_as(latents / scale, storage)
    scales, lengths = scale.expand(2, 1), torch.tensor([30, 7], dtype=torch.int32)
    q = drawn(2, 1, 4, 576, seed=2).bfloat16()
    attend = partial(flash_attn_with_kvcache, q, causal=True, k_descale=scales, v_descale=scales)
    cache = before.clone()
    values, new_values = cache[..., :512], new[..., :512]
    out = attend(cache, values, k=new, v=new_values, cache_seqlens=lengths)
    wanted = before.clone()
    for sequence, length in enumerate(lengths.tolist()):
        wanted[sequence, length] = stored_as((new[sequence, 0].float() / scale), storage)
    assert torch.equal(cache.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(out, attend(wanted, wanted[..., :512], cache_seqlens=lengths + 1))


def stored_as(numbers: torch.Tensor, storage: torch.dtype) -> torch.Tensor:
    return (numbers if storage.is_floating_point else numbers.round().clamp(-127, 127)).to(storage)
