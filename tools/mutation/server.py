"""Runs of tests that start at once: a process that has imported torch forks for each.

    python -m mutation.server PATH torch

listens at a socket's path until its input ends. Each connection is served by a fork of its own: it
reads one request a line and answers each with one line, both JSON. Nothing of heedful is imported,
so that each run imports the sources of its own tree.
"""

import contextlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

# How much longer than its processor time a run may take.
WAIT = 6.0
# The same of one test, which a busy machine may let wait longer than all on average.
WAITS = 20.0
MODES = ("plain", "interpreted")
# pytest's exit code where none of the tests is there.
NO_TESTS = 5
PRELOADED = ("numpy", "torch", "torch.testing", "triton", "triton.experimental.gluon")
PRELOADED += ("hypothesis", "pytest", "typer", "rich", "coverage")
PRELOADED += ("jax", "jax.numpy", "jax.export", "ml_dtypes")


class Hub:
    """One such process. mode: "interpreted" runs kernels in Triton's interpreter. preloaded: what
    every run finds imported."""

    def __init__(self, mode: str, cache: Path, preloaded: Sequence[str] = PRELOADED):
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "HEED"))}
        environment |= {
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *_given_path()]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "HEEDFUL_CACHE_DIR": str(cache),
            # Each mode runs its own (tests/support/runs/interpreted.py).
            "TEST_INTERPRETER_APART": "1",
        }
        if mode == "interpreted":
            environment["TRITON_INTERPRET"] = "1"
        # Paths of sockets are short.
        self._folder = tempfile.TemporaryDirectory(prefix="mutation-")
        self._path = os.path.join(self._folder.name, "socket")
        command = [sys.executable, "-m", "mutation.server", self._path, *preloaded]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)

    def connect(self) -> "Server":
        """A connection, as soon as all is imported."""
        while self._process.poll() is None:
            made = socket.socket(socket.AF_UNIX)
            try:
                made.connect(self._path)
                return Server(made)
            except (FileNotFoundError, ConnectionRefusedError):
                made.close()
            time.sleep(0.05)
        raise RuntimeError("a test server died; its errors are above")

    def close(self) -> None:
        """Ends the process; connections last until they are closed."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


class Server:
    """A connection to such a process, which runs one request at a time."""

    def __init__(self, connection: socket.socket):
        self._connection, self._file = connection, connection.makefile("rw")

    def run(
        self,
        tree: Path,
        tests: list[str],
        seconds: float,
        trace: Path | None = None,
        each: Sequence[float] = (),
    ) -> dict:
        """Runs tests of a tree until the first fails, or with `trace` all of them, and writes there
        what each ran; for at most so many seconds of processor time. each: the same for each test.

        Returns {"code": pytest's exit code or None where time ran out, "seconds", "output"}.
        """
        request = {"tree": str(tree), "tests": tests, "seconds": seconds, "each": list(each)}
        request["trace"] = str(trace) if trace else ""
        self._file.write(json.dumps(request) + "\n")
        self._file.flush()
        answer = self._file.readline()
        if not answer:
            raise RuntimeError("a test server died; its errors are above")
        return json.loads(answer)

    def close(self) -> None:
        """Ends the process that serves it."""
        self._file.close()
        self._connection.close()


class Chosen:
    """A pytest plugin: of what is collected these tests, in this order. A bug may change what a
    case is called. That is no failure: all cases of its test take its place.

    each: how many seconds of processor time a test may take, a few times as many of any other. A
    test that takes longer spins or waits for ever, and ends its process.
    """

    def __init__(self, tests: list[str], each: Sequence[float] = ()):
        self._tests = tests
        self._seconds = dict(zip(tests, each, strict=True)) if each else {}
        self._most = max(each, default=0.0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        seconds = self._seconds.get(item.nodeid, self._most)
        _end_after(seconds)
        try:
            return (yield)
        finally:
            _end_after(0.0)

    def pytest_collection_modifyitems(self, items: list) -> None:
        by_id = {item.nodeid: item for item in items}
        by_function: dict[str, list] = {}
        for item in items:
            by_function.setdefault(item.nodeid.split("[")[0], []).append(item)
        found = {}
        for test in self._tests:
            cases = [by_id[test]] if test in by_id else by_function.get(test.split("[")[0], [])
            found |= {item.nodeid: item for item in cases}
        items[:] = found.values()


def _given_path() -> list[str]:
    """The folders of the caller's PYTHONPATH, which mean the same in every folder."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [os.path.abspath(folder) for folder in given if folder]


def _end_after(seconds: float) -> None:
    """The process ends after so many seconds more; 0: it does not."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, WAITS * seconds)


def serve() -> None:
    path, *names = sys.argv[1:]
    for name in names:
        with contextlib.suppress(ImportError):
            __import__(name)
    # Nobody waits for a fork that serves a connection.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1024)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _serve(connection)
                os._exit(0)
            connection.close()


def _serve(connection: socket.socket) -> None:
    with connection.makefile("rw") as file:
        for line in file:
            file.write(json.dumps(_fork(json.loads(line))) + "\n")
            file.flush()


def _fork(request: dict) -> dict:
    start = time.monotonic()
    log = Path(request["tree"]) / ".mutation-output"
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            _become(request, log)
        finally:
            os._exit(70)
    # A machine that is busy is no sign of an endless loop: processor time is.
    deadline = start + WAIT * request["seconds"]
    pause, done, status = 0.01, 0, 0
    try:
        while not done and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(0.1, pause * 1.3)
            done, status = os.waitpid(child, os.WNOHANG)
    finally:
        # What the tests started dies with them.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
    if not done:
        os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status) if done else None
    output = log.read_text(errors="replace")[-4000:] if log.exists() else ""
    return {"code": code, "seconds": time.monotonic() - start, "output": output}


def _become(request: dict, log: Path) -> None:
    """Runs pytest in this process, which does not return."""
    tree, seconds = request["tree"], int(request["seconds"]) + 1
    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    os.chdir(tree)
    paths = [f"{tree}/src", f"{tree}/tests"]
    # The tree's own come first; then what the caller gave, another compiler's folder say.
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *_given_path()])
    sys.path[:0] = paths
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = io.StringIO()
    options = ["--rootdir", tree, "--tb=line", "--no-header", "-W", "ignore"]
    for name in ("cacheprovider", "xdist", "faulthandler"):
        options += ["-p", f"no:{name}"]
    if request["trace"]:
        from mutation.covering import Tracer

        plugin, files = Tracer(Path(tree), Path(request["trace"])), request["tests"]
    else:
        plugin = Chosen(request["tests"], request["each"])
        files = list(dict.fromkeys(test.split("::")[0] for test in request["tests"]))
        options.append("-x")
    code = pytest.main([*options, *files], plugins=[plugin])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(int(code))


if __name__ == "__main__":
    serve()
