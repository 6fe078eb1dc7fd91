"""Tensors of sequences over caches.

Dimension key: B sequences, T tokens of all, N keys, H query heads, G KV heads, D dim.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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
    """Normal values in bfloat16, and shuffled pages, from one seed."""

    def __init__(self, device: torch.device, seed: int):
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        dtype, generator = torch.bfloat16, self._generator
        return torch.randn(shape, generator=generator, device=self._device, dtype=dtype)

    def table(self, keys: Sequence[int], page: int, padded: int = 0) -> tuple[Tensor, int]:
        """Page numbers of sequences of so many keys, 0 where a sequence ends, and how many pages
        there are. padded: rows of no sequence."""
        counts = [-(-n // page) for n in keys]
        order = torch.randperm(sum(counts), generator=self._generator, device=self._device).int()
        rows = len(counts) + padded
        table = torch.zeros(rows, max(counts), dtype=torch.int32, device=self._device)
        for row, pages in zip(table, order.split(counts), strict=False):
            row[: len(pages)] = pages
        return table, sum(counts)
