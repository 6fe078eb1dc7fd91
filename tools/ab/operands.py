"""A cell's calls: operands drawn, public functions of whichever heedful is on the path."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ab.cases import Spec, new_lengths

Call = Callable[[], Any]
# Sets of tensors of host calls: none finds what an earlier call left. On a CPU the host computes.
HOST_SETS = {"cuda": 256, "cpu": 16}
NEW_WARM_UP = 400
# The dtype of a cache of packed latent vectors. An older side may lack heedful's name for it.
LATENT_ROWS = "fp8_ds_mla"


def calls(spec: Spec, device: torch.device, sets: int) -> list[Call]:
    """One call for each of `sets` draws of the operands."""
    made = {"dense": dense, "packed": packed, "cache": cache}[spec["call"]]
    return [made(spec, Draw(device, seed)) for seed in range(sets)]


class Draw:
    """Normal values, the same for a seed."""

    def __init__(self, device: torch.device, seed: int = 0):
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: str = "bfloat16", grad: bool = False) -> Tensor:
        drawn = torch.randn(shape, generator=self._generator, device=self.device)
        return drawn.to(getattr(torch, dtype)).requires_grad_(grad)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator, device=self.device).int()

    def ints(self, values: Any) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)


def _options(spec: Spec, draw: Draw) -> dict[str, Any]:
    """What a function takes beside q, k and v."""
    batch, rows, keys, heads, *_ = spec["shape"]
    found = dict(spec["options"] or {})
    if "window_size" in found:
        found["window_size"] = tuple(found["window_size"])
    if spec["bias"]:
        found["bias"] = draw.normal(1, heads, rows, keys, dtype=spec["dtype"])
    if spec["alibi"]:
        steps = torch.arange(1, heads + 1, device=draw.device)
        found["alibi_slopes"] = 2.0 ** (-8.0 * steps / heads)
    if spec["sink"]:
        found["sink"] = draw.normal(heads, dtype="float32")
    return found


def _directed(spec: Spec, inputs: tuple[Tensor, ...], dout: Tensor | None, call: Call) -> Call:
    """The forward, or the backward on a kept one."""
    if spec["direction"] != "backward":
        return call
    out = call()
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def dense(spec: Spec, draw: Draw) -> Call:
    from heedful import flash_attn_func

    batch, rows, keys, heads, heads_k, dim = spec["shape"]
    dim_v, facts = spec["dim_v"] or dim, {"dtype": spec["dtype"], "grad": spec["grad"]}
    q = draw.normal(batch, rows, heads, dim, **facts)
    k = draw.normal(batch, keys, heads_k, dim, **facts)
    v = draw.normal(batch, keys, heads_k, dim_v, **facts)
    dout = None
    if spec["direction"] == "backward":
        dout = draw.normal(batch, rows, heads, dim_v, dtype=spec["dtype"])
    options = _options(spec, draw)
    return _directed(spec, (q, k, v), dout, lambda: flash_attn_func(q, k, v, **options))


def packed(spec: Spec, draw: Draw) -> Call:
    from heedful import flash_attn_varlen_func

    _, _, _, heads, heads_k, dim = spec["shape"]
    lengths, dim_v = spec["lengths"], spec["dim_v"] or dim
    total, longest, facts = sum(lengths), max(lengths), {"dtype": spec["dtype"]}
    bounds = draw.ints((0, *accumulate(lengths)))
    grad = spec["grad"]
    q = draw.normal(total, heads, dim, grad=grad, **facts)
    k = draw.normal(total, heads_k, dim, grad=grad, **facts)
    v = draw.normal(total, heads_k, dim_v, grad=grad, **facts)
    dout = draw.normal(total, heads, dim_v, **facts) if spec["direction"] == "backward" else None
    options = _options(spec, draw)
    sizes = (bounds, bounds, longest, longest)
    return _directed(
        spec, (q, k, v), dout, lambda: flash_attn_varlen_func(q, k, v, *sizes, **options)
    )


def cache(spec: Spec, draw: Draw) -> Call:
    """A step over a cache, or packed queries over one."""
    from heedful import flash_attn_varlen_func, flash_attn_with_kvcache

    batch, rows, _, heads, _, dim = spec["shape"]
    k, v, more = _stored(spec, draw)
    more |= _options(spec, draw)
    if spec["queries"]:
        queries, lengths = spec["queries"], spec["lengths"]
        q = draw.normal(sum(queries), heads, dim, dtype=spec["dtype"])
        # Keys are as many as are used; nothing is packed beside the queries.
        bounds, used = draw.ints((0, *accumulate(queries))), more.pop("cache_seqlens")
        more |= {"seqused_k": used}
        sizes = (bounds, None, max(queries), max(lengths))
        return lambda: flash_attn_varlen_func(q, k, v, *sizes, **more)
    q = draw.normal(batch + spec["padded"], rows, heads, dim, dtype=spec["dtype"])
    if spec["new"]:
        _, _, _, _, heads_k, _ = spec["shape"]
        shape = (batch, spec["new"], heads_k)
        more["k"] = draw.normal(*shape, dim, dtype=spec["dtype"])
        more["v"] = draw.normal(*shape, spec["dim_v"] or dim, dtype=spec["dtype"])
    if spec["rotary"]:
        for name in ("rotary_cos", "rotary_sin"):
            more[name] = draw.normal(spec["shape"][2], dim // 2, dtype=spec["dtype"])
    return lambda: flash_attn_with_kvcache(q, k, v, **more)


def _stored(spec: Spec, draw: Draw) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Keys and values as stored, and what tells where they are."""
    batch, _, keys, _, heads_k, dim = spec["shape"]
    lengths, dim_v, page = spec["lengths"] or (keys,) * batch, spec["dim_v"] or dim, spec["page"]
    more: dict[str, Any] = {}
    lead = (batch + spec["padded"], keys)
    if page:
        counts = [-(-n // page) for n in lengths]
        if spec["new"]:
            counts = [-(-keys // page)] * batch
        table = torch.zeros(lead[0], max(counts), dtype=torch.int32, device=draw.device)
        for row, own in zip(table[:batch], draw.order(sum(counts)).split(counts), strict=True):
            row[: len(own)] = own
        lead, more["block_table"] = (sum(counts), page), table
    if spec["lengths"]:
        more["cache_seqlens"] = draw.ints((*lengths, *(0,) * spec["padded"]))
    k, k_scale = _quantised(spec, draw.normal(*lead, heads_k, dim, dtype=spec["dtype"]), batch)
    v, v_scale = k if spec["stored"] == LATENT_ROWS else k[..., :dim_v], k_scale
    if dim == dim_v or spec["call"] != "cache":
        v, v_scale = _quantised(
            spec, draw.normal(*lead, heads_k, dim_v, dtype=spec["dtype"]), batch
        )
    if k_scale is not None:
        more |= {"k_descale": k_scale, "v_descale": v_scale}
    if spec["prefix"]:
        sizes = ((spec["prefix"], heads_k, n) for n in (dim, dim_v))
        more["shared_prefix"] = tuple(draw.normal(*size, dtype=spec["dtype"]) for size in sizes)
    return k, v, more


def _quantised(spec: Spec, x: Tensor, batch: int) -> tuple[Tensor, Tensor | None]:
    import heedful

    if not spec["stored"]:
        return x, None
    if spec["stored"] == LATENT_ROWS:
        return heedful.pack_latent(x), None
    if spec["by_head"]:
        # Normal values are in the range of the dtype as they are.
        heads = x.shape[-2]
        scale = torch.linspace(0.5, 1.0, batch * heads, device=x.device).view(batch, heads)
        return x.to(getattr(torch, spec["stored"])), scale
    stored, scale, _ = heedful.quantize_kv(x, spec["stored"])
    return stored, scale


def new_calls(spec: Spec, device: torch.device) -> Iterator[Call]:
    """Calls of lengths that this process has not seen, the same for each process."""
    _, _, _, heads, heads_k, dim = spec["shape"]
    for length in new_lengths(0):
        sized = {**spec, "shape": (1, length, length, heads, heads_k, dim)}
        if spec["call"] == "packed":
            sized["lengths"] = (length, length // 2, 77)
        made = {"dense": dense, "packed": packed}[spec["call"]](sized, Draw(device))
        yield _with_backward(made) if spec["grad"] else made
    raise ValueError("no new lengths are left: ask for fewer rounds")


def _with_backward(call: Call) -> Call:
    def both() -> None:
        out = call()
        out.backward(out.detach())

    return both
