"""State that a forked child must not use as it is: locks that another thread of the parent held,
which nobody will release, and the threads of libraries, which do not exist in the child.

The thread that called fork is the only one in the child, and libraries do not notice: OpenMP, and
so torch on a CPU, waits for its threads for ever. Threads that the child makes work.
"""

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

_locks: WeakSet = WeakSet()
# In a forked child: the thread that called fork.
_stranded: int | None = None
_helper: SimpleQueue | None = None


def new_lock() -> threading.Lock:
    """A lock that is free in a forked child, whoever held it in the parent. Only such locks guard
    state that outlives a call."""
    return _freed(threading.Lock())


def new_reentrant_lock() -> Any:
    """As `new_lock`, for a thread that may take the lock again while it holds it."""
    return _freed(threading.RLock())


def _freed(lock: Any) -> Any:
    _locks.add(lock)
    return lock


def is_stranded() -> bool:
    """Whether this process is a forked child and this its first thread."""
    return _stranded is not None and _stranded == threading.get_ident()


def on_own_thread(function: Callable, *arguments) -> Any:
    """function(*arguments), on a thread made in this process if the calling one is stranded. The
    caller passes on what belongs to a thread, such as torch's modes."""
    global _helper
    if not is_stranded():
        return function(*arguments)
    if _helper is None:
        _helper = SimpleQueue()
        threading.Thread(target=_serve, args=(_helper,), name="heedful", daemon=True).start()
    done: SimpleQueue = SimpleQueue()
    _helper.put((function, arguments, done))
    result, error = done.get()
    if error is not None:
        raise error
    return result


def _serve(tasks: SimpleQueue) -> None:
    while True:
        function, arguments, done = tasks.get()
        try:
            done.put((function(*arguments), None))
        except BaseException as error:
            done.put((None, error))
        del function, arguments, done


def _after_fork() -> None:
    global _stranded, _helper
    _stranded, _helper = threading.get_ident(), None
    # As the standard library does for its own locks.
    for lock in list(_locks):
        lock._at_fork_reinit()  # pyright: ignore[reportAttributeAccessIssue]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
