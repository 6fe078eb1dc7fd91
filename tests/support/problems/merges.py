"""What a merge of parts by their float32 log-sum-exps may err by, as a function of |lse|.

A rounding moves an lse by at most 2^-24 of itself: say by up to d. Weights then are off by factors
between e^-d and e^d, and shares of two groups of parts whose odds move by e^2d differ by no more
than tanh(d / 2). So a merged output moves by at most that part of the distance between the largest
and the smallest of the parts' outputs, and the merged lse by d.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

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
