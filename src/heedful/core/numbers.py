"""Plain Python values from whatever stands for them: NumPy's numbers too, whose reprs and JSON
differ, and with them keys of kernels and lists of problems; numbers in arrays of one element."""

import operator
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, NoReturn

from heedful.core.symbols import Symbol


def wrong_type(name: str, wanted: str, value: Any) -> NoReturn:
    """Raises the TypeError of an argument that is not what is wanted."""
    # To show what an array holds may have to wait for a device.
    shown = "" if hasattr(value, "device") else f" ({value!r:.60})"
    raise TypeError(f"{name} must be {wanted}, got {type(value).__name__}{shown}")


def whole(name: str, value: Any, wanted: str = "an int") -> Any:
    """The int of anything with `__index__`, or of an array of one integer, but no bool; a symbol as
    it is. Raises TypeError naming the argument."""
    if type(value) is int or type(value) is Symbol:
        return value
    item = element(name, value, wanted)
    if not isinstance(item, bool):
        try:
            return operator.index(item)
        except TypeError:
            pass
    wrong_type(name, wanted, value)


def real(name: str, value: Any) -> float:
    """The float of anything with `__float__` or `__index__`, or of an array of one number, but no
    bool or text. Raises TypeError naming the argument, or ValueError beyond floats."""
    if type(value) is float:
        return value
    item = element(name, value, "a float")
    kind = type(item)
    if kind is bool or not (hasattr(kind, "__float__") or hasattr(kind, "__index__")):
        wrong_type(name, "a float", value)
    try:
        return float(item)
    except OverflowError:
        raise ValueError(f"{name} must be finite, got an int beyond the range of floats") from None


def truth(name: str, value: Any) -> bool:
    """The bool of a bool, Python's or NumPy's, also in an array without dims. Raises TypeError
    naming the argument."""
    if type(value) is bool:
        return value
    item = value if getattr(value, "ndim", 0) else element(name, value, "a bool")
    if type(item) is not bool:
        wrong_type(name, "a bool", value)
    return item


def wholes(
    name: str, values: Iterable[Any], whole: Callable[[str, Any], int] = whole
) -> tuple[int, ...]:
    """The ints of a sequence."""
    return tuple([whole(f"{name}[{index}]", value) for index, value in enumerate(values)])


def ints(name: str, values: Any, wanted: str, whole=whole) -> tuple[int, ...]:
    """The ints of any sequence or array; `values` itself if it is a tuple of ints. Raises TypeError
    unless of ints, ValueError unless a sequence."""
    if values.__class__ is tuple:
        for value in values:
            if value.__class__ is not int:
                break
        else:
            return values
    if not isinstance(values, (str, bytes, Mapping, Set)):
        try:
            items = tuple(values)
        except TypeError:
            pass
        else:
            return wholes(name, items, whole)
    raise ValueError(f"{name} must be {wanted}, got {values!r:.100}")


def is_array(value: Any) -> bool:
    """Whether it is an array, or a scalar as NumPy has them, of any framework."""
    return hasattr(value, "dtype") and hasattr(value, "item")


def element(name: str, value: Any, wanted: str) -> Any:
    """What is in an array of one element; all else as it is. TypeError for other arrays."""
    if not is_array(value):
        return value
    try:
        return value.item()
    except (RuntimeError, ValueError):
        # More or fewer elements than one, or an array without values (fake, under vmap).
        wrong_type(name, wanted, value)
