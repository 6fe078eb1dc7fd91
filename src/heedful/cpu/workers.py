"""Runs independent pieces of a call on separate threads, each with one intra-operation thread of
torch.

Torch would run every operation on all threads and wait for the last of them each time; on a machine
that others use too, one that is not scheduled holds up every operation. On two busy cores a forward
takes 0.35 of the time this way (measurements/cpu.md).
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

from heedful.core.base import forks

Item = TypeVar("Item")
State = TypeVar("State")

_lock = forks.new_lock()
_pools: dict[int, "_Pool"] = {}

if hasattr(os, "register_at_fork"):
    # Threads do not survive a fork: a child makes its own.
    os.register_at_fork(after_in_child=_pools.clear)


def for_each(
    groups: Iterable[Sequence[Item]],
    work: Callable[[State, Item], None],
    new_state: Callable[[], AbstractContextManager[State]],
    parallel: bool = True,
) -> None:
    """work(state, item) for every item of every group, with one state to a thread, entered before
    its first item and left after its last.

    A thread takes the items of a group in order, then another group that none has begun, then items
    of the group with most left. So items of a group share what a state holds.

    Groups run in order on the calling thread unless `parallel` and torch.get_num_threads() > 1 and
    there are two items, or where no thread can be had. The first thread of a forked child always
    leaves the items to others: torch's threads do not exist there, and an operation may wait for
    them for ever. The first exception is raised when all threads have stopped.
    """
    queue, stranded = _Queue(groups), forks.is_stranded()
    threads = min(torch.get_num_threads(), len(queue)) if parallel or stranded else 1
    pool = _pool() if threads > 1 or stranded else None
    if pool is None:
        _drain(queue, work, new_state)
        return
    inference = torch.is_inference_mode_enabled()

    def drain() -> None:
        with torch.inference_mode(inference), torch.no_grad():
            _drain(queue, work, new_state)

    errors = pool.run(drain, threads)
    for error in filter(None, errors):
        raise error


class _Queue(Generic[Item]):
    """The rest of the groups."""

    def __init__(self, groups: Iterable[Sequence[Item]]):
        self._new = deque(deque(group) for group in groups if group)
        self._begun: list[deque[Item]] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(len(group) for group in (*self._new, *self._begun))

    def items(self) -> Iterator[Item]:
        """Items for one thread, until nothing is left."""
        group: deque[Item] = deque()
        while True:
            with self._lock:
                if not group and self._new:
                    group = self._new.popleft()
                    self._begun.append(group)
                if not group:
                    group = max(self._begun, key=len, default=group)
                if not group:
                    return
                item = group.popleft()
            yield item


def _drain(queue: _Queue[Item], work, new_state) -> None:
    """Works on what the queue has left."""
    with new_state() as state:
        for item in queue.items():
            work(state, item)


class _Pool:
    """Threads that wait for work, of one intra-operation thread each, for as long as the process
    lives. Those of concurrent.futures take no work after the main thread has ended, when another
    thread may still make calls."""

    def __init__(self, threads: int):
        """Raises RuntimeError where the system has no more threads to give."""
        self._tasks: SimpleQueue = SimpleQueue()
        ready: SimpleQueue = SimpleQueue()
        started = 0
        try:
            for _ in range(threads):
                make = threading.Thread(
                    target=self._serve, args=(ready,), name="heedful-cpu", daemon=True
                )
                make.start()
                started += 1
        except RuntimeError:
            for _ in range(started):
                self._tasks.put(None)
            raise
        for _ in range(threads):
            ready.get()

    def _serve(self, ready: SimpleQueue) -> None:
        torch.get_num_threads()  # makes torch set this thread up, which would undo what follows
        torch.set_num_threads(1)
        ready.put(None)
        while (task := self._tasks.get()) is not None:
            work, done = task
            try:
                work()
                done.put(None)
            except BaseException as error:
                done.put(error)
            del task, work, done

    def run(self, work: Callable[[], None], times: int) -> list[BaseException | None]:
        """Runs work() `times` times at once; returns what each raised, when all have ended."""
        done: SimpleQueue = SimpleQueue()
        for _ in range(times):
            self._tasks.put((work, done))
        return [done.get() for _ in range(times)]


def _pool() -> _Pool | None:
    """A pool of as many threads as torch uses; None if the system has no more."""
    threads = torch.get_num_threads()
    with _lock:
        if threads not in _pools:
            try:
                _pools[threads] = _Pool(threads)
            except RuntimeError:
                return None
            # set_num_threads also sets what threads begin with that torch has not seen yet.
            torch.set_num_threads(threads)
        return _pools[threads]
