"""Names of a package that load on first use, so that a process waits for what it needs alone."""

import gc
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def names(
    scope: dict[str, Any], public: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package. scope: its globals, which keep what was loaded.
    public: the module that defines each name."""

    def __getattr__(name: str) -> Any:
        if name not in public:
            raise AttributeError(f"module {scope['__name__']!r} has no attribute {name!r}")
        scope[name] = value = getattr(_module(public[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*scope, *public})

    return __getattr__, __dir__


def _module(name: str) -> Any:
    """A module, imported with no collection meanwhile: what an import makes stays, and to go
    through all of torch's objects would be 65 ms of a first call."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        if was_on:
            gc.enable()
