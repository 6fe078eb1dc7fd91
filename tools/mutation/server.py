"""Runs of tests that start at once: a process that has imported torch forks for each.

    python -m mutation.server PATH torch

listens at a socket's path until its input ends. Each connection is served by a fork of its own: it
reads one request a line and answers each with one line, both JSON. Nothing of heedful is imported,
so that each run imports the sources of its own tree.
"""

import contextlib
import gc
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
WAITS = 6.0
MODES = ("plain", "interpreted")
# pytest's exit code where none of the tests is there.
NO_TESTS = 5
PRELOADED = ("numpy", "torch", "torch.testing", "triton", "triton.experimental.gluon")
PRELOADED += ("hypothesis", "pytest", "typer", "rich", "coverage")
PRELOADED += ("jax", "jax.numpy", "jax.export", "ml_dtypes")
PRELOADED += ("torch.distributed", "torch._dynamo", "torch.utils.checkpoint")
# Files of tests that are collected at a time: to collect one may take longer than its tests, and
# the first few notice most bugs.
GROUP = 3
# Where a run says which test it is at; what is there when it fails is what failed.
TOLD = ".mutation-test"


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

        Returns {"code": pytest's exit code or None where time ran out, "seconds", "output", "test":
        the one that ran last, or the file that could not be collected}.
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
    """A pytest plugin: of what is collected these tests, in this order; a file stands for all of
    its tests. A bug may change what a case is called. That is no failure: all cases of its test
    take its place.

    each: how many seconds of processor time a test may take, a few times as many of any other. A
    test that takes longer spins or waits for ever, and ends its process.
    """

    def __init__(self, tests: list[str], each: Sequence[float] = (), told: Path | None = None):
        self._tests, self._told = tests, told
        self._seconds = dict(zip(tests, each, strict=True)) if each else {}
        self._most = max(each, default=0.0)

    def _tell(self, name: str) -> None:
        if self._told:
            self._told.write_text(name)

    def pytest_collectreport(self, report):
        if report.failed:
            self._tell(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self._tell(item.nodeid)
        seconds = self._seconds.get(item.nodeid, self._most)
        _end_after(seconds)
        try:
            return (yield)
        finally:
            _end_after(0.0)

    def pytest_collection_modifyitems(self, items: list) -> None:
        by_id = {item.nodeid: item for item in items}
        groups: dict[str, list] = {}
        for item in items:
            groups.setdefault(item.nodeid.split("::")[0], []).append(item)
            groups.setdefault(item.nodeid.split("[")[0], []).append(item)
        found = {}
        for test in self._tests:
            cases = [by_id[test]] if test in by_id else groups.get(test.split("[")[0], [])
            found |= {item.nodeid: item for item in cases}
        items[:] = found.values()


def in_groups(tests: Sequence[str]) -> list[list[str]]:
    """The tests in their order; a group has tests of GROUP files, the next of twice as many."""
    groups: list[list[str]] = [[]]
    files: set[str] = set()
    most = GROUP
    for test in tests:
        files.add(test.split("::")[0])
        if len(files) > most:
            groups.append([])
            files, most = {test.split("::")[0]}, 2 * most
        groups[-1].append(test)
    return groups


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
    # Forks share what is here: nobody is to look for garbage among it.
    gc.collect()
    gc.freeze()
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
    log, told = (Path(request["tree"]) / name for name in (".mutation-output", TOLD))
    told.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            _be_as_nice()
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
    test = told.read_text() if told.exists() else ""
    return {"code": code, "seconds": time.monotonic() - start, "output": output, "test": test}


def _be_as_nice() -> None:
    """Linux shares a machine between sessions first: a new one is to be as nice as its process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(os.nice(0)))


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
    # Plain assertions: to write those of a file anew takes longer than to read it compiled.
    options = ["--rootdir", tree, "--tb=line", "--no-header", "-W", "ignore", "--assert=plain"]
    # At its end unraisableexception looks several times for garbage among all that is imported,
    # which takes longer than most tests.
    for name in ("cacheprovider", "xdist", "faulthandler", "unraisableexception"):
        options += ["-p", f"no:{name}"]
    if request["trace"]:
        from mutation.covering import Tracer

        plugin = Tracer(Path(tree), Path(request["trace"]))
        code = pytest.main([*options, *request["tests"]], plugins=[plugin])
    else:
        code = _run([*options, "-x"], request)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(int(code))


def _run(options: list[str], request: dict) -> int:
    """Runs groups of tests one after the other; returns pytest's exit code of the first that
    fails."""
    seconds = dict(zip(request["tests"], request["each"], strict=False))
    codes = set()
    for tests in in_groups(request["tests"]):
        each = [seconds[test] for test in tests] if seconds else ()
        files = list(dict.fromkeys(test.split("::")[0] for test in tests))
        plugin = Chosen(tests, each, Path(request["tree"]) / TOLD)
        code = int(pytest.main([*options, *files], plugins=[plugin]))
        if code not in (0, NO_TESTS):
            return code
        codes.add(code)
    return min(codes, default=NO_TESTS)


if __name__ == "__main__":
    serve()
