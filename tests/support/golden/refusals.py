"""Calls that are refused, and the whole message of each."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

Refused = Sequence[tuple[Callable[[], Any], str]]


def each_refusal(types: Refused, values: Refused) -> pytest.MarkDecorator:
    """Cases (call, error, said): those of `types` raise TypeError, those of `values` ValueError."""
    cases = [(call, TypeError, said) for call, said in types]
    cases += [(call, ValueError, said) for call, said in values]
    names = [said.split(" must")[0] + f" {n}" for n, (_, _, said) in enumerate(cases)]
    return pytest.mark.parametrize("call, error, said", cases, ids=names)
