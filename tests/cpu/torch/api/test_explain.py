"""`explain` says what a call would do: of each attention function, in each of its forms, it shows
the plan that the call itself makes, and runs nothing for it."""

import math
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import heedful.torch as typed
from heedful.core.base import settings
from heedful.core.planning.plan import explain as words
from heedful.torch.eager import backends
from heedful.torch.eager.calls import CALLS
from support.runs import standin

heedful: Any = typed


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rows(*shape: int, grad: bool = False, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, requires_grad=grad).to(dtype)


def off_by_one(*shape: int) -> torch.Tensor:
    """At an address that is no multiple of 16 bytes."""
    return torch.zeros(math.prod(shape) + 1)[1:].view(shape)


BOUNDS = {"cu_seqlens_q": ints(0, 2, 5), "cu_seqlens_k": ints(0, 3, 7)}
LENGTHS = {"max_seqlen_q": 3, "max_seqlen_k": 4}
CACHE = {"q": rows(2, 1, 4, 16), "k_cache": rows(2, 12, 2, 16), "v_cache": rows(2, 12, 2, 8)}
NEW = {"k": rows(2, 1, 2, 16), "v": rows(2, 1, 2, 8), "cache_seqlens": ints(3, 9)}
TABLES = {"rotary_cos": rows(16, 4), "rotary_sin": rows(16, 4)}
DENSE = {"q": rows(2, 5, 4, 16), "k": rows(2, 7, 2, 16), "v": rows(2, 7, 2, 8)}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("flash_attn_func", DENSE),
    ("flash_attn_func", {**DENSE, "causal": True, "return_lse": True, "sink": torch.zeros(4)}),
    ("flash_attn_func", {**DENSE, "q": rows(2, 5, 4, 16, grad=True), "bias": rows(5, 7)}),
    ("flash_attn_func", {**DENSE, "bias": rows(5, 7, grad=True), "softcap": 3}),
    ("flash_attn_func", {**DENSE, "q": rows(2, 5, 16, 4).mT, "window_size": [3, 1]}),
    ("flash_attn_func", {**DENSE, "dropout_p": 0.5, "dropout_seed": torch.tensor(5)}),
    ("flash_attn_func", {**DENSE, "out": torch.zeros(2, 5, 4, 8), "num_splits": 2}),
    ("flash_attn_func", {**DENSE, "backend": "sdpa", "v": rows(2, 7, 2, 16)}),
    (
        "flash_attn_varlen_func",
        {"q": rows(5, 4, 16), "k": rows(7, 2, 16), "v": rows(7, 2, 8), **BOUNDS, **LENGTHS},
    ),
    (
        "flash_attn_varlen_func",
        {
            **{"q": rows(5, 4, 16), "k": rows(5, 4, 2, 16), "v": rows(5, 4, 2, 8)},
            **{**BOUNDS, "cu_seqlens_k": None, "seqused_k": ints(3, 4)},
            **{"max_seqlen_q": torch.tensor(3), "max_seqlen_k": torch.tensor(4)},
            "block_table": ints(1, 3).view(2, 1),
        },
    ),
    ("flash_attn_qkvpacked_func", {"qkv": rows(2, 5, 3, 4, 16), "causal": True}),
    ("flash_attn_kvpacked_func", {"q": rows(2, 5, 4, 16), "kv": rows(2, 7, 2, 2, 16)}),
    (
        "flash_attn_varlen_qkvpacked_func",
        {"qkv": rows(5, 3, 4, 16), "cu_seqlens": ints(0, 2, 5), "max_seqlen": 3, "sink": rows(4)},
    ),
    (
        "flash_attn_varlen_kvpacked_func",
        {"q": rows(5, 4, 16), "kv": rows(7, 2, 2, 16), **BOUNDS, **LENGTHS},
    ),
    ("flash_attn_with_kvcache", CACHE),
    ("flash_attn_with_kvcache", {**CACHE, "cache_seqlens": 5, "causal": True}),
    ("flash_attn_with_kvcache", {**CACHE, "cache_seqlens": torch.tensor(5), "num_splits": 2}),
    ("flash_attn_with_kvcache", {**CACHE, **NEW, "return_softmax_lse": True}),
    ("flash_attn_with_kvcache", {**CACHE, **NEW, **TABLES, "q": rows(2, 1, 16, 4).mT}),
    (
        "flash_attn_with_kvcache",
        {**CACHE, **NEW, "shared_prefix": (rows(4, 2, 16), rows(4, 2, 8)), "sink": torch.zeros(4)},
    ),
    ("flash_attn_func", {**DENSE, "out": off_by_one(2, 5, 4, 8)}),
    ("flash_attn_with_kvcache", {**CACHE, "out": off_by_one(2, 1, 4, 8)}),
    (
        "flash_attn_with_kvcache",
        {
            **{**CACHE, "out": off_by_one(2, 1, 4, 8)},
            "shared_prefix": (rows(4, 2, 16), rows(4, 2, 8)),
        },
    ),
]
IDS = [f"{name}-{number}" for number, (name, _) in enumerate(CASES)]


def of_the_call(function, arguments: dict[str, Any], monkeypatch) -> str:
    """The plan that is made first where the call is run."""
    plans, prepare = [], backends.prepare

    def seen(*given):
        runner = prepare(*given)
        plans.append(runner.plan)
        return runner

    CALLS.clear()
    with monkeypatch.context() as patched:
        patched.setattr(backends, "prepare", seen)
        function(**arguments)
    return words(plans[0])


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=IDS)
def test_what_is_explained_is_the_plan_of_the_call(name, arguments, monkeypatch):
    function = getattr(heedful, name)
    text = heedful.explain(function, **arguments)
    assert text == of_the_call(function, arguments, monkeypatch)


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=IDS)
def test_nothing_is_run_or_kept_for_it(name, arguments, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("ran")

    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    before = [tensor._version for tensor in tensors]
    CALLS.clear()
    monkeypatch.setattr(backends, "prepare", refuse)
    heedful.explain(getattr(heedful, name), **arguments)
    assert len(CALLS) == 0 and [tensor._version for tensor in tensors] == before


HALF = {n: t.half() for n, t in {**CACHE, **NEW}.items() if n in ("q", "k", "v")}
EIGHT = {n: torch.zeros(2, 12, 2, 16, dtype=torch.int8) for n in ("k_cache", "v_cache")}
EIGHT |= {n: torch.ones(2, 2) for n in ("k_descale", "v_descale")}


@pytest.mark.parametrize(
    ("name", "arguments", "dtype"),
    [
        ("flash_attn_func", DENSE, "bfloat16"),
        ("flash_attn_with_kvcache", {**CACHE, "q": HALF["q"]}, "float32"),
        ("flash_attn_with_kvcache", {**CACHE, **NEW, **HALF}, "float32"),
        ("flash_attn_with_kvcache", {**CACHE, **EIGHT}, "bfloat16"),
    ],
)
def test_autocast_is_part_of_the_plan(name, arguments, dtype, monkeypatch):
    function = getattr(heedful, name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        text = heedful.explain(function, **arguments)
        assert text == of_the_call(function, arguments, monkeypatch)
    assert dtype in text


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_autocast_leaves_8_bits_and_its_own_dtype_alone(dtype):
    """Strides too: of rows that lie apart."""
    x = torch.zeros(1, 9, 2, 32).to(dtype)[..., :16]
    text = heedful.explain(heedful.flash_attn_func, x, x, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert heedful.explain(heedful.flash_attn_func, x, x, x) == text


@pytest.mark.parametrize(("name", "arguments"), CASES[:4] + CASES[14:18], ids=IDS[:4] + IDS[14:18])
def test_fake_tensors_are_explained_as_aligned_ones(name, arguments):
    function = getattr(heedful, name)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {
            key: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for key, value in arguments.items()
        }
    assert heedful.explain(function, **fake) == heedful.explain(function, **arguments)


def test_mapped_tensors_are_explained_as_aligned_ones_of_their_elements():
    said = []

    def call(q: torch.Tensor) -> torch.Tensor:
        said.append(heedful.explain(heedful.flash_attn_func, q, q, q))
        return q

    x = torch.zeros(3, 2, 9, 4, 16)
    torch.func.vmap(call)(x)
    assert said == [heedful.explain(heedful.flash_attn_func, x[0], x[0], x[0])]


def test_a_mask_without_values_is_not_read():
    q = rows(1, 9, 2, 16)
    ranges = torch.zeros(1, 1, 9, 2, dtype=torch.int32)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(ranges)
    with pytest.raises(ValueError, match="^values must be False where key_ranges has no values"):
        heedful.explain(heedful.flash_attn_func, q, q, q, key_ranges=fake, values=True)
    assert heedful.explain(heedful.flash_attn_func, q, q, q, key_ranges=fake)


def test_what_no_device_would_run_is_refused_as_in_the_call():
    with pytest.raises(ValueError, match="^q must be on a CPU, CUDA or ROCm device, got meta"):
        heedful.explain(heedful.flash_attn_func, *(torch.empty(1, 5, 2, 8, device="meta"),) * 3)
    with pytest.raises(TypeError, match="missing a required argument: 'v'"):
        heedful.explain(heedful.flash_attn_func, DENSE["q"], DENSE["k"])
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such'"):
        heedful.explain(heedful.flash_attn_qkvpacked_func, rows(2, 5, 3, 4, 16), no_such=1)
    for bad, name in (({"q": None}, "q"), ({"causal": 1}, "causal"), ({"v": rows(2, 7, 2)}, "v")):
        with pytest.raises((TypeError, ValueError), match=f"^{name} must be"):
            heedful.explain(heedful.flash_attn_func, **{**DENSE, **bad})
    slopes = torch.zeros(4, requires_grad=True)
    with pytest.raises(ValueError, match="^alibi_slopes must not require a gradient"):
        grad = {**DENSE, "q": rows(2, 5, 4, 16, grad=True), "alibi_slopes": slopes}
        heedful.explain(heedful.flash_attn_func, **grad)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cache_seqlens": 13}, "cache_seqlens must lie between 0 and 12"),
        ({**NEW, "cache_seqlens": 12}, "cache_seqlens must lie between 0 and 11"),
        (
            {**NEW, **TABLES, "q": rows(2, 9, 4, 16), "cache_seqlens": 8, "causal": True},
            "rotary_cos must have a row for each of the queries' 17 positions, got 16",
        ),
        ({"q": None, "cache_seqlens": torch.tensor(5)}, "q must be a torch.Tensor"),
    ],
)
def test_what_a_step_over_a_cache_would_refuse_is_refused(changes, words):
    for function in (heedful.explain, lambda call, **given: call(**given)):
        with pytest.raises((TypeError, ValueError), match=f"^{words}"):
            function(heedful.flash_attn_with_kvcache, **{**CACHE, **changes})
    if "q" in changes and "rotary_cos" in changes:
        heedful.explain(heedful.flash_attn_with_kvcache, **{**CACHE, **changes, "cache_seqlens": 7})


@pytest.mark.parametrize("name", ["decode+programs=3", "hopper+draws=1", "decode/portable"])
def test_a_call_names_a_backend_without_options_and_variants(name):
    q = torch.zeros(1, 5, 2, 64).half()
    with standin.gpu("H200"):
        for call in (partial(heedful.explain, heedful.flash_attn_func), heedful.flash_attn_func):
            with pytest.raises(ValueError, match=re.escape(f"None, got {name!r}")):
                call(q, q, q, backend=name)


def test_an_alias_is_explained_as_the_variant_that_it_stands_for():
    q, cache = torch.zeros(2, 1, 8, 64).half(), torch.zeros(2, 900, 2, 64).half()
    given = heedful.flash_attn_with_kvcache, q, cache, cache
    with standin.gpu("H200"):
        assert "forward   decode/hopper" in heedful.explain(*given, backend="hopper_decode")
        assert "forward   decode/hopper" in heedful.explain(*given, backend="decode")
        settings.configure(backend="hopper_decode")
        try:
            assert "forward   decode/hopper" in heedful.explain(*given)
        finally:
            settings.configure(backend=None)


def test_values_that_lie_in_keys_are_explained_as_such():
    latent, q = torch.zeros(2, 64, 1, 576).half(), torch.zeros(2, 1, 32, 576).half()
    apart = latent[..., :512].clone()
    with standin.gpu("H200"):
        call = heedful.flash_attn_with_kvcache
        assert "forward   decode/mla_swap_ab" in heedful.explain(call, q, latent, latent[..., :512])
        assert "forward   portable" in heedful.explain(call, q, latent, apart)
    with standin.gpu("B200"):
        assert "forward   decode/portable" in heedful.explain(call, q, latent, latent[..., :512])


@pytest.mark.parametrize(
    ("offset", "dtype"), [(0, torch.float16), (1, torch.float16), (0, torch.float8_e4m3fn)]
)
def test_a_step_into_an_output_is_planned_for_where_it_begins_and_its_dtype(
    offset, dtype, monkeypatch
):
    q, cache = torch.zeros(1, 128, 4, 128).to(dtype), torch.zeros(1, 512, 2, 128).to(dtype)
    out = torch.zeros(q.numel() + 1, dtype=torch.float16)[offset:][: q.numel()].view(q.shape)
    given = {"q": q, "k_cache": cache, "v_cache": cache.clone(), "out": out}
    with standin.gpu("H200"):
        text = heedful.explain(heedful.flash_attn_with_kvcache, **given)
        assert text == of_the_call(heedful.flash_attn_with_kvcache, given, monkeypatch)
    assert ("aligned=False" in text) == bool(offset)
    assert ("does not take bases or strides off 16 bytes" in text) == bool(offset)


FEW = {name: rows(2, 3, heads, 64).half() for name, heads in (("q", 4), ("k", 2), ("v", 2))}
STEP: dict[str, Any] = {
    **FEW,
    **{f"{name}_cache": rows(2, 128, 2, 64).half() for name in "kv"},
    **{name: rows(256, 32).half() for name in TABLES},
    **{"cache_seqlens": ints(3, 9), "causal": True},
}
PREFIX = {"shared_prefix": (rows(4, 2, 64).half(), rows(4, 2, 64).half())}
MANY = {name: rows(2, 90, *x.shape[2:]).half() for name, x in FEW.items()}
EMPTY = {name: FEW[name][:, :0] for name in "kv"}


@pytest.mark.parametrize(
    ("changes", "launches", "line"),
    [
        ({}, 1, "update    within the decode/hopper kernel"),
        (EMPTY, 2, "update    a launch ahead: no new keys come"),
        (MANY, 2, "update    a launch ahead: hopper/forward does not append"),
        (PREFIX, None, "update    a launch ahead: a shared prefix wants the rotated queries"),
        ({"k": None, "v": None} | dict.fromkeys(TABLES), 1, None),
    ],
    ids=["step", "no new keys", "many queries", "prefix", "no update"],
)
def test_where_a_call_appends_is_explained_as_it_is_launched(changes, launches, line):
    arguments = {**STEP, **changes}
    with standin.gpu("H200") as gpu:
        text = heedful.explain(heedful.flash_attn_with_kvcache, **arguments)
        heedful.flash_attn_with_kvcache(**arguments)
    assert [found for found in text.splitlines() if found.startswith("update")] == [line] * bool(
        line
    )
    assert launches in (None, len(gpu.launches))


def test_a_cpu_that_appends_launches_nothing_and_says_nothing_of_it():
    assert "update" not in heedful.explain(heedful.flash_attn_with_kvcache, **CACHE, **NEW)
