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
    """Code that classes with as many parameters share, under the names of these."""
    parameters = [one for one in fields if one.init]
    defaults = [_default(one) for one in parameters if _default(one) is not _NEEDED]
    if _NEEDED in [_default(one) for one in parameters[len(parameters) - len(defaults) :]]:
        raise TypeError("a field without a default follows one with a default")
    names = tuple([one.name for one in parameters])
    shared: Any = _shared_init(len(names), hasattr(cls, "__post_init__"))
    code = shared.__code__.replace(co_varnames=("self", *names))
    # torch.compile looks for builtins there, which `evaluated` has.
    scope = {**shared.__globals__, "__names__": names, "__store__": _storing(fields)}
    init = FunctionType(code, scope, argdefs=tuple(defaults))
    # Errors about arguments name it.
    init.__name__, init.__qualname__ = "__init__", f"{cls.__qualname__}.__init__"
    return init


@cache
def _shared_init(count: int, checks: bool) -> Callable[..., None]:
    """An __init__ of so many parameters. checks: whether __post_init__ follows."""
    parameters = "".join([f"field{number}, " for number in range(count)])
    lines = [f"__store__(self, __names__, ({parameters}))"] + ["self.__post_init__()"] * checks
    return evaluated.function(f"self, {parameters}", lines, {})


_NEEDED = object()


def _default(one: dataclasses.Field) -> Any:
    """The default of a parameter: MISSING where each instance has its own."""
    if one.default is MISSING and one.default_factory is MISSING:
        return _NEEDED
    return one.default


def _storing(fields: Sequence[dataclasses.Field]) -> Callable[..., None]:
    """A function that stores values in fields of these names, and what the others begin with."""
    makes = {one.name: one.default_factory for one in fields if one.default_factory is not MISSING}
    rest = {one.name: one.default for one in fields if not one.init and one.default is not MISSING}
    if not (makes or rest):
        return _store

    def store(self: object, names: Sequence[str], values: Sequence[Any]) -> None:
        begun = rest | dict(zip(names, values, strict=True))
        for name, make in makes.items():
            if begun.get(name, MISSING) is MISSING:
                begun[name] = make()
        for name, value in begun.items():
            object.__setattr__(self, name, value)

    return store


def _store(self: object, names: Sequence[str], values: Sequence[Any]) -> None:
    for name, value in zip(names, values, strict=True):
        object.__setattr__(self, name, value)


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
