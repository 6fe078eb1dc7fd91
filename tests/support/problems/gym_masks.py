"""attention-gym's masks by their definitions, as functions of (b, h, i, j) for torch's
FlexAttention."""

from collections.abc import Callable
from typing import NamedTuple

import torch


class GymMask(NamedTuple):
    """name: of the mask. shows: which key j query i sees."""

    name: str
    shows: Callable

    def __str__(self) -> str:
        return self.name


def gym_masks(length: int, width: int, device: str = "cpu") -> list[GymMask]:
    """The masks of sequences of this length. width: of NATTEN's images, whose pixels they are."""
    place = torch.arange(length, device=device)
    ids = place // 37 + (place > 200).int()

    def causal(b, h, i, j):
        return i >= j

    def document(b, h, i, j):
        return causal(b, h, i, j) & (ids[i] == ids[j])

    def prefix_lm(b, h, i, j):
        return (j < 100 + b * 30) | causal(b, h, i, j)

    def sliding(b, h, i, j):
        return causal(b, h, i, j) & (i - j <= 64)

    def natten(b, h, i, j):
        (row, column), (own_row, own_column) = ((n // width, n % width) for n in (j, i))
        row_center, column_center = (n.clamp(3, width - 4) for n in (own_row, own_column))
        return ((row_center - row).abs() <= 3) & ((column_center - column).abs() <= 3)

    def dilated(b, h, i, j):
        return (i - j).abs().remainder(2 + h) == 0

    def global_and_local(b, h, i, j):
        return causal(b, h, i, j) & ((i - j <= 40) | (j < 10))

    def nothing_below(b, h, i, j):
        return causal(b, h, i, j) & (i < 150)

    every = (causal, document, prefix_lm, sliding, natten, dilated, global_and_local, nothing_below)
    return [GymMask(shows.__name__, shows) for shows in every]
