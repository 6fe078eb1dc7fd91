"""The problems that `heedful validate` runs: a few words of features become tensors.

Small enough that the float64 oracle takes a fraction of a second, long enough for several tiles.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from heedful.core.call.mask import MaskSpec
from heedful.core.call.operands import Operands
from heedful.core.call.problem import AttentionProblem, default_out_dtype

_DTYPES = ("bfloat16", "float16", "float32")
# Each GPU multiplies one of them; its kernels leave the other out.
_FP8 = ("float8_e4m3fn", "float8_e4m3fnuz")


@dataclass(frozen=True)
class Entry:
    """One problem by its features; what is left out is off.

    shape: batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim. head_dim_v: 0 is head_dim.
    facts: fields of AttentionProblem that need no tensor of their own.
    packed: sequences of uneven lengths in one axis. page_size: keys a page, 0 is not paged.
    kv_dtype: "int8" for a quantised cache with a scale per head, which fp8 inputs have always.
    """

    name: str
    shape: tuple[int, int, int, int, int, int] = (2, 290, 450, 4, 2, 128)
    dtype: str = "bfloat16"
    head_dim_v: int = 0
    causal: bool = False
    window: tuple[int, ...] = (-1, -1)
    alibi: bool = False
    bias: bool = False
    sink: bool = False
    packed: bool = False
    page_size: int = 0
    kv_dtype: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Built:
    """An entry's tensors. dout (like out), dlse: incoming gradients, None without a backward."""

    problem: AttentionProblem
    x: Operands
    dout: torch.Tensor | None
    dlse: torch.Tensor | None


def grid(small: bool = False) -> list[Entry]:
    """Features and dtypes; `small` is for a CPU: shorter lengths in float32."""
    entries = _small() if small else _large()
    names = [entry.name for entry in entries]
    assert len(set(names)) == len(names)
    return entries


def _features(base: Entry) -> list[Entry]:
    def but(name: str, **changes) -> Entry:
        return replace(base, name=f"{base.name} {name}", **changes)

    return [
        but("dense"),
        but("causal", causal=True),
        but("window", window=(70, 9)),
        but("softcap", facts={"softcap": 5.0}),
        but("dropout", facts={"dropout_p": 0.2}),
        but("ALiBi", alibi=True, causal=True),
        but("bias", bias=True),
        but("sink", sink=True, causal=True),
        but("packed sequences", packed=True, causal=True),
        but("deterministic", causal=True, facts={"deterministic": True}),
    ]


def _small() -> list[Entry]:
    return _features(Entry("float32", (1, 45, 70, 2, 1, 32), "float32"))


def _large() -> list[Entry]:
    entries = []
    for dtype in _DTYPES:
        base = Entry(dtype, dtype=dtype)
        entries += _features(base)
        for dim in (40, 64, 256):
            shape = (*base.shape[:5], dim)
            entries.append(
                replace(base, name=f"{dtype} causal, head dim {dim}", shape=shape, causal=True)
            )
    for dtype in _FP8:
        for dim in (64, 128):
            base = Entry(f"{dtype}, head dim {dim}", (2, 290, 450, 4, 2, dim), dtype)
            entries += [
                base,
                replace(base, name=f"{base.name}, causal", causal=True),
                replace(base, name=f"{base.name}, packed sequences", packed=True, causal=True),
            ]
    base = Entry("bfloat16")
    decode = (3, 1, 700, 8, 2, 128)
    return [
        *entries,
        replace(
            base, name="more queries than keys, causal", shape=(1, 700, 390, 3, 1, 128), causal=True
        ),
        replace(base, name="head dims 128 and 64", head_dim_v=64),
        replace(base, name="2,000 keys, head dim 64, causal", shape=(1, 500, 2000, 4, 4, 64)),
        replace(base, name="decode", shape=decode),
        replace(base, name="decode in 4 splits", shape=decode, facts={"num_splits": 4}),
        replace(base, name="decode, pages of 16", shape=decode, page_size=16),
        replace(base, name="decode, int8 cache", shape=decode, kv_dtype="int8"),
        replace(
            base,
            name="a prefill and decodes, pages of 16",
            shape=(5, 300, 700, 8, 2, 128),
            packed=True,
            causal=True,
            page_size=16,
        ),
    ]


def build(entry: Entry, device: torch.device, draw: int = 0) -> Built:
    """The tensors of an entry: normal values in its dtype, other ones for each draw."""
    batch, seqlen_q, seqlen_k, heads_q, heads_k, dim = entry.shape
    dim_v = entry.head_dim_v or dim
    values = torch.Generator().manual_seed(draw)
    dtype = getattr(torch, entry.dtype)
    modifiers: dict[str, Any] = {}
    rows_q, rows_k = (batch, seqlen_q), (batch, seqlen_k)
    facts = dict(entry.facts)
    if entry.packed:
        # With a cache also sequences of one token.
        others = (1, seqlen_k) if entry.page_size else (seqlen_q // 3, seqlen_k // 2)
        lengths = [(seqlen_q, seqlen_k), *(others,) * (batch - 1), (0, 5)]
        batch, sides = len(lengths), "q" if entry.page_size else "qk"
        for side, counts in zip(sides, zip(*lengths, strict=True), strict=False):
            ends = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            modifiers[f"cu_seqlens_{side}"] = ends
            facts[f"total_{side}"] = int(ends[-1])
        rows_q, rows_k = (facts["total_q"],), (facts.get("total_k", 0),)
    if entry.page_size:
        pages = -(-seqlen_k // entry.page_size)
        order = torch.randperm(batch * pages, generator=values).reshape(batch, pages)
        used = [seqlen_k - 37 * row for row in range(batch)]
        modifiers["block_table"] = order.to(torch.int32)
        modifiers["seqused_k"] = torch.tensor(used, dtype=torch.int32)
        rows_k = (batch * pages, entry.page_size)
        facts |= {"page_size": entry.page_size, "used_k": True}

    def normal(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=values).to(of)

    q = normal(*rows_q, heads_q, dim)
    if entry.kv_dtype:
        shapes = ((*rows_k, heads_k, dim), (*rows_k, heads_k, dim_v))
        k, v = (torch.randint(-127, 128, s, generator=values).to(torch.int8) for s in shapes)
    else:
        k, v = normal(*rows_k, heads_k, dim), normal(*rows_k, heads_k, dim_v)
    modifiers |= _modifiers(entry, batch, values)
    has_backward = not (entry.page_size or entry.kv_dtype or entry.dtype in _FP8)
    problem = AttentionProblem(
        batch=batch,
        heads_q=heads_q,
        heads_k=heads_k,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=dim,
        head_dim_v=dim_v,
        dtype=entry.dtype,
        kv_dtype=entry.kv_dtype or entry.dtype,
        out_dtype=default_out_dtype(entry.dtype),
        scale=1 / math.sqrt(dim),
        mask=MaskSpec.of(entry.causal, entry.window),
        alibi=entry.alibi,
        bias=entry.bias,
        sink=entry.sink,
        needs_grad=has_backward,
        bias_grad=has_backward and entry.bias,
        return_lse=True,
        **facts,
    )
    problem.validate()
    x = Operands(q, k, v, **modifiers)
    dout = normal(*rows_q, heads_q, dim_v) if has_backward else None
    dlse = normal(*problem.lse_shape, of=torch.float32) if has_backward else None
    moved = Operands(*(None if t is None else _to(t, device) for t in x))
    return Built(problem, moved, *(None if t is None else t.to(device) for t in (dout, dlse)))


def _modifiers(entry: Entry, batch: int, values: torch.Generator) -> dict[str, torch.Tensor]:
    """The operands of an entry that change scores, scale stored values or drop probabilities."""
    _, seqlen_q, seqlen_k, heads_q, heads_k, _ = entry.shape
    made: dict[str, torch.Tensor] = {}
    if entry.kv_dtype:
        for name in ("k_descale", "v_descale"):
            made[name] = (torch.rand((batch, heads_k), generator=values) + 0.5) / 75
    if entry.dtype in _FP8:
        for name in ("q_descale", "k_descale", "v_descale"):
            made[name] = torch.rand((batch, heads_k), generator=values) + 0.5
    if entry.alibi:
        slopes = torch.rand((1, heads_q), generator=values) * 0.3
        made["alibi_slopes"] = slopes.expand(batch, heads_q)
    if entry.bias:
        bias = torch.randn((batch, heads_q, seqlen_q, seqlen_k), generator=values)
        made["bias"] = bias.to(getattr(torch, entry.dtype))
    if entry.sink:
        made["sink"] = torch.randn(heads_q, generator=values)
    if dict(entry.facts).get("dropout_p"):
        made["seed"] = torch.tensor([0x9E3779B97F4A7C15 % 2**63], dtype=torch.int64)
    return made


def _to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, with dims of stride 0 kept so."""
    if 0 in tensor.stride():
        return tensor[:1].to(device).expand(tensor.shape)
    return tensor.to(device)
