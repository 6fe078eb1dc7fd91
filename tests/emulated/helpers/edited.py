"""As support.problems.budget's `run`, on a case that a test changes after its tensors are drawn."""

from collections.abc import Callable, Iterator

from heedful.reference.budget import judge
from support.problems.budget import (
    DRAWS,
    Backend,
    Error,
    backend_results,
    oracle_results,
    twin_results,
)
from support.problems.cases import Built, Case, build

Edit = Callable[[Built], Built]


def _twin_errors(case: Case, edit: Edit) -> Iterator[dict[str, Error]]:
    worst: dict[str, Error] = {}
    for draw in range(DRAWS):
        built = edit(build(case, draw=draw))
        got = twin_results(built)
        for name, want in oracle_results(built).present().items():
            error = Error.between(getattr(got, name), want)
            worst[name] = error.worst(worst.get(name, error))
        yield worst


def run_edited(backend: Backend, case: Case, edit: Edit) -> None:
    """AssertionError unless every result is within the budget that eager PyTorch sets on draws
    edited alike."""
    built = edit(build(case))
    got, want = backend_results(backend, built), oracle_results(built)
    judged = judge(got, want, built.problem.out_dtype, _twin_errors(case, edit))
    wrong = [judgement.wrong for judgement in judged.values() if judgement.wrong]
    assert not wrong, "\n".join(wrong)
