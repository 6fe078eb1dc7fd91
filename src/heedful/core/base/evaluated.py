"""Python code that is written while a program runs: the only place that evaluates such code.

Straight-line code takes less time than a loop over lists. HEEDFUL_LOG=debug prints each function as
it is made, and `source` gives its text.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_log = logging.getLogger("heedful.evaluated")


def function(parameters: str, lines: Sequence[str], scope: Mapping[str, Any]) -> Callable[..., Any]:
    """A function of these parameters and lines, which sees the names of the scope alone."""
    text = "\n    ".join([f"def made({parameters}):", *lines])
    _log.debug("%s", text)
    names = {**scope}
    exec(text, names)
    made = names["made"]
    made.source = text
    return made


def source(made: Callable[..., Any]) -> str:
    """The text of a function of `function`. Raises AttributeError for any other."""
    return made.source  # pyright: ignore[reportFunctionMemberAccess]


def value(code: str, scope: Mapping[str, Any]) -> Any:
    """The value of an expression of the scope's names alone."""
    return eval(code, {**scope})
