"""Locks that a forked child may use: another thread of the parent may hold one at the fork, and in
the child nobody would ever release it."""

import os
import threading
from weakref import WeakSet

_locks: WeakSet = WeakSet()


def new_lock() -> threading.Lock:
    """A lock that is free in a forked child, whoever held it in the parent. What outlives a call is
    guarded by such locks only."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def _free() -> None:
    # As the standard library does for its own locks.
    for lock in list(_locks):
        lock._at_fork_reinit()  # pyright: ignore[reportAttributeAccessIssue]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free)
