"""The error budget: a backend may err at most twice as much as eager PyTorch does in the same
dtype (three times for gradients), plus one rounding of the dtype, in the maximum and as RMS.

The twin's own error sets the scale: the largest over DRAWS draws of the case's values. One draw
would not do: the largest of a few thousand rounding errors varies more than twofold by itself, so
that an honest kernel would fail one time in a hundred. Draws are made only as long as a result is
outside its budget, which comes to the same, because a budget only grows with them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from heedful.core.operands import Gradients
from heedful.reference import eager, oracle
from heedful.reference.convert import as_numpy, operands_as_numpy
from support.cases import Built, Case, build

FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
DRAWS = 16


class Backend(Protocol):
    """What `run` takes: a module or object with these two functions (see heedful.cpu)."""

    def forward(self, problem, x, out) -> tuple[Any, Any, Any]: ...

    def backward(self, problem, x, out, lse, dout, dlse=None) -> Gradients: ...


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


def rounding(want: np.ndarray, dtype: str) -> Error:
    """What rounding the exact result to `dtype` once may cost."""
    finite = want[np.isfinite(want)]
    if not finite.size:
        return Error(0.0, 0.0)
    half_eps = torch.finfo(getattr(torch, dtype)).eps / 2
    return Error(half_eps * float(np.abs(finite).max()), half_eps * _rms(finite))


def _rms(a: np.ndarray) -> float:
    return float(np.sqrt(np.mean(a**2)))


def assert_sound(name: str, got, want) -> None:
    """What no budget excuses: a missing result, a wrong shape, NaN, infinities in other places,
    or, in probs, another dropout mask."""
    assert got is not None, f"{name} is missing"
    assert got.shape == want.shape, f"{name} has shape {got.shape}, not {want.shape}"
    assert not np.isnan(got).any(), f"{name} has {np.isnan(got).sum()} NaN of {got.size}"
    infinite = np.isinf(want)
    assert np.array_equal(got[infinite], want[infinite]), f"{name} is finite where it is not to be"
    if name == "probs":
        # A dropped probability too small for the dtype is a negative zero.
        differ = (np.sign(got) != np.sign(want)) & (got != 0)
        assert not differ.any(), "another dropout mask than the oracle's"


def over_budget(name: str, got, want, twin_error: Error, dtype: str) -> str:
    """What is wrong with a result, in words, or nothing.

    got, want: float64 arrays of one shape. twin_error: the twin's against the same oracle.
    """
    factor = GRADIENT_FACTOR if name.startswith("d") else FORWARD_FACTOR
    error, once = Error.between(got, want), rounding(want, dtype)
    for what in ("largest", "rms"):
        twin, one, found = (getattr(e, what) for e in (twin_error, once, error))
        if found > factor * twin + one:
            return (
                f"{name}: {what} error {found:.3g} exceeds {factor * twin + one:.3g} = {factor:g} x"
                f" {twin:.3g} (eager) + {one:.3g} (one rounding of {dtype})"
            )
    return ""


def oracle_results(built: Built) -> Results:
    """The float64 truth for a built case."""
    x, dout = operands_as_numpy(built.x), as_numpy(built.dout)
    results = oracle.forward(built.problem, x)
    if built.dout is None:
        return Results(*results)
    return Results(*results, *oracle.backward(built.problem, x, dout, as_numpy(built.dlse)))


def twin_results(built: Built) -> Results:
    """What eager PyTorch gets for a built case, on the case's device."""
    results = eager.forward(built.problem, built.x)
    if built.dout is not None:
        results += eager.backward(built.problem, built.x, built.dout, built.dlse)
    return Results(*(as_numpy(result) for result in results))


def twin_errors(case: Case, device="cpu") -> Iterator[dict[str, Error]]:
    """By result, the twin's error against the oracle: the worst so far, draw by draw."""
    errors: dict[str, Error] = {}
    for draw in range(DRAWS):
        built = build(case, device, draw)
        got = twin_results(built)
        for name, want in oracle_results(built)._asdict().items():
            if want is not None:
                error = Error.between(getattr(got, name), want)
                errors[name] = error.worst(errors.get(name, error))
        yield errors


def backend_results(backend: Backend, built: Built) -> Results:
    """What a backend computes for a built case, into an output poisoned with NaN."""
    problem, x = built.problem, built.x
    shape = (*x.q.shape[:-1], problem.head_dim_v)
    dtype = getattr(torch, problem.out_dtype)
    poisoned = torch.full(shape, torch.nan, device=x.q.device).to(dtype)
    out, lse, probs = backend.forward(problem, x, out=poisoned)
    assert out.data_ptr() == poisoned.data_ptr() or not out.numel(), "out was given but not used"
    assert out.dtype == dtype, f"out is {out.dtype}, not {dtype}"
    assert lse.dtype == torch.float32, f"lse is {lse.dtype}, not float32"
    assert (probs is not None) == problem.return_probs, "probs came without being asked, or not"
    results = (out, lse, probs)
    if built.dout is not None:
        results += tuple(backend.backward(problem, x, out, lse, built.dout, built.dlse))
    return Results(*(as_numpy(result) for result in results))


def check(built: Built, got: Results, device="cpu") -> None:
    """AssertionError unless every result is present, of the right shape and within its budget."""
    wanted = {n: want for n, want in oracle_results(built)._asdict().items() if want is not None}
    for name, want in wanted.items():
        assert_sound(name, getattr(got, name), want)
    over, complaints, dtype = list(wanted), {}, built.problem.out_dtype
    for errors in twin_errors(built.case, device):
        complaints = {
            name: over_budget(name, getattr(got, name), wanted[name], errors[name], dtype)
            for name in over
        }
        over = [name for name in over if complaints[name]]
        if not over:
            return
    raise AssertionError("\n".join(complaints[name] for name in over))


def run(backend: Backend, case: Case, device="cpu") -> None:
    """Builds the case, runs the backend forward (and backward), and checks every result."""
    built = build(case, device)
    check(built, backend_results(backend, built), device)
