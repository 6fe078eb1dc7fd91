"""The workers of this process, started when they are needed and kept for the next kernel. It also
limits how many workers of this user compile at once on this machine."""

import atexit
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from heedful.core.base import installed, settings
from heedful.core.base.forks import new_lock
from heedful.core.base.installed import Compiler
from heedful.launch.code.artifact import Artifact, CompileError
from heedful.launch.code.cache import PATIENCE_SECONDS
from heedful.launch.code.folder import Folder
from heedful.launch.code.identity import toolchain
from heedful.launch.spec import KernelCall
from heedful.launch.worker.process import Ended, Worker

log = logging.getLogger("heedful.worker")

# Workers that wait for work, the last used last, by the toolchain that they have.
_idle: dict[str, list[Worker]] = {}
_guard = new_lock()
# How many kernels may compile at once, if more than the settings say.
_asked = 0


def compile_artifact(call: KernelCall, arch: str) -> Artifact:
    """Compiles one call for an architecture, in a worker process. Raises CompileError with the
    kernel's name and advice; the next call starts another worker."""
    chosen = installed.compiler()
    assert chosen is not None
    with _turn():
        while True:
            try:
                worker = _taken(chosen)
            except CompileError as error:
                raise CompileError(f"{call.kernel.function} for {arch}: {error}") from None
            try:
                made = worker.compile(call, arch)
            except Ended:
                continue
            finally:
                _give_back(worker)
            return made


def _taken(chosen: Compiler) -> Worker:
    with _guard:
        waiting = _idle.setdefault(toolchain(chosen), [])
        while waiting:
            worker = waiting.pop()
            if worker.is_running:
                return worker
            worker.end()
    log.info("starting a worker process: %s", chosen.words())
    return Worker(chosen)


def _give_back(worker: Worker) -> None:
    if worker.is_running:
        with _guard:
            _idle.setdefault(worker.toolchain, []).append(worker)


@contextmanager
def _turn() -> Iterator[None]:
    """One of the places to compile in that this user has on this machine."""
    places = [f"{place}.lock" for place in range(max(settings.get("workers"), _asked))]
    user = os.getuid() if hasattr(os, "getuid") else "user"
    with ExitStack() as stack:
        try:
            path = Path(tempfile.gettempdir(), f"heedful-workers-{user}")
            folder = stack.enter_context(Folder(path, create=True))
        except OSError as error:
            log.warning("processes do not take turns to compile: %s", error)
        else:
            stack.enter_context(folder.lock(*places, patience_s=PATIENCE_SECONDS))
        yield


@contextmanager
def at_once(count: int) -> Iterator[None]:
    """Within it, up to `count` kernels may compile at once, even if the settings say fewer."""
    global _asked
    before, _asked = _asked, count
    try:
        yield
    finally:
        _asked = before


def end_all() -> None:
    """Ends the workers that wait for work."""
    with _guard:
        waiting = [worker for workers in _idle.values() for worker in workers]
        _idle.clear()
    for worker in waiting:
        worker.end()


atexit.register(end_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)
