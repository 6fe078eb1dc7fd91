"""The error budget: a kernel may err at most twice as much as eager PyTorch does in the same dtype
(three times for gradients), plus one rounding of the dtype, in the maximum and as RMS.

The twin's own error sets the scale: the largest over DRAWS draws of the case's values. One draw
would not do: the largest of a few thousand rounding errors varies more than twofold by itself, so
that an honest kernel would fail one time in a hundred. More draws are made only while a result is
outside its budget. The verdict is the same, because a budget only grows with them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from heedful.core.call.operands import Operands
from heedful.core.call.problem import AttentionProblem
from heedful.reference import eager, oracle
from heedful.reference.convert import as_numpy, operands_as_numpy

FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
DRAWS = 16


class Results(NamedTuple):
    """Everything a call computes, as float64 NumPy; None is absent."""

    out: Any
    lse: Any
    probs: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dsink: Any = None
    drel_bias: Any = None

    def present(self) -> dict[str, np.ndarray]:
        """The results that exist, by name."""
        return {name: a for name, a in self._asdict().items() if a is not None}


@dataclass(frozen=True)
class Error:
    """Largest and root-mean-square difference."""

    largest: float
    rms: float

    @classmethod
    def between(cls, got: np.ndarray, want: np.ndarray) -> "Error":
        if not got.size:
            return cls(0.0, 0.0)
        # Where both are the same infinity (a row without keys) there is no error.
        same = got == want
        difference = np.where(same, 0.0, got - np.where(same, 0.0, want))
        return cls(float(np.abs(difference).max()), float(np.sqrt(np.mean(difference**2))))

    def worst(self, other: "Error") -> "Error":
        return Error(max(self.largest, other.largest), max(self.rms, other.rms))

    def within(self, budget: "Error") -> bool:
        """False for NaN too."""
        return self.largest <= budget.largest and self.rms <= budget.rms


def rounding(want: np.ndarray, dtype: str) -> Error:
    """The largest error of rounding the exact result to `dtype` once."""
    finite = want[np.isfinite(want)]
    if not finite.size:
        return Error(0.0, 0.0)
    half_eps = torch.finfo(getattr(torch, dtype)).eps / 2
    rms = float(np.sqrt(np.mean(finite**2)))
    return Error(half_eps * float(np.abs(finite).max()), half_eps * rms)


def factor(name: str) -> float:
    """How many times the twin's error a result may have: gradients are named d..."""
    return GRADIENT_FACTOR if name.startswith("d") else FORWARD_FACTOR


def allowed(name: str, twin: Error, once: Error) -> Error:
    """The rule itself: the budget of a result from the twin's error and one rounding."""
    times = factor(name)
    return Error(times * twin.largest + once.largest, times * twin.rms + once.rms)


def over_budget(name: str, got, want, twin_error: Error, dtype: str) -> str:
    """A message about a wrong result, else nothing.

    got, want: float64 arrays of one shape. twin_error: the twin's against the same oracle.
    """
    error, once = Error.between(got, want), rounding(want, dtype)
    budget = allowed(name, twin_error, once)
    for what in ("largest", "rms"):
        size, most = getattr(error, what), getattr(budget, what)
        if not size <= most:
            return (
                f"{name}: {what} error {size:.3g} exceeds {most:.3g} = {factor(name):g} x"
                f" {getattr(twin_error, what):.3g} (eager) + {getattr(once, what):.3g}"
                f" (one rounding of {dtype})"
            )
    return ""


def unsound(name: str, got, want) -> str:
    """A message about an error that no budget excuses, else nothing: a missing result, a wrong
    shape, NaN, infinities in other places, or, in probs, another dropout mask."""
    if got is None:
        return f"{name} is missing"
    if got.shape != want.shape:
        return f"{name} has shape {got.shape}, not {want.shape}"
    if np.isnan(got).any():
        return f"{name} has {np.isnan(got).sum()} NaN of {got.size}"
    infinite = np.isinf(want)
    if not np.array_equal(got[infinite], want[infinite]):
        return f"{name} is finite where it is not to be"
    # A dropped probability too small for the dtype is a negative zero.
    if name == "probs" and ((np.sign(got) != np.sign(want)) & (got != 0)).any():
        return "another dropout mask than the oracle's"
    return ""


@dataclass(frozen=True)
class Judgement:
    """One result: its error, its budget (None if unsound), what is wrong or nothing."""

    error: Error | None
    budget: Error | None
    wrong: str


def judge(
    got: Results, want: Results, dtype: str, draws: Iterable[dict[str, Error]]
) -> dict[str, Judgement]:
    """The judgement of each expected result, by name.

    dtype: of the output. draws: the twin's errors by result, the worst so far, draw by draw.
    """
    wanted, judged = want.present(), {}
    for name, exact in wanted.items():
        wrong = unsound(name, getattr(got, name), exact)
        if wrong:
            judged[name] = Judgement(None, None, wrong)
    open_names = [name for name in wanted if name not in judged]
    for errors in draws:
        for name in open_names:
            mine, exact = getattr(got, name), wanted[name]
            budget = allowed(name, errors[name], rounding(exact, dtype))
            wrong = over_budget(name, mine, exact, errors[name], dtype)
            judged[name] = Judgement(Error.between(mine, exact), budget, wrong)
        open_names = [name for name in open_names if judged[name].wrong]
        if not open_names:
            break
    return judged


def oracle_results(problem: AttentionProblem, x: Operands, dout=None, dlse=None) -> Results:
    """The float64 truth for torch tensors; without gradients where dout is None."""
    arrays = operands_as_numpy(x)
    if dout is None:
        return Results(*oracle.forward(problem, arrays))
    out, lse, probs, grads = oracle.both(problem, arrays, as_numpy(dout), as_numpy(dlse))
    return Results(out, lse, probs, *grads)


def twin_results(
    problem: AttentionProblem, x: Operands, dout=None, dlse=None, far_scores: bool = False
) -> Results:
    """The results of eager PyTorch, on the tensors' device. far_scores: see `reference.eager`."""
    results = eager.forward(problem, x, far_scores)
    if dout is not None:
        results += eager.backward(problem, x, dout, dlse, far_scores)
    return Results(*(as_numpy(result) for result in results))
