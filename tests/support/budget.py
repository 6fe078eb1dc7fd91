"""The error budget: a backend may err at most twice as much as eager PyTorch does in the same
dtype (three times for gradients), plus one rounding of the dtype, in the maximum and as RMS.

Nothing here is tuned: the twin's own error on the same problem sets the scale. On a problem of few
elements the twin can be exact by luck, so its error is then the largest over several draws of the
values.
"""

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
# Elements over which the twin's error is sampled at least, and the most draws that may take.
SAMPLED_ELEMENTS = 256
MOST_DRAWS = 8


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


def assert_within(name: str, got, want, twin_error: Error, dtype: str, factor: float) -> None:
    """AssertionError naming the result unless `got` is within the budget; NaN never is.

    got, want: float64 arrays of one shape. twin_error: the twin's against the same oracle.
    """
    assert got.shape == want.shape, f"{name} has shape {got.shape}, not {want.shape}"
    assert not np.isnan(got).any(), f"{name} has {np.isnan(got).sum()} NaN of {got.size}"
    infinite = np.isinf(want)
    assert np.array_equal(got[infinite], want[infinite]), f"{name} is finite where it is not to be"
    error, once = Error.between(got, want), rounding(want, dtype)
    for what in ("largest", "rms"):
        bound = factor * getattr(twin_error, what) + getattr(once, what)
        found = getattr(error, what)
        assert found <= bound, (
            f"{name}: {what} error {found:.3g} exceeds {bound:.3g}"
            f" = {factor:g} x {getattr(twin_error, what):.3g} (eager)"
            f" + {getattr(once, what):.3g} (one rounding of {dtype})"
        )


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


def twin_errors(case: Case, device="cpu") -> dict[str, Error]:
    """By result, the twin's error against the oracle, the worst of as many draws as are needed."""
    errors: dict[str, Error] = {}
    draw, draws = 0, 1
    while draw < draws:
        built = build(case, device, draw)
        want, got = oracle_results(built), twin_results(built)
        for name, exact in want._asdict().items():
            if exact is None:
                continue
            error = Error.between(getattr(got, name), exact)
            errors[name] = error.worst(errors.get(name, error))
            if exact.size:
                draws = max(draws, min(MOST_DRAWS, -(-SAMPLED_ELEMENTS // exact.size)))
        draw += 1
    return errors


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


def check(built: Built, got: Results, errors: dict[str, Error]) -> None:
    """Every result present, of the right shape, finite and within its budget."""
    problem = built.problem
    for name, want in oracle_results(built)._asdict().items():
        found = getattr(got, name)
        if want is None:
            continue
        assert found is not None, f"{name} is missing"
        factor = GRADIENT_FACTOR if name.startswith("d") else FORWARD_FACTOR
        dtype = problem.out_dtype
        if name == "probs":
            # A dropped probability too small for the dtype is a negative zero.
            signs_differ = (np.sign(found) != np.sign(want)) & (found != 0)
            assert not signs_differ.any(), "another dropout mask than the oracle's"
        assert_within(name, found, want, errors[name], dtype, factor)


def run(backend: Backend, case: Case, device="cpu") -> None:
    """Builds the case, runs the backend forward (and backward), and checks every result."""
    built = build(case, device)
    check(built, backend_results(backend, built), twin_errors(case, device))
