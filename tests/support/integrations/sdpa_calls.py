"""Calls of `F.scaled_dot_product_attention`: every combination of what its arguments can be, the
formula in plain torch, and the check of a call against it.

    check(BY_NAME["rank4-gqa-more-float-scaled-dv"], "cuda", torch.bfloat16)
"""

from dataclasses import dataclass
from itertools import product
from math import inf, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.integrations.torch import sdpa
from heedful.integrations.torch.functional import NAME
from heedful.reference.budget import DRAWS, Error, over_budget, unsound
from heedful.reference.convert import as_numpy

HEADS = ("equal", "gqa", "broadcast")
LENGTHS = {"fewer": (5, 11), "as_many": (8, 8), "more": (11, 5)}
# Beside "none" six forms of a mask: which dims it has, and of what.
MASKS = ("none", "causal", "bool", "padding", "float", "heads", "whole", "learned")
SCALES = (None, 0.3)


@dataclass(frozen=True)
class SdpaCall:
    """One combination. rank: of query, key and value. dim_v: None where it is dim."""

    rank: int
    heads: str
    lengths: str
    mask: str
    scale: float | None
    other_dim: bool

    @property
    def name(self) -> str:
        parts = [f"rank{self.rank}", self.heads, self.lengths, self.mask]
        return "-".join(parts + ["scaled"] * (self.scale is not None) + ["dv"] * self.other_dim)

    def draw(self, device: str, dtype: torch.dtype, seed: int, dim: int = 16) -> dict[str, Any]:
        """Arguments, drawn in dtype; those that are differentiable require gradients."""
        rng = torch.Generator(device).manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, generator=rng).to(dtype)

        rows, keys = LENGTHS[self.lengths]
        lead: tuple[int, ...] = {3: (), 4: (2,), 5: (2, 3)}[self.rank]
        of_q, of_k, of_v = {"equal": (4, 4, 4), "gqa": (4, 2, 2), "broadcast": (4, 1, 4)}[
            self.heads
        ]
        q = drawn(*lead, of_q, rows, dim)
        k = drawn(*lead, of_k, keys, dim)
        v = drawn(*lead, of_v, keys, dim // 2 if self.other_dim else dim)
        given: dict[str, Any] = {"query": q, "key": k, "value": v}
        shape = {
            "bool": (rows, keys),
            "padding": (*lead, 1, 1, keys),
            "float": (rows, keys),
            "heads": (4, 1, keys),
            "whole": (*lead, 4, rows, keys),
            "learned": (*(1 for _ in lead), 4, rows, keys),
        }.get(self.mask)
        if shape is not None:
            mask = drawn(*shape)
            if self.mask in ("bool", "padding"):
                mask = mask > -0.5
            elif self.mask in ("float", "whole"):
                # Of the first row all keys: a row that sees none.
                hidden = mask < -0.8
                hidden[..., 0, :] = True
                mask = mask.masked_fill(hidden, -inf)
            given["attn_mask"] = mask
        given["is_causal"] = self.mask == "causal"
        given["scale"] = self.scale
        given["enable_gqa"] = self.heads == "gqa"
        for name in ("query", "key", "value"):
            given[name].requires_grad_()
        if self.mask == "learned":
            given["attn_mask"].requires_grad_()
        return given


CALLS = [
    SdpaCall(*parts) for parts in product((3, 4, 5), HEADS, LENGTHS, MASKS, SCALES, (False, True))
]
BY_NAME = {call.name: call for call in CALLS}


def plain(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> Tensor:
    """The formula, in the dtype of its tensors; rows that see no key give 0."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(repeats, dim=-3) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * (scale or 1 / sqrt(query.shape[-1]))
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], device=query.device, dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    return _Softmax.apply(scores, value.expand(*scores.shape[:-2], *value.shape[-2:]))


class _Softmax(torch.autograd.Function):
    """softmax(scores) value, and its gradients from the output, as FlashAttention-2 writes them:
    with the roundings that an honest kernel has, too."""

    @staticmethod
    def forward(ctx, scores: Tensor, value: Tensor) -> Tensor:
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        lse = wide.logsumexp(-1, keepdim=True)
        weights = torch.exp(wide - lse.masked_fill(lse == -inf, 0)).to(scores.dtype)
        out = weights @ value
        ctx.save_for_backward(weights, value, out)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor, Tensor]:
        weights, value, out = ctx.saved_tensors
        wide = torch.promote_types(out.dtype, torch.float32)
        delta = (out.to(wide) * dout.to(wide)).sum(-1, keepdim=True)
        dweights = (dout @ value.mT).to(wide)
        dscores = weights.to(wide) * (dweights - delta)
        return dscores.to(out.dtype), weights.mT @ dout


def results(function, given: dict[str, Any], dout: Tensor) -> dict[str, Any]:
    """The output and the gradients of what requires them, as float64 arrays."""
    leaves = {
        name: value.detach().clone().requires_grad_()
        for name, value in given.items()
        if isinstance(value, Tensor) and value.requires_grad
    }
    out = function(**{**given, **leaves})
    grads = torch.autograd.grad(out, [*leaves.values()], dout.to(out.dtype))
    named = {f"d{name}": as_numpy(grad) for name, grad in zip(leaves, grads, strict=True)}
    return {"out": as_numpy(out), **named}


def as_double(given: dict[str, Any]) -> dict[str, Any]:
    """The same arguments in float64."""

    def widened(value):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.detach().double().requires_grad_(value.requires_grad)
        return value

    return {name: widened(value) for name, value in given.items()}


def check(
    call: SdpaCall, device: str, dtype: torch.dtype, dim: int = 16, function: Any = None
) -> None:
    """AssertionError unless heedful ran the call within its budget, gradients too.

    function: what calls torch's attention with the arguments; by default that alone does.
    """
    with sdpa() as report:
        judge(call, device, dtype, dim, function or call_torch)
    assert dict(report.ours) == {NAME: 1} and not report.declined, str(report)


def judge(call: SdpaCall, device: str, dtype: torch.dtype, dim: int, function: Any) -> None:
    """AssertionError unless a function of torch's arguments is within the budget of the call,
    gradients too. It is called once."""
    wrong: list[str] = []
    worst: dict[str, Error] = {}
    got: dict[str, Any] = {}
    want: dict[str, Any] = {}
    for draw in range(DRAWS):
        given = call.draw(device, dtype, draw, dim)
        dout = torch.randn_like(plain(**given).detach())
        exact = results(plain, as_double(given), dout)
        if not draw:
            got, want = results(function, given, dout), exact
        for name, twin in results(plain, given, dout).items():
            error = Error.between(twin, exact[name])
            worst[name] = error.worst(worst.get(name, error))
        wrong = [
            unsound(name, got[name], want[name])
            or over_budget(name, got[name], want[name], worst[name], str(dtype).split(".")[1])
            for name in want
        ]
        if not any(wrong):
            return
    raise AssertionError("\n".join(filter(None, wrong)))


def call_torch(**given) -> Tensor:
    """Torch's attention, whatever stands in its place."""
    return F.scaled_dot_product_attention(**given)
