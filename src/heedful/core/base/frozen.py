"""Frozen dataclasses that are made quickly.

The standard library compiles up to eight methods for each class, which takes 0.7 ms, and a process
makes some forty classes before its first call. Here one method is generated, and classes with as
many fields share what is compiled of it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import MISSING, FrozenInstanceError, field
from functools import cache
from operator import attrgetter
from types import FunctionType
from typing import Any, Literal, NoReturn, TypeVar, dataclass_transform

from heedful.core.base import evaluated

_Class = TypeVar("_Class", bound=type)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def dataclass(
    *, frozen: Literal[True], slots: bool = False, eq: bool = True
) -> Callable[[_Class], _Class]:
    """As `dataclasses.dataclass`; `dataclasses.replace`, `fields` and `asdict` take the instances.
    Methods of the class are kept."""

    def make(cls: _Class) -> _Class:
        defined = frozenset(vars(cls))
        made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(cls)
        fields = dataclasses.fields(made)
        methods = {"__init__": _init(made, fields), "__repr__": _repr}
        methods |= {"__setattr__": _refuse_to_set, "__delattr__": _refuse_to_delete}
        if eq:
            methods["__eq__"], methods["__hash__"] = _by([f.name for f in fields if f.compare])
        if slots:
            # By default a copy's slots are filled by __setattr__.
            methods |= {"__getstate__": _state, "__setstate__": _fill}
        for name, method in methods.items():
            if name not in defined:
                setattr(made, name, method)
        return made

    return make


def _init(cls: type, fields: Sequence[dataclasses.Field]) -> Callable[..., None]:
    is_plain = all([one.init and one.default_factory is MISSING for one in fields])
    init = (_plain_init if is_plain else _compiled_init)(fields, hasattr(cls, "__post_init__"))
    # Errors about arguments name it.
    init.__name__, init.__qualname__ = "__init__", f"{cls.__qualname__}.__init__"
    return init


def _plain_init(fields: Sequence[dataclasses.Field], checks: bool) -> Callable[..., None]:
    """Of fields that are all parameters, with constants for defaults: code that classes with as
    many fields share, under the names of these."""
    defaults = [one.default for one in fields if one.default is not MISSING]
    if MISSING in [one.default for one in fields[len(fields) - len(defaults) :]]:
        raise TypeError("a field without a default follows one with a default")
    names = tuple([one.name for one in fields])
    shared: Any = _shared_init(len(fields), checks)
    code = shared.__code__.replace(co_varnames=("self", *names))
    return FunctionType(code, {"__names__": names, "__store__": _store}, argdefs=tuple(defaults))


@cache
def _shared_init(count: int, checks: bool) -> Callable[..., None]:
    """An __init__ of so many fields. checks: whether __post_init__ follows."""
    fields = "".join([f"field{number}, " for number in range(count)])
    lines = [f"__store__(self, __names__, ({fields}))"] + ["self.__post_init__()"] * checks
    return evaluated.function(f"self, {fields}", lines, {})


def _store(self: object, names: Sequence[str], values: Sequence[Any]) -> None:
    for name, value in zip(names, values, strict=True):
        object.__setattr__(self, name, value)


def _compiled_init(fields: Sequence[dataclasses.Field], checks: bool) -> Callable[..., None]:
    names: dict[str, Any] = {"object": object, "missing": MISSING}
    parameters, lines = ["self"], []
    for number, one in enumerate(fields):
        value, default = one.name, f"default{number}"
        if one.default_factory is not MISSING:
            names[default] = one.default_factory
            made = f"{default}()"
            value = f"{made} if {value} is missing else {value}" if one.init else made
            default = "missing"
        elif one.default is not MISSING:
            names[default] = one.default
        elif one.init:
            default = ""
        else:
            continue
        if one.init:
            parameters.append(f"{one.name}={default}" if default else one.name)
        # In full: torch.compile does not know the function by another name.
        lines.append(f"object.__setattr__(self, {one.name!r}, {value})")
    lines += ["self.__post_init__()"] * checks
    return evaluated.function(", ".join(parameters), lines, names)


def _by(names: Sequence[str]) -> tuple[Callable, Callable]:
    """Equality and hash by the values of these fields."""
    values = attrgetter(*names) if names else lambda _: ()

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return values(self) == values(other)

    def __hash__(self) -> int:
        return hash(values(self))

    return __eq__, __hash__


def _repr(self) -> str:
    values = [f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr]
    return f"{type(self).__qualname__}({', '.join(values)})"


def _refuse_to_set(self, name: str, value: object) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self) -> list[Any]:
    return [getattr(self, one.name) for one in dataclasses.fields(self)]


def _fill(self, state: list[Any]) -> None:
    for one, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, one.name, value)
