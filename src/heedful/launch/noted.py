"""Tells of each program that is bound to who listens, such as `record`. Calls load this alone."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from heedful.core.base.arrays import ArraySpec
from heedful.core.base.forks import new_lock
from heedful.core.planning.plan import Plan

_lock = new_lock()
_listeners: list[Callable[..., None]] = []


def note(plan: Plan, direction: str, buffers: Mapping[str, ArraySpec], **options: Any) -> None:
    """Tells of a program with all arguments; called wherever one is bound."""
    if not _listeners:
        return
    with _lock:
        for listener in _listeners:
            listener(plan, direction, buffers, **options)


@contextmanager
def listening(listener: Callable[..., None]) -> Iterator[None]:
    """Tells the listener what `note` gets while it is open, one call at a time."""
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)
