"""The error budget of heedful.reference.budget, as assertions about a test case."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from heedful.core.call.operands import Gradients
from heedful.reference import budget
from heedful.reference.budget import DRAWS, Error, Results, judge, over_budget, unsound
from heedful.reference.convert import as_numpy
from support.problems.cases import Built, Case, build

__all__ = ["DRAWS", "Error", "Results", "assert_sound", "over_budget", "run"]


class Backend(Protocol):
    """What `run` takes: a module or object with these two functions (see heedful.cpu)."""

    def forward(self, problem, x, out) -> tuple[Any, Any, Any]: ...

    def backward(self, problem, x, out, lse, dout, dlse=None) -> Gradients: ...


def assert_sound(name: str, got, want) -> None:
    """AssertionError for what no budget excuses (see `heedful.reference.budget.unsound`)."""
    wrong = unsound(name, got, want)
    assert not wrong, wrong


def oracle_results(built: Built) -> Results:
    """The float64 truth for a built case."""
    return budget.oracle_results(built.problem, built.x, built.dout, built.dlse)


def twin_results(built: Built) -> Results:
    """What eager PyTorch gets for a built case, on the case's device."""
    return budget.twin_results(built.problem, built.x, built.dout, built.dlse)


def twin_errors(case: Case, device="cpu") -> Iterator[dict[str, Error]]:
    """By result, the twin's error against the oracle: the worst so far, draw by draw."""
    built = build(case, device)
    return _twin_errors(built, oracle_results(built), device)


def _twin_errors(built: Built, want: Results, device) -> Iterator[dict[str, Error]]:
    """`twin_errors` of a case whose first draw is built, with its truth."""
    errors: dict[str, Error] = {}
    for draw in range(DRAWS):
        if draw:
            built = build(built.case, device, draw)
            want = oracle_results(built)
        got = twin_results(built)
        for name, exact in want.present().items():
            error = Error.between(getattr(got, name), exact)
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
    want = oracle_results(built)
    judged = judge(got, want, built.problem.out_dtype, _twin_errors(built, want, device))
    wrong = [judgement.wrong for judgement in judged.values() if judgement.wrong]
    assert not wrong, "\n".join(wrong)


def run(backend: Backend, case: Case, device="cpu") -> None:
    """Builds the case, runs the backend forward (and backward), and checks every result."""
    built = build(case, device)
    check(built, backend_results(backend, built), device)
