"""Names of a package that load on first use, so that a process waits for what it needs alone."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def load(scope: dict[str, Any], public: Mapping[str, str], name: str) -> Any:
    """The value of `__getattr__` of a package. scope: its globals, which keep what was loaded.
    public: the module that defines each name. Raises AttributeError for any other."""
    if name not in public:
        raise AttributeError(f"module {scope['__name__']!r} has no attribute {name!r}")
    scope[name] = value = getattr(import_module(public[name]), name)
    return value
