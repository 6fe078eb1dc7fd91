"""A worker as who asks has it, with a thread in place of the process: how it is started and ended,
and what each of its messages and each of its ends is for who asked."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import heedful
from heedful.core.base import installed
from heedful.core.base.installed import Compiler
from heedful.launch.code import store
from heedful.launch.code.artifact import MEMORY_HELPS, PACKS_HELP, CompileError
from heedful.launch.code.identity import cache_key, toolchain
from heedful.launch.spec import KernelCall, KernelRef
from heedful.launch.worker import pool, process
from heedful.launch.worker.channel import BYE, CALL, ERROR, HELLO, KERNEL, receive, send
from heedful.launch.worker.codec import decode
from support.artifacts import artifact

if not hasattr(os, "killpg"):
    pytest.skip("no groups of processes", allow_module_level=True)

CALLED = KernelCall(
    KernelRef("heedful.kernels.portable.shared.unused", "one"), (1, 1, 1), {}, {"num_warps": 4}
)
HERE = "HEEDFUL_TRITON=process compiles in this process"


class Started:
    """In place of a process. talks: what it does with its end of the channel; it returns the code
    that the process ends with, None where it does not end."""

    made: list["Started"] = []
    talks: Any = None

    def __init__(self, command, **options):
        self.command, self.options = command, options
        self.pid, self.returncode, self.signals = 4000 + len(self.made), None, []
        self.made.append(self)
        (given,) = options["pass_fds"]
        self.channel = socket.socket(fileno=os.dup(given))
        self.said = os.fdopen(os.dup(options["stdout"].fileno()), "wb")
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        with suppress(EOFError, OSError), self.channel, self.said:
            self.returncode = type(self).talks(self)

    def say(self, text: bytes) -> None:
        self.said.write(text)
        self.said.flush()

    def poll(self):
        return self.returncode

    def wait(self, timeout):
        if self.returncode is None:
            self.thread.join(5)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("worker", timeout)
        return self.returncode

    def kill(self):
        self.signals.append("kill")


@pytest.fixture
def started(tmp_path, monkeypatch):
    """The processes that were begun; none is real."""
    root, temporary = tmp_path / "toolchain", tmp_path / "temporary"
    root.mkdir(mode=0o700)
    temporary.mkdir()
    made = SimpleNamespace(
        compiler=Compiler("3.9.0", root, apart=True), temporary=temporary, processes=[]
    )
    monkeypatch.setattr(Started, "made", made.processes)
    monkeypatch.setattr(process.subprocess, "Popen", Started)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(installed, "compiler", lambda: made.compiler)
    monkeypatch.delenv("HEEDFUL_COMPILE_SECONDS", raising=False)

    def killpg(pid, number):
        (one,) = (p for p in made.processes if p.pid == pid)
        one.signals.append(number)
        if one.returncode is None:
            one.returncode = -number

    monkeypatch.setattr(os, "killpg", killpg)
    monkeypatch.setattr(pool, "_idle", {})

    def talk(*steps, code=None):
        def talks(self):
            send(self.channel, HELLO, toolchain(made.compiler).encode())
            for step in steps:
                kind, data = receive(self.channel)
                assert kind == CALL
                step(self, *decode(data))
            if code is not None:
                return code
            # Until the other end is gone.
            while True:
                receive(self.channel)

        monkeypatch.setattr(Started, "talks", talks)

    made.talk = talk
    made.worker = lambda: process.Worker(made.compiler)
    return made


def makes(own, call, arch):
    send(own.channel, KERNEL, store.dump(cache_key(call, arch), artifact(arch.encode())))


def test_a_worker_is_a_python_of_its_own_with_nothing_of_the_callers(started, monkeypatch):
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.setenv("A_SECRET", "of the caller")
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    monkeypatch.setenv("HEEDFUL_TRITON", str(started.compiler.root))
    started.talk()
    worker = started.worker()
    (own,) = started.processes
    ((theirs,), (scratch,)) = own.options["pass_fds"], started.temporary.iterdir()
    options = ["-B", "-P", "-s", "-S", "-m", "heedful.launch.worker"]
    assert own.command == [sys.executable, *options, str(theirs), "120.0", str(scratch)]
    assert own.options["stdin"] == subprocess.DEVNULL and own.options["start_new_session"]
    assert own.options["stdout"] is own.options["stderr"]
    said = own.options["stdout"]
    assert (Path(said.name), said.mode) == (scratch / "said", "wb")
    assert scratch.name.startswith("heedful-worker-")
    environment = own.options["env"]
    package = str(Path(heedful.__file__).parents[1])
    wanted = {"PYTHONPATH": f"{started.compiler.root}{os.pathsep}{package}", "PYTHONUTF8": "1"}
    wanted |= {"HEEDFUL_TRITON": "process", "TRITON_F32_DEFAULT": "ieee", "LANG": "C.UTF-8"}
    wanted |= dict.fromkeys(("TMPDIR", "TRITON_CACHE_DIR", "TRITON_HOME"), str(scratch))
    kept = {name: os.environ[name] for name in process._KEPT if name in os.environ}
    told = {name: x for name, x in os.environ.items() if name.startswith("TRITON_F32")}
    assert environment == kept | told | wanted
    assert worker.is_running and worker in process._running
    worker.end()
    assert own.signals == [signal.SIGKILL] and not scratch.exists() and not worker.is_running


def test_calls_are_answered_one_after_the_other(started):
    started.talk(makes, makes)
    worker = started.worker()
    for arch in ("sm_90", "gfx942"):
        assert worker.compile(CALLED, arch) == artifact(arch.encode())
    assert worker.is_running
    worker.end()


def reports(text: str, machine: bool):
    facts = json.dumps({"text": text, "machine": machine}).encode()
    return lambda own, *_: send(own.channel, ERROR, facts)


@pytest.mark.parametrize("machine", [False, True])
def test_an_error_names_the_kernel_once_and_a_fault_of_the_machine_ends_the_worker(
    machine, started
):
    started.talk(reports("wrong", machine), reports("one for sm_90: wrong", machine))
    worker = started.worker()
    with pytest.raises(CompileError, match="^one for sm_90: wrong$"):
        worker.compile(CALLED, "sm_90")
    assert worker.is_running is not machine
    if not machine:
        with pytest.raises(CompileError, match="^one for sm_90: wrong$"):
            worker.compile(CALLED, "sm_90")
    worker.end()


def test_another_kernel_than_the_one_that_was_asked_for_is_an_error(started):
    def other(own, call, arch):
        makes(own, call, "gfx942")

    started.talk(other)
    worker = started.worker()
    with pytest.raises(CompileError, match="^one for sm_90: the worker process made another ker"):
        worker.compile(CALLED, "sm_90")
    worker.end()


def test_a_worker_that_had_ended_is_no_error_of_the_kernel(started):
    started.talk(lambda own, *_: send(own.channel, BYE))
    worker = started.worker()
    with pytest.raises(process.Ended):
        worker.compile(CALLED, "sm_90")
    assert started.processes[0].signals == [signal.SIGKILL] and not worker.is_running


def test_a_worker_that_takes_too_long_is_ended(started, monkeypatch):
    is_over = threading.Event()
    started.talk(lambda *_: is_over.wait(20))
    worker = started.worker()
    monkeypatch.setenv("HEEDFUL_COMPILE_SECONDS", "0.2")
    began = time.monotonic()
    with pytest.raises(CompileError, match=r"^one for sm_90: .* after 0\.2 s and was ended; HEEDF"):
        worker.compile(CALLED, "sm_90")
    is_over.set()
    assert time.monotonic() - began >= 0.2 and not worker.is_running


ENDS = {
    3: ("ended with 3", HERE),
    0: ("ended with 0", HERE),
    -9: ("was ended by SIGKILL", MEMORY_HELPS),
    -6: ("was ended by SIGABRT", MEMORY_HELPS),
    -31: ("was ended by SIGSYS", f"a filter of system calls forbids what it does; {PACKS_HELP}"),
    -11: ("was ended by SIGSEGV", HERE),
}
SAID = "first\n" + "x" * 5000 + " \n  last of\nall  \n\n"


@pytest.mark.parametrize("code", ENDS)
@pytest.mark.parametrize("said", ["", "one line", SAID])
def test_an_end_while_it_compiles_says_how_what_was_said_last_and_what_helps(code, said, started):
    started.talk(lambda own, *_: own.say(said.encode()), code=code)
    worker = started.worker()
    with pytest.raises(CompileError) as caught:
        worker.compile(CALLED, "sm_90")
    how, helps = ENDS[code]
    words = {"": "", "one line": ", saying: one line", SAID: ", saying: last of all"}[said]
    assert str(caught.value) == f"one for sm_90: the worker process {how}{words}; {helps}"
    assert not worker.is_running and not list(started.temporary.iterdir())


def test_what_was_said_last_is_cut_where_it_is_long(started):
    started.talk(lambda own, *_: own.say(b"a" * 5000), code=1)
    with pytest.raises(CompileError) as caught:
        started.worker().compile(CALLED, "sm_90")
    assert f", saying: {'a' * 4000};" in str(caught.value)


def test_a_channel_that_is_closed_though_the_process_lives_is_said(started):
    started.talk(lambda own, *_: own.channel.shutdown(socket.SHUT_RDWR))
    with pytest.raises(CompileError) as caught:
        started.worker().compile(CALLED, "sm_90")
    assert str(caught.value) == f"one for sm_90: the worker process closed its channel; {HERE}"


def hello(text: str):
    def talks(own):
        send(own.channel, HELLO, text.encode())
        receive(own.channel)

    return talks


def ends(code: int, said: bytes = b""):
    def talks(own):
        own.say(said)
        return code

    return talks


def is_silent(own):
    receive(own.channel)


NOT_STARTED = {
    "another": (hello("triton 4.5.6"), "it found 'triton 4.5.6', wanted 'triton 3.9.0"),
    "no hello": (lambda own: send(own.channel, BYE, b"what"), "it found 'what', wanted"),
    "ended": (ends(1, b"No module\n"), "the other end is gone, saying: No module; `heedful"),
    "killed": (ends(-9), f"it was ended by SIGKILL; {MEMORY_HELPS}; `heedful toolchain"),
    "silent": (is_silent, "it took too long; `heedful toolchain list` shows others"),
}


@pytest.mark.parametrize("name", NOT_STARTED)
def test_a_worker_that_does_not_begin_says_why_and_leaves_nothing(name, started, monkeypatch):
    talks, said = NOT_STARTED[name]
    monkeypatch.setattr(Started, "talks", talks)
    monkeypatch.setenv("HEEDFUL_COMPILE_SECONDS", "0.3" if name == "silent" else "20")
    with pytest.raises(CompileError) as caught:
        started.worker()
    words = str(caught.value)
    assert words.startswith(f"no worker process could be started with {started.compiler.words()}: ")
    assert said in words and words.endswith(f"shows others, {HERE}, {PACKS_HELP}")
    assert not list(started.temporary.iterdir())


def test_no_python_to_start_is_said_and_other_errors_pass(started, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "")
        with pytest.raises(
            CompileError, match=r"no Python of its own to start \(sys.executable\); `"
        ):
            started.worker()
    started.compiler.root.rmdir()
    with pytest.raises(CompileError, match="No such file"):
        started.worker()
    started.compiler.root.mkdir(mode=0o777)
    started.compiler.root.chmod(0o777)
    with pytest.raises(CompileError, match="has mode 777"):
        started.worker()
    assert not started.processes and not list(started.temporary.iterdir())
    started.compiler.root.chmod(0o700)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(process.subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        started.worker()
    assert not list(started.temporary.iterdir())


def test_a_group_that_is_gone_is_ended_by_its_first_alone(started, monkeypatch):
    def killpg(*_):
        raise PermissionError

    started.talk()
    worker = started.worker()
    monkeypatch.setattr(os, "killpg", killpg)
    own = started.processes[0]
    own.returncode = 0
    worker.end()
    assert own.signals == ["kill"] and not list(started.temporary.iterdir())


def test_a_forked_child_lets_its_parents_workers_go_and_ends_none(started):
    started.talk()
    worker = started.worker()
    process._after_fork()
    (own,) = started.processes
    assert not own.signals and not worker.is_running and own.returncode == 0
    assert worker._channel.fileno() == -1  # pyright: ignore
    assert list(started.temporary.iterdir())
    worker.end()


# The pool


def running() -> list:
    return [worker for workers in pool._idle.values() for worker in workers]


def test_a_worker_is_kept_for_the_next_kernel_and_a_dead_one_replaced(started):
    started.talk(makes, makes)
    for arch in ("sm_90", "gfx942"):
        assert pool.compile_artifact(CALLED, arch) == artifact(arch.encode())
    (first,) = running()
    assert [*pool._idle] == [first.toolchain] and len(started.processes) == 1
    started.processes[0].returncode = 1
    assert pool.compile_artifact(CALLED, "sm_90") == artifact(b"sm_90")
    (second,) = running()
    assert second is not first and len(started.processes) == 2
    # Its files went with it.
    assert first._scratch is not None and not first._scratch.exists()
    pool.end_all()
    assert not running() and not second.is_running


def test_a_worker_that_ended_as_it_was_asked_is_replaced_and_one_that_failed_is_not_kept(started):
    started.talk(makes, lambda own, *_: send(own.channel, BYE))
    pool.compile_artifact(CALLED, "sm_90")
    started.talk(makes, code=3)
    assert pool.compile_artifact(CALLED, "gfx942") == artifact(b"gfx942")
    assert len(started.processes) == 2
    started.processes[1].wait(5)
    started.talk(code=3)
    with pytest.raises(CompileError, match="^one for sm_90: "):
        pool.compile_artifact(CALLED, "sm_90")
    assert not running()


def test_a_worker_that_cannot_begin_is_an_error_that_names_the_kernel(started, monkeypatch):
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(CompileError, match="^one for sm_90: no worker process could be started"):
        pool.compile_artifact(CALLED, "sm_90")


@pytest.mark.parametrize(("setting", "asked", "places"), [("3", 0, 3), ("1", 2, 2), ("3", 2, 3)])
def test_kernels_compile_in_as_many_places_as_the_settings_say_or_are_asked_for(
    setting, asked, places, started, monkeypatch
):
    locked: list = []

    class Turns:
        def __init__(self, path, create):
            locked.append((Path(path), create))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            locked.append("closed")

        @contextmanager
        def lock(self, *names, patience_s):
            locked.append((names, patience_s))
            yield
            locked.append("unlocked")

    monkeypatch.setattr(pool, "Folder", Turns)
    monkeypatch.setenv("HEEDFUL_WORKERS", setting)
    started.talk(makes)
    with pool.at_once(asked):
        pool.compile_artifact(CALLED, "sm_90")
    assert not pool._asked
    folder = started.temporary / f"heedful-workers-{os.getuid()}"
    names = tuple(f"{place}.lock" for place in range(places))
    turn = [(folder, True), (names, pool.PATIENCE_SECONDS), "unlocked", "closed"]
    assert locked == turn
    pool.end_all()


def test_without_a_folder_for_turns_kernels_compile_all_the_same(started, monkeypatch, caplog):
    def refused(*_, **__):
        raise PermissionError("no room for you")

    monkeypatch.setattr(pool, "Folder", refused)
    started.talk(makes)
    with caplog.at_level("WARNING", logger="heedful.worker"):
        assert pool.compile_artifact(CALLED, "sm_90") == artifact(b"sm_90")
    assert "no room for you" in caplog.text
    pool.end_all()


def test_a_start_is_logged_and_turns_are_taken_where_users_have_no_number(
    started, monkeypatch, caplog
):
    monkeypatch.delattr(os, "getuid")
    folders: list[Path] = []

    @contextmanager
    def turns(path, create):
        folders.append(path)
        yield SimpleNamespace(lock=lambda *names, patience_s: nullcontext())

    monkeypatch.setattr(pool, "Folder", turns)
    monkeypatch.setattr(process, "Folder", lambda *_, **__: SimpleNamespace(__exit__=lambda: None))
    started.talk(makes)
    with caplog.at_level("INFO", logger="heedful.worker"):
        pool.compile_artifact(CALLED, "sm_90")
    assert folders == [started.temporary / "heedful-workers-user"]
    said = f"starting a worker process: {started.compiler.words()}"
    assert [(r.name, r.getMessage()) for r in caplog.records] == [("heedful.worker", said)]
    pool.end_all()


def test_more_at_once_last_as_long_as_they_are_asked_for():
    with suppress(ValueError), pool.at_once(3):
        with pool.at_once(5):
            assert pool._asked == 5
        assert pool._asked == 3
        raise ValueError
    assert pool._asked == 0


_FORKS = """
import os
from heedful.launch.worker import pool, process
class Kept:
    is_running = True
    def end(self): print("ended", flush=True)
    def let_go(self): print("let go", flush=True)
kept = Kept()
pool._idle["a toolchain"] = [kept]
process._running.add(kept)
if not os.fork():
    print(len(pool._idle), flush=True)
    os._exit(0)
os.wait()
print(len(pool._idle), flush=True)
"""


def test_a_forked_child_has_a_pool_of_its_own_and_the_end_of_a_process_ends_its_workers():
    paths = [str(Path(heedful.__file__).parents[1]), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", _FORKS],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split("\n") == ["let go", "0", "1", "ended", ""], done.stderr
