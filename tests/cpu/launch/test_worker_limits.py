"""Limits of the system and of containers stop a worker: an error names the kernel and what helps,
and nothing is left behind. With limits that are lifted the next call compiles."""

import os
import re
import shlex
import sys
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("triton")
if not Path("/proc/self/environ").exists():
    pytest.skip("no /proc", allow_module_level=True)

from cpu.launch.test_worker import parent
from support import seccomp

SLOW = partial(pytest.param, marks=pytest.mark.slow)
FILTERS = pytest.mark.skipif(not seccomp.IS_SUPPORTED, reason="filters are for Linux on x86-64")
TRIED = """
try:
    print(compiler.compile_now(CALL, "sm_90").symbol)
except RuntimeError as error:
    print(error)
"""


def said(code: str, folder: Path) -> str:
    """What a process prints that compiles with this done before: a line;
    nothing of its workers is left."""
    words = parent(code + TRIED, folder).communicate(timeout=120)[0]
    assert not list(folder.glob("heedful-worker-*"))
    return words


def error(words: str) -> str:
    """The error that was printed, which names the kernel."""
    assert words.startswith("clear_unused for sm_90: ") and words.count("\n") == 1, words
    return words


LIMITED = """
import resource
before = resource.getrlimit(resource.RLIMIT_{name})
resource.setrlimit(resource.RLIMIT_{name}, ({value}, before[1]))
try:
    compiler.compile_now(CALL, "sm_90")
except RuntimeError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_{name}, before)
print(compiler.compile_now(CALL, "sm_90").symbol)
"""


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        SLOW("AS", 100 << 20, "no worker process could be started"),
        ("FSIZE", 4000, "File too large.*TMPDIR"),
        SLOW("NOFILE", 6, "Too many open files"),
    ],
)
def test_limits_of_the_system_are_errors_that_say_what_helps(tmp_path, name, value, says):
    """No more memory, no more room, no more files."""
    code = LIMITED.format(name=name, value=value)
    words = parent(code, tmp_path).communicate(timeout=120)[0]
    failed, compiled = words.splitlines(keepends=True)
    assert re.search(says, error(failed)) and compiled == "clear_unused\n"
    assert not list(tmp_path.glob("heedful-worker-*"))


@FILTERS
@pytest.mark.parametrize("denied", ["process", SLOW("socketpair")])
def test_a_process_that_may_start_no_other_says_what_helps(denied, tmp_path):
    code = f"from support import seccomp\nseccomp.deny([{denied!r}], 'EPERM')"
    words = error(said(code, tmp_path))
    assert "no worker process could be started" in words and "not permitted" in words
    assert "a pack of `heedful prebuild` (HEEDFUL_PACK) needs no compiler" in words


@FILTERS
@pytest.mark.parametrize(
    ("action", "denied", "says"),
    [
        (
            "EPERM",
            "process",
            "not permitted: the compiler runs an assembler: .*HEEDFUL_PACK",
        ),
        ("kill", "process", "ended by SIGSYS; a filter of system calls.*HEEDFUL_PACK"),
        SLOW("EPERM", "execve", "no worker process could be started .*not permitted.*_PACK"),
        SLOW("kill", "mkdir", "ended by SIGSYS; a filter of system calls.*HEEDFUL_PACK"),
    ],
)
def test_a_worker_behind_a_filter_of_system_calls_says_what_helps(action, denied, says, tmp_path):
    python = tmp_path / "python"
    words = [sys.executable, str(Path(seccomp.__file__)), action, denied, sys.executable]
    python.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    python.chmod(0o755)
    assert re.search(says, error(said(f"sys.executable = {str(python)!r}", tmp_path)))


@FILTERS
def test_a_process_that_compiles_itself_behind_a_filter_says_what_helps(tmp_path):
    code = f"""
from support import seccomp
installed.compiler = lambda: OWN
os.environ["TRITON_CACHE_DIR"] = {str(tmp_path / "triton")!r}
seccomp.deny(["process"], "EPERM")
"""
    assert re.search("runs an assembler: .*HEEDFUL_PACK", error(said(code, tmp_path)))


@contextmanager
def group(controller: str, limit: str, most: int):
    """A folder of this controller of cgroups, with a limit; processes join by `cgroup.procs`."""
    first = Path("/sys/fs/cgroup") / controller
    folder = (first if first.exists() else first.parent) / f"heedful-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(most))
    except OSError as missing:
        with suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no cgroups to make here: {missing}")
    try:
        yield folder
    finally:
        folder.rmdir()


def joined(folder: Path) -> str:
    return f"Path({str(folder / 'cgroup.procs')!r}).write_text(str(os.getpid()))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "says"),
    [
        (2, "no worker process could be started .*HEEDFUL_PACK"),
        (3, "runs an assembler: .*HEEDFUL_PACK"),
    ],
)
def test_a_limit_of_processes_of_a_group_says_what_helps(most, says, tmp_path):
    with group("pids", "pids.max", most) as folder:
        assert re.search(says, error(said(joined(folder), tmp_path)))


@pytest.mark.slow
def test_a_limit_of_memory_of_a_group_ends_the_worker_and_says_what_helps(tmp_path):
    old = Path("/sys/fs/cgroup/memory").exists()
    limit = "memory.limit_in_bytes" if old else "memory.max"
    with group("memory", limit, 35 << 20) as folder:
        words = error(said(joined(folder), tmp_path))
        assert re.search("ended by SIGKILL; where memory is short, .*HEEDFUL_WORKERS", words)
