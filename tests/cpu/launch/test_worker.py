"""A compiler in a process of its own: it makes the same code, takes nothing of the caller's
environment, ends with the caller, and its faults are errors that name the kernel and what helps."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
if not Path("/proc/self/environ").exists():
    pytest.skip("no /proc", allow_module_level=True)

import heedful
from heedful.core.base import installed
from heedful.core.base.device import by_name
from heedful.core.base.installed import Compiler
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.launch import compiler, prebuild
from heedful.launch.code.artifact import CompileError
from heedful.launch.code.identity import cache_key
from heedful.launch.program.programs import program
from heedful.launch.spec import KernelCall
from heedful.launch.worker import pool, process
from heedful.launch.worker.codec import encode

SLOW = partial(pytest.param, marks=pytest.mark.slow)
OWN = installed.compiler()
assert OWN is not None
SOURCES = Path(heedful.__file__).parents[1]


def some_call() -> KernelCall:
    """A kernel that compiles in half a second."""
    problem = AttentionProblem.dense(2, 200, 300, 8, total_q=330, used_q=True)
    made = program(plan(problem, by_name("B200"), backend="portable"), "forward")
    return next(call for call in made.calls if call.kernel.function == "clear_unused")


CALL = some_call()


@pytest.fixture
def apart(tmp_path, monkeypatch) -> Iterator[Path]:
    """Workers with this process's own Triton, and a folder for what they put into the system's
    temporary one: nothing is left in it."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for setting in ("HEEDFUL_WORKERS", "HEEDFUL_COMPILE_SECONDS"):
        monkeypatch.delenv(setting, raising=False)
    assert OWN is not None
    chosen = Compiler(OWN.version, OWN.root, apart=True)
    monkeypatch.setattr(installed, "compiler", lambda: chosen)
    yield folder
    running = [worker for worker in process._running if worker.is_running]
    pool.end_all()
    assert not any(worker.is_running for worker in running)
    assert [path.name for path in folder.rglob("*")] == [f"heedful-workers-{os.getuid()}"]


# An assembler that does something else first, if it is told to by a file beside it.
_PTXAS = """#!/bin/sh
here=$(dirname "$0")
if [ "$1" != --version ] && [ -e "$here/order" ]; then . "$here/order"; fi
exec {ptxas} "$@"
"""


@pytest.fixture
def order(apart, tmp_path, monkeypatch):
    """Has the assembler of workers run these lines of a shell; None: nothing more."""
    tools = tmp_path / "tools"
    tools.mkdir()
    assert OWN is not None
    for name, path in OWN.assemblers.items():
        (tools / name).write_text(_PTXAS.format(ptxas=path))
        (tools / name).chmod(0o755)
        monkeypatch.setenv(f"TRITON_{name.upper().replace('-', '_')}_PATH", str(tools / name))

    def give(lines: str | None) -> Path:
        (tools / "order").unlink(missing_ok=True)
        if lines is not None:
            (tools / "order").write_text(lines)
        return tools

    return give


def worker() -> process.Worker:
    """The one that waits for work."""
    (waiting,) = [w for workers in pool._idle.values() for w in workers]
    return waiting


def is_alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition, seconds: float = 30) -> bool:
    give_up = time.monotonic() + seconds
    while not condition() and time.monotonic() < give_up:
        time.sleep(0.02)
    return condition()


def test_a_worker_makes_what_this_process_makes_and_is_kept(apart, monkeypatch, tmp_path):
    # Its text names sources: not those of another checkout that Triton compiled before.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    there = compiler.compile_now(CALL, "sm_90")
    first = worker()
    own = first._process
    # Where memory runs out, it goes before the caller.
    assert own is not None and Path(f"/proc/{own.pid}/oom_score_adj").read_text() == "500\n"
    assert compiler.compile_now(CALL, "gfx942").target == "hip:gfx942"
    assert worker() is first
    from heedful.launch.code.triton_compat import compile_artifact

    assert there == compile_artifact(CALL, "sm_90")
    assert re.fullmatch(r"triton [\d.]+\S*, ptxas[a-z-]* [\d.]+", there.toolchain)


def test_a_worker_has_none_of_the_callers_environment_but_what_compilers_are_told(
    apart, tmp_path, monkeypatch
):
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "triton.py").write_text("raise ImportError('of the current folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "sitecustomize.py"))
    monkeypatch.setenv("A_SECRET", "of the caller")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    compiler.compile_now(CALL, "sm_90")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "cache").exists()
    own = worker()._process
    assert own is not None
    text = Path(f"/proc/{own.pid}/environ").read_bytes().decode()
    given = dict(line.split("=", 1) for line in text.split("\0") if line)
    assert given.pop("TRITON_F32_DEFAULT") == "ieee"
    # What it would write beside its sources may be cut short there.
    assert b"-B" in Path(f"/proc/{own.pid}/cmdline").read_bytes().split(b"\0")
    assert {given[name] for name in ("TMPDIR", "TRITON_CACHE_DIR", "TRITON_HOME")} == {
        str(worker()._scratch)
    }
    assert given["PYTHONPATH"].split(os.pathsep) == [str(installed.compiler().root), str(SOURCES)]  # pyright: ignore
    fixed = {"TMPDIR", "TRITON_CACHE_DIR", "TRITON_HOME", "PYTHONPATH", "PYTHONUTF8"}
    assert set(given) <= {*process._KEPT, *fixed, "HEEDFUL_TRITON"}


def test_a_worker_prints_nothing_here_and_speaks_json(apart, order, capfd):
    order("echo printed; echo printed >&2")
    compiler.compile_now(CALL, "sm_90")
    assert capfd.readouterr() == ("", "")
    for file in Path(process.__file__).parent.glob("*.py"):
        assert not re.search(r"pickle|marshal|multiprocessing|\bexec\(|\beval\(", file.read_text())


def fails(match: str) -> str:
    """The error of a kernel, which names it; nothing of its worker is left."""
    with pytest.raises(CompileError, match=match) as caught:
        compiler.compile_now(CALL, "sm_90")
    assert str(caught.value).startswith("clear_unused for sm_90: ")
    assert not [w for w in process._running if w.is_running]
    return str(caught.value)


def test_a_worker_that_is_killed_is_an_error_and_the_next_call_starts_another(order):
    order("kill -9 $PPID; sleep 60")
    fails("ended by SIGKILL; where memory is short, .*HEEDFUL_WORKERS")
    order("kill -SEGV $PPID; sleep 60")
    fails("ended by SIGSEGV.*HEEDFUL_TRITON=process")
    order(None)
    assert compiler.compile_now(CALL, "sm_90").symbol == "clear_unused"


@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_waits_is_not_missed(apart):
    compiler.compile_now(CALL, "sm_90")
    first = worker()
    assert first._process is not None
    os.kill(first._process.pid, signal.SIGKILL)
    assert wait_for(lambda: not first.is_running)
    compiler.compile_now(CALL, "sm_90")
    assert worker() is not first


def test_a_worker_that_hangs_is_ended_with_what_it_started(order, monkeypatch):
    compiler.compile_now(CALL, "gfx942")
    monkeypatch.setenv("HEEDFUL_COMPILE_SECONDS", "1.5")
    tools = order('echo $$ > "$here/pid"; exec sleep 600')
    began = time.monotonic()
    fails(r"had not compiled it after 1.5 s and was ended; HEEDFUL_COMPILE_SECONDS allows more")
    assert time.monotonic() - began < 30
    assert wait_for(lambda: not is_alive(int((tools / "pid").read_text())))
    order(None)
    monkeypatch.delenv("HEEDFUL_COMPILE_SECONDS")
    assert compiler.compile_now(CALL, "sm_90").symbol == "clear_unused"


@pytest.mark.slow
def test_a_worker_that_is_stopped_hangs(apart, monkeypatch):
    compiler.compile_now(CALL, "gfx942")
    stopped = worker()._process
    assert stopped is not None
    os.kill(stopped.pid, signal.SIGSTOP)
    monkeypatch.setenv("HEEDFUL_COMPILE_SECONDS", "0.2")
    fails("after 0.2 s")


def test_other_threads_run_on_meanwhile(order):
    compiler.compile_now(CALL, "gfx942")
    order("sleep 1")
    ticks, is_over = [], threading.Event()

    def tick():
        while not is_over.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    compiler.compile_now(CALL, "sm_90")
    is_over.set()
    thread.join()
    assert len(ticks) > 20 and max(b - a for a, b in zip(ticks, ticks[1:], strict=False)) < 0.9


@pytest.mark.parametrize("most", [SLOW(1), 2])
def test_so_many_kernels_compile_at_once_on_this_machine(order, most, monkeypatch):
    monkeypatch.setenv("HEEDFUL_WORKERS", str(most))
    tools = order('echo + >> "$here/log"; sleep 0.7; echo - >> "$here/log"')
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda arch: compiler.compile_now(CALL, arch), ["sm_90"] * 3))
    inside = [0]
    for line in (tools / "log").read_text().split():
        inside.append(inside[-1] + (1 if line == "+" else -1))
    assert max(inside) == most
    assert sum(map(len, pool._idle.values())) <= most


def test_a_list_of_kernels_is_compiled_by_as_many_workers_as_are_asked_for(
    order, tmp_path, monkeypatch
):
    monkeypatch.setenv("HEEDFUL_WORKERS", "1")
    monkeypatch.setenv("HEEDFUL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_artifacts", {})
    # Each waits for the other.
    both = 'while [ $(wc -l < "$here/log") -lt 2 ]; do sleep 0.1; done'
    tools = order(f'echo + >> "$here/log"; {both}')
    other = replace(CALL, options={**CALL.options, "num_warps": 2})
    wanted = {"one": (CALL, "sm_90"), "two": (other, "sm_90")}
    made = dict(prebuild._compiled(wanted, 2))
    assert made["one"].num_warps != made["two"].num_warps == 2
    assert (tools / "log").read_text() == "+\n+\n" and not pool._asked


@pytest.mark.slow
def test_a_worker_that_has_nothing_to_do_ends_and_is_replaced(apart, monkeypatch):
    monkeypatch.setattr(process, "IDLE_SECONDS", 0.3)
    for _ in range(2):
        assert compiler.compile_now(CALL, "gfx942").symbol == "clear_unused"
        idle = worker()
        assert wait_for(lambda idle=idle: not idle.is_running)
        # Its files went with it.
        assert idle._scratch is not None and not idle._scratch.exists()


@pytest.mark.slow
def test_a_worker_that_ends_just_as_it_is_asked_is_replaced(apart, monkeypatch):
    monkeypatch.setattr(process, "IDLE_SECONDS", 0.1)
    compiler.compile_now(CALL, "gfx942")
    assert wait_for(lambda: not worker().is_running)
    real: Any = process.Worker.is_running
    answers = iter([True])
    seems = property(lambda asked: next(answers, None) or real.fget(asked))
    monkeypatch.setattr(process.Worker, "is_running", seems)
    assert compiler.compile_now(CALL, "gfx942").symbol == "clear_unused"


def test_the_compilers_own_error_is_passed_on_and_the_worker_stays(apart, monkeypatch):
    compiler.compile_now(CALL, "gfx942")
    kept = worker()
    bad = KernelCall(CALL.kernel, (1, 1, 1), {"nothing": 1})
    with pytest.raises(CompileError, match=r"^clear_unused for sm_90: .*missing \["):
        compiler.compile_now(bad, "sm_90")
    with pytest.raises(CompileError, match="arch must be"):
        compiler.compile_now(CALL, "of tomorrow")
    assert worker() is kept


@pytest.mark.parametrize(
    "wrong", ["no Triton", "another Triton", "a Triton that fails", "no Python"]
)
def test_a_worker_that_cannot_be_started_says_what_helps(apart, wrong, tmp_path, monkeypatch):
    assert OWN is not None
    root, version, said = OWN.root, OWN.version, ""
    if wrong == "another Triton":
        version, said = "4.5.6", "it found 'triton .*wanted 'triton 4.5.6"
    if wrong in ("no Triton", "a Triton that fails"):
        root, said = tmp_path / "made", "No module named 'triton'"
        root.mkdir()
    if wrong == "a Triton that fails":
        (root / "triton").mkdir()
        (root / "triton" / "__init__.py").write_text("import gone")
        said = "No module named 'gone'"
    if wrong == "no Python":
        monkeypatch.setattr(sys, "executable", "/proc/nowhere/python")
        said = "No such file"
    monkeypatch.setattr(installed, "compiler", lambda: Compiler(version, root, apart=True))
    with pytest.raises(CompileError, match=f"(?s)no worker process .*{said}.*HEEDFUL_TRITON=proc"):
        compiler.compile_now(CALL, "sm_90")


_PARENT = """
import os, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[2].split(os.pathsep)
from cpu.launch.test_worker import CALL, OWN
from heedful.core.base import installed
from heedful.core.base.installed import Compiler
from heedful.launch import prebuild
from heedful.launch import compiler
from heedful.launch.worker import pool, process
from heedful.launch.worker.codec import encode
installed.compiler = lambda: Compiler(OWN.version, OWN.root, apart=True)
def pids():
    return [worker._process.pid for worker in process._running if worker.is_running]
exec(sys.argv[1])
"""


def parent(code: str, folder: Path, **variables: str) -> subprocess.Popen:
    """Another process, with workers of its own."""
    paths = [str(SOURCES), str(Path(__file__).parents[2]), *filter(None, sys.path)]
    return subprocess.Popen(
        [sys.executable, "-c", _PARENT, code, os.pathsep.join(paths)],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(folder), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    "end", ["os._exit(0)", *map(SLOW, ["os.kill(os.getpid(), 9)", "sys.exit()"])]
)
def test_a_worker_ends_with_its_parent_though_a_fork_of_it_lives_on(tmp_path, end):
    code = f"""
compiler.compile_now(CALL, "gfx942")
child = os.fork()
if not child:
    os.close(1); os.close(2)
    time.sleep(600)
print(child, *pids(), flush=True)
{end}
"""
    done = parent(code, tmp_path)
    child, own = map(int, done.communicate(timeout=120)[0].split())
    try:
        assert wait_for(lambda: not is_alive(own)) and is_alive(child)
        # Its files went with it.
        assert wait_for(lambda: not list(tmp_path.glob("heedful-worker-*")))
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_worker_that_compiles_ends_with_its_parent(tmp_path):
    code = """
import threading
threading.Thread(target=compiler.compile_now, args=(CALL, "sm_90"), daemon=True).start()
while not pids() or not list(Path(os.environ["TMPDIR"]).rglob("*.ptx")): time.sleep(0.005)
print(*pids(), flush=True)
os._exit(0)
"""
    tool = tmp_path / "ptxas"
    tool.write_text('#!/bin/sh\n[ "$1" = --version ] && echo release 13.4, V13.4.0 || sleep 600\n')
    tool.chmod(0o755)
    told = {"TRITON_PTXAS_PATH": str(tool), "TRITON_PTXAS_BLACKWELL_PATH": str(tool)}
    (tmp_path / "temporary").mkdir()
    done = parent(code, tmp_path / "temporary", **told)
    (own,) = map(int, done.communicate(timeout=120)[0].split())
    assert wait_for(lambda: not is_alive(own))
    assert wait_for(lambda: not list(tmp_path.glob("temporary/heedful-worker-*")))


@pytest.mark.slow
def test_a_forked_child_has_workers_of_its_own_and_leaves_those_of_its_parent(tmp_path):
    code = """
compiler.compile_now(CALL, "gfx942")
mine = pids()
if not os.fork():
    compiler.compile_now(CALL, "gfx942")
    ours = pids()
    assert len(ours) == 1 and ours != mine, (mine, ours)
    sys.exit()
assert os.wait()[1] == 0
assert pids() == mine
compiler.compile_now(CALL, "gfx942")
assert pids() == mine
print("well")
"""
    done = parent(code, tmp_path)
    assert done.communicate(timeout=120)[0] == "well\n"


@pytest.mark.slow
def test_a_parent_that_a_broken_pipe_would_end_goes_on(tmp_path):
    code = """
import signal
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
compiler.compile_now(CALL, "gfx942")
(worker,) = next(iter(pool._idle.values()))
os.kill(worker._process.pid, signal.SIGKILL)
while worker.is_running: time.sleep(0.01)
type(worker).is_running = property(lambda worker: True)
try:
    compiler.compile_now(CALL, "gfx942")
except RuntimeError as error:
    print(error)
"""
    said = parent(code, tmp_path).communicate(timeout=120)[0]
    assert "was ended by SIGKILL" in said


_WITHOUT = """
import os, sys
sys.modules["triton"] = None
sys.path[:0] = sys.argv[1].split(os.pathsep)
from heedful.core.base.device import by_name
from heedful.core.base.installed import triton_version
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.launch import prebuild
from heedful.launch import compiler
from heedful.launch.code.identity import cache_key
from heedful.launch.prebuild import compiling
from heedful.launch.program.programs import program
from heedful.launch.worker.codec import decode
problem = AttentionProblem.dense(4, 1, 4096, 16, 1, used_k=True, head_dim=128)
(planned, *_) = program(plan(problem, by_name("H200"), compiling()), "forward").calls
print(planned.kernel.module, triton_version())
call, arch = decode(bytes.fromhex(sys.argv[2]))
made = compiler.artifact(call, arch)
print(made.toolchain, dict(compiler.counters), cache_key(call, arch))
"""


def test_a_process_without_triton_has_the_kernels_and_the_cache_of_its_workers(apart, tmp_path):
    """It plans for the Triton of its workers; what these make, a process finds that has it."""
    assert OWN is not None
    paths = os.pathsep.join([str(SOURCES), *filter(None, sys.path)])
    own = {"HEEDFUL_CACHE_DIR": str(tmp_path / "cache"), "HEEDFUL_TRITON": str(OWN.root)}
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, paths, encode(CALL, "sm_90").hex()],
        env={**os.environ, "TMPDIR": str(apart), **own},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    planned, made = done.stdout.splitlines()
    family = "hopper" if OWN.numbers >= (3, 9) else "portable"
    assert planned == f"heedful.kernels.{family}.decode.kernel None"
    assert f"triton {OWN.version}, ptxas" in made and "{'compiles': 1}" in made
    assert made.endswith(cache_key(CALL, "sm_90"))


@pytest.mark.slow
def test_a_home_that_cannot_be_written_is_not_asked_for(tmp_path):
    code = 'print(compiler.compile_now(CALL, "sm_90").symbol)'
    nowhere = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"), "/proc/nowhere")
    said = parent(code, tmp_path, **nowhere).communicate(timeout=120)[0]
    assert said == "clear_unused\n"
