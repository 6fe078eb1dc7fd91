"""Names of a package that load on first use, so that a process waits for what it needs alone."""

import gc
from collections.abc import Mapping
from importlib import import_module
from typing import Any


def load(scope: dict[str, Any], public: Mapping[str, str], name: str) -> Any:
    """The value of `__getattr__` of a package. scope: its globals, which keep what was loaded.
    public: the module that defines each name. Raises AttributeError for any other.

    There is no collection meanwhile: what an import makes stays, and to go through all of torch's
    objects would be 65 ms of a first call.
    """
    if name not in public:
        raise AttributeError(f"module {scope['__name__']!r} has no attribute {name!r}")
    was_on = gc.isenabled()
    gc.disable()
    try:
        value = getattr(import_module(public[name]), name)
    finally:
        if was_on:
            gc.enable()
    scope[name] = value
    return value
