"""Sequences over caches: their tensors, and the reference of some of their rows.

Dimension key: B sequences, T tokens of all, N keys, H query heads, G KV heads, D dim, R rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heedful.bench.cases import Case
from heedful.bench.exact import Operands, eager, exact
from heedful.reference.budget import Error, allowed


class Tensors(NamedTuple):
    """q (B, 1, H, D), or packed (T, H, D) with cu_q (B + 1,); k, v (B, N, G, ..) or (pages, page,
    G, ..) as stored, with a scale a row or a head; table (B, pages of a sequence), used (B,);
    prefix: (N, G, ..) of keys and values."""

    q: Tensor
    k: Tensor
    v: Tensor
    used: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    table: Tensor | None = None
    prefix: tuple[Tensor, Tensor] | None = None
    cu_q: Tensor | None = None


class Drawn:
    """Normal values in bfloat16, and pages in an order of their own, from one seed."""

    def __init__(self, device: torch.device, seed: int):
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        facts: dict[str, Any] = {"generator": self._generator, "device": self._device}
        return torch.randn(shape, dtype=torch.bfloat16, **facts)

    def table(self, keys: Sequence[int], page: int, padded: int = 0) -> tuple[Tensor, int]:
        """Page numbers of sequences of so many keys, 0 where a sequence ends, and how many pages
        there are. padded: rows of no sequence."""
        counts = [-(-n // page) for n in keys]
        order = torch.randperm(sum(counts), generator=self._generator, device=self._device).int()
        rows = len(counts) + padded
        table = torch.zeros(rows, max(counts), dtype=torch.int32, device=self._device)
        for row, own in zip(table, order.split(counts), strict=False):
            row[: len(own)] = own
        return table, sum(counts)


class Part(NamedTuple):
    """Rows of one KV head's query heads. place: where they are in the result, as (R, H, D)."""

    kind: str
    words: str
    place: tuple
    truth_HRD: Tensor


class Reference:
    """The reference of some rows of a result. Rows of one kind share a budget: twice what eager
    PyTorch errs on them, and one rounding.

    shape: of the result. live: so many of its first dim are no padding.
    """

    def __init__(self, shape: Sequence[int], live: int | None = None):
        self.shape, self.live = tuple(shape), live
        self.parts: list[Part] = []
        self._twins: dict[str, Error] = {}
        self._sizes: dict[str, Error] = {}

    def add(self, part: tuple[str, str, tuple], case: Case, x: Operands, rows: Tensor) -> None:
        """Looks at these rows, too. part: kind, words and place of a Part."""
        truth, twin = (made(case, x, rows, rows).out for made in (exact, eager))
        assert truth is not None and twin is not None
        self.parts.append(Part(*part, truth))
        for found, of in ((self._twins, twin.double() - truth), (self._sizes, truth)):
            found[part[0]] = found.get(part[0], Error(0.0, 0.0)).worst(_error(of))

    def budget(self, kind: str) -> Error:
        half_eps, size = torch.finfo(torch.bfloat16).eps / 2, self._sizes[kind]
        once = Error(half_eps * size.largest, half_eps * size.rms)
        return allowed("out", self._twins[kind], once)

    def why_wrong(self, out: Tensor) -> str | None:
        """What is no result or outside of its budget, or None."""
        if tuple(out.shape) != self.shape:
            return f"out has shape {tuple(out.shape)}, not {self.shape}"
        if not out.isfinite().all():
            return "out is not finite"
        if self.live is not None and out[self.live :].any():
            return "padded rows are not 0"
        for part in self.parts:
            error = _error(out[part.place].transpose(0, 1).double() - part.truth_HRD)
            if not error.within(self.budget(part.kind)):
                return f"{part.words}: {error} exceeds {self.budget(part.kind)}"
        return None


def _error(difference: Tensor) -> Error:
    return Error(float(difference.abs().max()), float(difference.square().mean().sqrt()))
