"""Plain Python numbers from whatever stands for them: NumPy's too, whose reprs and JSON differ, and
with them keys of kernels and lists of problems."""

import operator
from collections.abc import Iterable
from typing import Any

from heedful.core.symbols import Symbol


def whole(name: str, value: Any) -> int:
    """The int of anything with `__index__`, but a bool; a symbol as it is. Raises TypeError naming
    the argument."""
    if type(value) is int or type(value) is Symbol:
        return value
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {type(value).__name__}") from None


def real(name: str, value: Any) -> float:
    """The float of anything with `__float__` or `__index__`, but a bool or text. Raises TypeError
    naming the argument."""
    if type(value) is float:
        return value
    kind = type(value)
    if kind is bool or not (hasattr(kind, "__float__") or hasattr(kind, "__index__")):
        raise TypeError(f"{name} must be a float, got {kind.__name__}")
    return float(value)


def truth(name: str, value: Any) -> bool:
    """The bool of a bool, Python's or NumPy's. Raises TypeError naming the argument."""
    plain = value.item() if hasattr(value, "item") and not getattr(value, "ndim", 0) else value
    if type(plain) is not bool:
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return plain


def wholes(name: str, values: Iterable[Any]) -> tuple[int, ...]:
    """The ints of a sequence."""
    return tuple(whole(f"{name}[{index}]", value) for index, value in enumerate(values))
