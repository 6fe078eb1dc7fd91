"""What a merge of parts by their float32 log-sum-exps may err by, as a function of |lse|.

A rounding moves an lse by at most 2^-24 of itself: say by up to d. Weights then are off by factors
between e^-d and e^d, and shares of two groups of parts whose odds move by e^2d differ by no more
than tanh(d / 2). So a merged output moves by at most that part of the distance between the largest
and the smallest of the parts' outputs, and the merged lse by d.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from heedful.reference.budget import DRAWS, Error, over_budget
from heedful.torch.api.merge import merged

# One rounding to float32 moves a number by at most this part of itself.
ROUNDING = 2.0**-24
SIZES = (0.0, 100.0, -1e4, 1e6, -1e8, 1e9, -1e30)


@dataclass(frozen=True)
class Parts:
    """Outputs of parts, and their log-sum-exps before they were rounded to float32."""

    outs: Tensor
    exact: Tensor

    @property
    def lses(self) -> Tensor:
        return self.exact.float()

    def truth(self) -> tuple[Tensor, Tensor]:
        """out and lse of the parts as they are, in float64."""
        return merged(self.outs.double(), self.exact)

    def bounds(self) -> tuple[Tensor, Tensor]:
        """How far out and lse of a merge of the rounded lses may be from the truth."""
        moved = ROUNDING * self.exact.abs().amax(0)
        largest, count = self.outs.double().abs().amax(0), len(self.outs)
        distance = (self.outs.amax(0) - self.outs.amin(0)).double()
        apart = (self.exact.amax(0) - self.exact.amin(0)) + 2 * moved
        # Of the merge's own float32 operations: differences of lses, their products with log2(e)
        # and what exp2 errs, in two factors of a share; sums and products of all parts.
        own = (4 * apart.clamp(max=200.0) + 3 * count + 12) * ROUNDING
        by_row = torch.tanh(moved / 2).mT[..., None]
        out = by_row * distance + own.mT[..., None] * largest
        lse = 2 * moved + (2 * self.exact.abs().amax(0) + count + 8) * ROUNDING
        return out, lse


def parts_near(size: float, shape: tuple[int, ...], seed: int = 0) -> Parts:
    """Parts of a shape whose log-sum-exps are near `size` and differ by a few."""
    values = torch.Generator().manual_seed(seed)
    parts, *batch, rows, heads, _ = shape
    outs = torch.randn(shape, generator=values)
    near = torch.randn((parts, *batch, heads, rows), generator=values, dtype=torch.float64)
    return Parts(outs, size + 2 * near)


def largest_share(parts: Parts, out: Tensor, lse: Tensor) -> float:
    """Which part of its bound an output is off by, at most; AssertionError above 1, or of an lse
    outside of its own."""
    found = 0.0
    for name, got, want, bound in zip(
        ("out", "lse"), (out, lse), parts.truth(), parts.bounds(), strict=True
    ):
        share = float(((got.cpu().double() - want).abs() / bound).max())
        assert share <= 1, f"{name} is off by {share:.3g} of its bound"
        found = max(found, share) if name == "out" else found
    return found


@dataclass(frozen=True)
class InPlace:
    """Running sums, and the parts that are merged into them: (first row, out, lse) of each."""

    out: Tensor
    lse: Tensor
    parts: list[tuple[int, Tensor, Tensor]]

    def after(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """out and lse after all parts, in turn, as `merged` has each row and its part; in `dtype`,
        float64 for the truth and float32 for the twin."""
        sums = self.out.to(dtype, copy=True), self.lse.to(dtype, copy=True)
        for begin, part, part_lse in self.parts:
            rows = sums[0].narrow(-3, begin, part.shape[-3])
            row_lses = sums[1].narrow(-1, begin, part.shape[-3])
            lses = torch.stack([row_lses, part_lse.to(dtype)])
            outs = torch.stack([rows, part.to(dtype)])
            outs = outs.masked_fill((lses == -torch.inf).mT[..., None], 0.0)
            for place, made in zip((rows, row_lses), merged(outs, lses), strict=True):
                place.copy_(made)
        return sums


def assert_in_place(draw: Callable[[int], InPlace], out: Tensor, lse: Tensor) -> None:
    """AssertionError unless merges of `draw(0)` in place err at most twice as much as the same
    merges by torch's operations in float32, whose sums are rounded as often, and one rounding."""
    first, worst = draw(0).after(torch.float64), {}
    for seed in range(DRAWS):
        merges = draw(seed)
        found = zip(merges.after(torch.float32), merges.after(torch.float64), strict=True)
        for name, (twin, truth) in zip(("out", "lse"), found, strict=True):
            error = Error.between(twin.double().cpu().numpy(), truth.cpu().numpy())
            worst[name] = error.worst(worst.get(name, error))
    for name, got, want in zip(worst, (out, lse), first, strict=True):
        pair = got.double().cpu().numpy(), want.cpu().numpy()
        wrong = over_budget(name, *pair, worst[name], "float32")
        assert not wrong, wrong
