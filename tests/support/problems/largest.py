"""The largest scores of rows: a call's against the oracle's, within the budget."""

from dataclasses import replace
from typing import Any

from heedful.reference import eager, oracle
from heedful.reference.budget import DRAWS, Error, over_budget, unsound
from heedful.reference.convert import as_numpy, operands_as_numpy
from support.problems.cases import Built, build


def check_largest(built: Built, got, device="cpu") -> None:
    """AssertionError unless `got`, of rows, is within the budget: as many draws of the twin as it
    needs."""
    want, twin_error, message = None, Error(0.0, 0.0), ""
    for draw in range(DRAWS):
        drawn = built if draw == 0 else build(built.case, device, draw)
        problem = replace(drawn.problem, max_scores=True)
        exact: Any = oracle.forward(problem, operands_as_numpy(drawn.x))[2]
        twin: Any = as_numpy(eager.forward(problem, drawn.x)[2])
        twin_error = twin_error.worst(Error.between(twin, exact))
        if want is None:
            want, got = exact, as_numpy(got)
            wrong = unsound("max_scores", got, want)
            assert not wrong, wrong
        message = over_budget("max_scores", got, want, twin_error, problem.out_dtype)
        if not message:
            return
    raise AssertionError(message)
