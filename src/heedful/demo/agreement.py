"""Whether two loss curves are the same up to rounding, with the noise measured, not chosen.

Two correct attentions round differently, and training amplifies this step by step. A control
measures how much: a run that is correct, too, but sums in another order (unfused SDPA), starts from
weights that differ by one rounding of the dtype, and has every weight moved to a neighbouring
float32 after every step. The rule is that of the gradients in the test-suite: at most three times
the control's distance, plus the rounding of the losses themselves, in the maximum and as RMS. It
holds over the first tenth of the steps, the first two tenths, and so on, so that late noise does
not cover an early fault.
"""

import math
from dataclasses import dataclass

FACTOR = 3.0
TENTHS = 10
# A character's loss is float32, whatever the model computes in; a difference has two, each rounded.
LOSS_EPS = 2.0**-23


@dataclass(frozen=True)
class Distance:
    """Between two curves, over some of their steps."""

    largest: float
    rms: float

    @classmethod
    def over(cls, steps: list[float]) -> "Distance":
        return cls(max(steps), math.sqrt(sum(d * d for d in steps) / len(steps)))


@dataclass(frozen=True)
class Part:
    """The first `steps` steps. apart: of the two curves; bound: what that may be."""

    steps: int
    apart: Distance
    bound: Distance

    @property
    def share(self) -> float:
        """How much of the bound is used; above 1 is outside. Infinite noise, of a control that
        broke, excuses nothing."""
        if not math.isfinite(self.bound.rms):
            return math.inf
        return max(self.apart.largest / self.bound.largest, self.apart.rms / self.bound.rms)


@dataclass(frozen=True)
class Agreement:
    """The verdict over every tenth, ever more of the steps."""

    parts: list[Part]

    @property
    def worst(self) -> Part:
        return max(self.parts, key=lambda part: part.share)

    @property
    def agrees(self) -> bool:
        return self.worst.share <= 1


def differences(one: list[float], other: list[float]) -> list[float]:
    """Step by step, absolute; a NaN on either side is infinitely far."""
    pairs = zip(one, other, strict=True)
    return [math.inf if math.isnan(a - b) else abs(a - b) for a, b in pairs]


def compare(ours: list[float], theirs: list[float], control: list[float]) -> Agreement:
    """The curves of two runs and of the control that belongs to the second."""
    apart, noise = differences(ours, theirs), differences(control, theirs)
    count = len(theirs)
    ends = sorted({max(1, count * tenth // TENTHS) for tenth in range(1, TENTHS + 1)})
    return Agreement([_part(apart[:end], noise[:end], theirs[:end]) for end in ends])


def _part(apart: list[float], noise: list[float], losses: list[float]) -> Part:
    rounding = LOSS_EPS * max(abs(loss) for loss in losses)
    strayed = Distance.over(noise)
    bound = Distance(FACTOR * strayed.largest + rounding, FACTOR * strayed.rms + rounding)
    return Part(len(apart), Distance.over(apart), bound)
