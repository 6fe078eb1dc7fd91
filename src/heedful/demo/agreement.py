"""Whether two loss curves are the same up to rounding, with the noise measured, not chosen.

Two right attentions round differently, and training carries that on. How far is measured by a
control: a run that is right too, but sums in another order (unfused SDPA) and starts from weights
off by one rounding of the dtype. The rule is that of the gradients in the test-suite: at most
three times the control's distance, plus one rounding of the loss itself, in the maximum over the
steps and as RMS.
"""

import math
from dataclasses import dataclass

FACTOR = 3.0
# Losses are float32, whatever the model computes in.
LOSS_HALF_EPS = 2.0**-24


@dataclass(frozen=True)
class Distance:
    """Between two curves, over their steps."""

    largest: float
    rms: float

    @classmethod
    def between(cls, one: list[float], other: list[float]) -> "Distance":
        steps = differences(one, other)
        return cls(max(steps), math.sqrt(sum(d * d for d in steps) / len(steps)))


@dataclass(frozen=True)
class Agreement:
    """found: of the two curves; noise: of the control from the second; bound: what found may be."""

    found: Distance
    noise: Distance
    bound: Distance

    @property
    def agrees(self) -> bool:
        """Infinite noise, of a control that broke, excuses nothing."""
        within = self.found.largest <= self.bound.largest and self.found.rms <= self.bound.rms
        return within and math.isfinite(self.bound.rms)


def differences(one: list[float], other: list[float]) -> list[float]:
    """Step by step, absolute; a NaN on either side is infinitely far."""
    pairs = zip(one, other, strict=True)
    return [math.inf if math.isnan(a - b) else abs(a - b) for a, b in pairs]


def compare(ours: list[float], theirs: list[float], control: list[float]) -> Agreement:
    """The curves of two runs and of the control that belongs to the second."""
    rounding = LOSS_HALF_EPS * max(abs(loss) for loss in theirs)
    noise = Distance.between(control, theirs)
    bound = Distance(FACTOR * noise.largest + rounding, FACTOR * noise.rms + rounding)
    return Agreement(Distance.between(ours, theirs), noise, bound)
