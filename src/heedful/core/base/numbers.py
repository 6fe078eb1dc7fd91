"""Plain Python values from NumPy's numbers and from arrays of one element. (The reprs and JSON of
NumPy's numbers differ, so that keys of kernels and recorded problems would differ.) This module
also checks limits of what a caller may pass: frameworks and kernels count in int32 and compute in
float32. Traced numbers pass unchecked: symbols have no value.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, NoReturn

from heedful.core.base.symbols import Symbol

# No length is longer: positions are int32.
LONGEST = 2**31 - 1
# A window bound from which on there is none: it plus two lengths up to it still fit into an int32.
FAR = 2**29
# Scale and softcap, their reciprocals, and either times log2(e) are normal numbers of float32.
LARGEST_FACTOR = 2.0**100


def wrong_type(name: str, wanted: str, value: Any) -> NoReturn:
    """Raises the TypeError of an argument that is not what is wanted."""
    # To print an array's values might wait for a device.
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
    """Whether it is an array of any framework, or a NumPy scalar."""
    return hasattr(value, "dtype") and hasattr(value, "item")


def element(name: str, value: Any, wanted: str) -> Any:
    """The value in an array of one element; all else as it is. TypeError for other arrays."""
    if not is_array(value):
        return value
    try:
        return value.item()
    except (RuntimeError, ValueError):
        # More or fewer elements than one, or an array without values (fake, under vmap).
        wrong_type(name, wanted, value)


def check_length(name: str, value: Any) -> None:
    """ValueError for a length that no sequence can have."""
    if value.__class__ in (int, Symbol) and value > LONGEST:
        raise ValueError(f"{name} must be <= {LONGEST}, as positions are int32, got {value}")


def parts(value: Any) -> Any:
    """The number of splits, as `whole` returns it, and at most as many as there can be keys."""
    return LONGEST if type(value) is int and value > LONGEST else value


def window(sides: tuple[Any, ...]) -> tuple[Any, ...]:
    """(left, right) or (left, right, first). A bound of FAR or more becomes FAR, and so does a left
    bound if the leading keys include all. Wrong values are returned as they are."""
    # torch.compile handles `type(x)` of a symbolic number, but not `x.__class__`.
    if not any(type(side) is int and side >= FAR for side in sides):
        return sides
    near = [min(side, FAR) if type(side) is int else side for side in sides]
    if near[2:] == [FAR] and near[0] >= 0:
        near[0] = FAR
    # The same object where nothing changes: known calls are recognised by it.
    return sides if near == list(sides) else tuple(near)


def check_window(sides: tuple[Any, ...], longest: Any) -> None:
    """ValueError for a window of FAR or more if the longest sequence is longer, so that it would
    hide keys."""
    if longest > FAR and any(side >= FAR for side in sides):
        raise ValueError(
            f"window_size must be below {FAR}, or -1 for no bound, where a sequence may have"
            f" {longest} tokens, got {sides}"
        )


def check_factor(name: str, value: float, zero: str = "") -> None:
    """ValueError for a number by which float32 scores cannot be both multiplied and divided. zero:
    the meaning of 0, if that is allowed."""
    size = abs(value)
    if not size <= LARGEST_FACTOR:
        raise ValueError(f"{name} must be at most 2**100 in size, got {value}")
    if zero and 0 < size < 1 / LARGEST_FACTOR:
        raise ValueError(f"{name} must be at least 2**-100, or 0 ({zero}), got {value}")
