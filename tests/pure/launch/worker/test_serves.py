"""A worker's own side of its channel: it says what it is, answers each call by a kernel or by an
error, and ends with who asked or after a while of nothing to do."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

import heedful
from heedful.launch.code import store
from heedful.launch.code.artifact import MEMORY_HELPS, CompileError
from heedful.launch.code.identity import cache_key, toolchain
from heedful.launch.spec import KernelCall, KernelRef
from heedful.launch.worker import __main__ as worker
from heedful.launch.worker.channel import BYE, CALL, ERROR, HELLO, KERNEL, receive, send
from heedful.launch.worker.codec import encode
from support.artifacts import artifact

if not hasattr(socket, "socketpair"):
    pytest.skip("no pairs of sockets", allow_module_level=True)

COMPILES = "heedful.launch.code.triton_compat"
ONE, OTHER = (
    KernelCall(
        KernelRef("heedful.kernels.portable.shared.unused", name), (1, 1, 1), {}, {"num_warps": 4}
    )
    for name in ("one", "other")
)


# None of these threads removes it.
FOLDER = "a folder"


class Over(Exception):
    """In place of the process only its threads end."""


class Asked:
    """The end of the channel that asks. ends: how often the worker ended itself."""

    def __init__(self, channel: socket.socket):
        self.channel, self.ends, self.listens_aside = channel, 0, False

    def next(self, seconds: float = 20.0) -> tuple[bytes, bytes]:
        return receive(self.channel, time.monotonic() + seconds)

    def end(self, folder: str) -> None:
        assert folder == FOLDER
        self.ends += 1
        with suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)
        raise Over

    def wait_for_the_end(self) -> None:
        give_up = time.monotonic() + 20
        while not self.ends and time.monotonic() < give_up:
            time.sleep(0.01)
        assert self.ends


@contextmanager
def serving(compiles, idle_seconds: float = 60.0) -> Iterator[Asked]:
    """A worker in threads of this process, with this in place of a compiler."""
    made: Any = ModuleType(COMPILES)
    made.compile_artifact = compiles
    mine, theirs = socket.socketpair()
    asked, queue = Asked(mine), SimpleQueue()

    def serve() -> None:
        with suppress(Over, OSError), theirs:
            worker.serve(theirs, idle_seconds, FOLDER)

    listen, listeners = worker._listen, []

    def listens(*args) -> None:
        # Where the one that compiles fails, it alone does not keep the process.
        asked.listens_aside = threading.current_thread().daemon
        listeners.append(threading.current_thread())
        with suppress(Over):
            listen(*args)

    thread = threading.Thread(target=serve, daemon=True)
    with (
        mock.patch.dict(sys.modules, {COMPILES: made}),
        mock.patch.object(worker, "_end", asked.end),
        mock.patch.object(worker, "_listen", listens),
        mock.patch.object(worker, "_prefer_to_be_killed") as prefers,
        mock.patch.object(worker, "SimpleQueue", lambda: queue),
        mine,
    ):
        thread.start()
        try:
            yield asked
        finally:
            # Threads that went on would end the next test's worker, or this process.
            mine.close()
            asked.wait_for_the_end()
            # It has nobody to answer.
            queue.put(b"")
            for one in (thread, *listeners):
                one.join()
        prefers.assert_called_once_with()
        assert asked.listens_aside


def test_a_worker_says_its_toolchain_and_answers_one_call_after_the_other():
    seen = []

    def compiles(call, arch):
        seen.append((call.kernel.function, arch))
        return artifact(call.kernel.function.encode())

    with serving(compiles) as asked:
        assert asked.next() == (HELLO, toolchain().encode())
        for call, arch in ((ONE, "sm_90"), (OTHER, "gfx942"), (ONE, "sm_90")):
            send(asked.channel, CALL, encode(call, arch))
            made = artifact(call.kernel.function.encode())
            assert asked.next() == (KERNEL, store.dump(cache_key(call, arch), made))
    assert seen == [("one", "sm_90"), ("other", "gfx942"), ("one", "sm_90")]


def test_what_is_no_call_has_no_answer():
    with serving(lambda *_: artifact(b"1")) as asked:
        asked.next()
        send(asked.channel, HELLO, encode(OTHER, "sm_90"))
        send(asked.channel, CALL, encode(ONE, "sm_90"))
        key = cache_key(ONE, "sm_90")
        assert asked.next() == (KERNEL, store.dump(key, artifact(b"1")))
        with pytest.raises(TimeoutError):
            asked.next(0.2)


def of(cause: Exception, text: str) -> CompileError:
    error = CompileError(text)
    error.__cause__ = cause
    return error


FULL = OSError(28, "No space left on device", "/tmp/a.ptx")
FILES = "the compiler's files lie in the system's temporary folder, or in that of TMPDIR"
ERRORS = {
    "the compiler's": (CompileError("wrong"), "wrong", False),
    "without words": (KeyError(), "KeyError()", False),
    "memory": (MemoryError("none left"), f"none left: {MEMORY_HELPS}", True),
    "files": (FULL, f"{FULL}: {FILES}", True),
    "memory beneath": (of(MemoryError(), "wrong"), f"wrong: {MEMORY_HELPS}", True),
    "files beneath": (of(FULL, "wrong"), f"wrong: {FILES}", True),
    "help that it has": (
        of(MemoryError(), f"wrong: {MEMORY_HELPS}"),
        f"wrong: {MEMORY_HELPS}",
        True,
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_goes_to_who_asked_with_what_helps_and_the_next_call_is_answered(name):
    error, text, is_of_machine = ERRORS[name]
    outcomes = iter([error, artifact(b"1")])

    def compiles(call, arch):
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with serving(compiles) as asked:
        asked.next()
        send(asked.channel, CALL, encode(ONE, "sm_90"))
        kind, data = asked.next()
        assert (kind, json.loads(data)) == (ERROR, {"text": text, "machine": is_of_machine})
        send(asked.channel, CALL, encode(ONE, "sm_90"))
        assert asked.next()[0] == KERNEL


def test_what_is_no_kernel_of_heedful_is_an_error():
    with serving(lambda *_: artifact(b"1")) as asked:
        asked.next()
        send(asked.channel, CALL, b"[]")
        kind, data = asked.next()
        assert kind == ERROR and "no kernel call" in json.loads(data)["text"]


def test_a_worker_that_is_asked_for_nothing_says_so_and_ends():
    with serving(lambda *_: artifact(b"1"), idle_seconds=0.3) as asked:
        assert [asked.next()[0] for _ in range(2)] == [HELLO, BYE]
        with pytest.raises(EOFError):
            asked.next()


def test_a_worker_ends_as_soon_as_who_asked_is_gone_though_it_compiles():
    is_over = threading.Event()
    with serving(lambda *_: is_over.wait(30)) as asked:
        asked.next()
        send(asked.channel, CALL, encode(ONE, "sm_90"))
        asked.channel.close()
        asked.wait_for_the_end()
        is_over.set()


def test_a_worker_asks_to_be_killed_first_where_memory_runs_out(monkeypatch):
    opened = mock.mock_open()
    monkeypatch.setattr(worker, "open", opened, raising=False)
    worker._prefer_to_be_killed()
    opened.assert_called_once_with("/proc/self/oom_score_adj", "w")
    opened().write.assert_called_once_with("500")
    opened.side_effect = PermissionError
    worker._prefer_to_be_killed()


@pytest.mark.parametrize("leads", [True, False])
def test_the_end_takes_the_files_and_the_group_that_a_worker_leads(leads, tmp_path, monkeypatch):
    """One that a debugger starts is in the group of others, which live on. If the files are gone,
    nothing else goes: what lies in the system's folder is of others."""
    folder, others, ends = tmp_path / "files", tmp_path / "of others", []
    (folder / "of a compiler").mkdir(parents=True)
    others.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(others))
    monkeypatch.setattr(os, "getpgrp", lambda: os.getpid() + (not leads))
    monkeypatch.setattr(os, "killpg", lambda *args: ends.append(args))
    monkeypatch.setattr(os, "_exit", ends.append)
    for _ in range(2):
        worker._end(str(folder))
        assert not folder.exists() and others.exists()
        assert ends == ([(0, 9)] if leads else []) + [0]
        ends.clear()


_PROCESS = """
import os, runpy, sys, types
made = types.ModuleType(sys.argv.pop(1))
def compile_artifact(call, arch):
    raise ValueError(f"inherited: {os.get_inheritable(int(sys.argv[1]))}")
made.compile_artifact = compile_artifact
sys.modules[made.__name__] = made
runpy.run_module("heedful.launch.worker", run_name="__main__")
"""


def test_a_process_of_its_own_serves_the_socket_that_it_is_given_for_so_long(tmp_path):
    mine, theirs = socket.socketpair()
    with mine:
        with theirs:
            # Far from how many seconds it waits.
            place = os.dup2(theirs.fileno(), 120)
            (tmp_path / "its").mkdir()
            command = [sys.executable, "-c", _PROCESS, COMPILES, str(place), "0.5"]
            command.append(str(tmp_path / "its"))
            path = os.pathsep.join(
                [str(Path(heedful.__file__).parents[1]), *filter(None, sys.path)]
            )
            process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=[place],
                start_new_session=True,
            )
            os.close(place)
        asked = Asked(mine)
        assert asked.next(60)[0] == HELLO
        send(mine, CALL, encode(ONE, "sm_90"))
        kind, data = asked.next(60)
        assert kind == ERROR and json.loads(data)["text"] == "inherited: False"
        assert asked.next(60) == (BYE, b"")
    assert process.wait(60) == -9 and not (tmp_path / "its").exists()
