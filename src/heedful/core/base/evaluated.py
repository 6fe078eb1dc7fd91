"""Python code that is written while a program runs: the only place that evaluates such code.

Straight-line code does in one step what a walk over lists would do in many. A function that was
made so keeps its text: print(source(function)).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def function(parameters: str, lines: Sequence[str], scope: Mapping[str, Any]) -> Callable[..., Any]:
    """A function of these parameters and lines, which sees the names of the scope alone."""
    text = "\n    ".join([f"def made({parameters}):", *lines])
    names = {**scope}
    exec(text, names)
    made = names["made"]
    made.source = text
    return made


def source(made: Callable[..., Any]) -> str:
    """The text of a function of `function`. Raises AttributeError for any other."""
    return made.source  # pyright: ignore[reportFunctionMemberAccess]


def value(code: str, scope: Mapping[str, Any]) -> Any:
    """What an expression is, of the names of the scope alone."""
    return eval(code, {**scope})
