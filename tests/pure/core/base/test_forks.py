"""A forked child is not held up by what threads of its parent held, and drivers that its parent
used say so."""

import os
import re
import runpy
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import heedful
from heedful.core.base import forks

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


def run(code: str, *arguments: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(Path(heedful.__file__).parents[1])}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


_COMPILING = """
import os, signal, sys, threading, time, types
from pathlib import Path
from heedful.core.base import installed
from heedful.core.base.device import by_name
from heedful.core.planning.plan import plan
from heedful.core.call.problem import AttentionProblem
from heedful.launch import noted, record
from heedful.launch import compiler
from heedful.launch.code.artifact import Artifact
from heedful.launch.spec import KernelCall, KernelRef

os.environ["HEEDFUL_CACHE_DIR"] = sys.argv[1]
installed.compiler = lambda: installed.Compiler("3.9.0", Path("/nowhere"))
parent, begun, done = os.getpid(), threading.Event(), threading.Event()
call = KernelCall(KernelRef("heedful.kernels.portable.forward.combine", "f"), (1, 1, 1), {})

def compile_artifact(call, arch):
    begun.set()
    if os.getpid() == parent:
        assert done.wait(60)
    return Artifact(b"code", "", "k", arch, 4, 32, 0, 1, (), 0)

arch = "sm_90" if sys.argv[2] == "same" else "sm_80"
stub = types.ModuleType("triton_compat")
stub.compile_artifact = compile_artifact
sys.modules["heedful.launch.code.triton_compat"] = stub
thread = threading.Thread(target=compiler.artifact, args=(call, "sm_90"))
thread.start()
begun.wait()
# As another thread may be anywhere at the fork.
for lock in (compiler._guard, noted._lock):
    lock.acquire()
child = os.fork()
if child == 0:
    signal.alarm(40)
    # Of the same architecture, too: the parent compiles it under a lock among processes.
    assert compiler.artifact(call, arch).code == b"code"
    with record.record(os.path.join(sys.argv[1], "list.json")):
        noted.note(plan(AttentionProblem.dense(1, 8, 8, 1), by_name("H200")), "forward", {})
    os._exit(0)
for lock in (compiler._guard, noted._lock):
    lock.release()
if arch == "sm_90":
    time.sleep(1.0)
    done.set()
assert os.waitpid(child, 0)[1] == 0
done.set()
thread.join()
"""


@needs_fork
@pytest.mark.parametrize("which", ["same", "another"])
def test_a_child_forked_while_a_thread_compiles_gets_kernels(tmp_path, which):
    done = run(_COMPILING, str(tmp_path), which)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def stranded(monkeypatch):
    """This thread as one that came into a forked child."""
    for name in ("_stranded", "_helper"):
        monkeypatch.setattr(forks, name, None)
    assert not forks.is_stranded()
    forks._after_fork()


def test_a_stranded_thread_has_its_work_done_by_one_that_is_not(stranded):
    assert forks.is_stranded()
    found = [forks.on_own_thread(lambda *a: (a, threading.get_ident()), 1, 2) for _ in range(2)]
    assert found[0] == found[1] and found[0][0] == (1, 2)
    assert found[0][1] != threading.get_ident()
    assert forks.on_own_thread(lambda: forks.is_stranded()) is False
    helper = next(t for t in threading.enumerate() if t.ident == found[0][1])
    # The process ends without it.
    assert helper.daemon and helper.name == "heedful"


def test_what_fails_on_another_thread_fails_for_the_caller_and_the_next_goes_on(stranded):
    with pytest.raises(ZeroDivisionError):
        forks.on_own_thread(lambda: 1 // 0)
    assert forks.on_own_thread(max, 3, 4) == 4


def test_a_thread_that_was_made_here_does_its_own_work():
    assert forks.on_own_thread(threading.get_ident) == threading.get_ident()


def test_a_lock_that_was_held_at_the_fork_is_free_in_the_child(stranded):
    lock = forks.new_lock()
    assert lock.acquire() and lock.locked()
    forks._after_fork()
    assert not lock.locked()


def test_every_child_is_told_and_a_system_without_forks_needs_not(monkeypatch):
    told = []
    monkeypatch.setattr(os, "register_at_fork", lambda **when: told.append(when), raising=False)
    made = runpy.run_path(forks.__file__)
    assert told == [{"after_in_child": made["_after_fork"]}]
    monkeypatch.delattr(os, "register_at_fork")
    runpy.run_path(forks.__file__)
    assert len(told) == 1


_DRIVER = """
import ctypes, os, sys
from importlib import import_module
from types import SimpleNamespace
from heedful.launch.code.artifact import Artifact, Parameter

class Library:
    def __getattr__(self, name):
        def call(*args):
            calls.append(name)
            return 0
        call.argtypes = call.restype = None
        setattr(self, name, call)
        return call

calls = []
ctypes.PyDLL = lambda name: Library()
driver = import_module(f"heedful.launch.driver.{sys.argv[1]}")
maps, parameters = {}, ()
if sys.argv[1] == "cuda":
    maps = {"x": {"elem_type": 9, "elem_size": 2, "swizzle": 3, "block_size": [64, 64]}}
    parameters = (Parameter("x", "tensormap", 0),)
artifact = Artifact(b"code", "", "k", "t", 4, 32, 0, 1, parameters, 128, 0, maps)

def launch(slot=None):
    (slot or driver.Slot(artifact, ctypes.c_void_p(1), 0, False, False)).launch(0)

def encode(slot):
    if maps:
        slot.encode_all()

def refused(work):
    before = len(calls)
    try:
        work()
    except RuntimeError as error:
        return "forked" in str(error) and "spawn" in str(error) and len(calls) == before
    return False

if "unused" in sys.argv:
    slot = None
else:
    driver.load(artifact, 0)
    slot = driver.Slot(artifact, ctypes.c_void_p(1), 0, False, False)
    encode(slot)
    launch(slot)
child = os.fork()
if child == 0:
    if "unused" in sys.argv:
        driver.load(artifact, 0)
        launch()
        os._exit(0)
    fine = refused(lambda: driver.load(artifact, 0)) and refused(launch)
    fine = fine and (not maps or refused(lambda: encode(slot)))
    os._exit(0 if fine and refused(lambda: launch(slot)) else 3)
assert os.waitpid(child, 0)[1] == 0
driver.load(artifact, 0)
if slot:
    encode(slot)
launch(slot)
"""


@needs_fork
@pytest.mark.parametrize("driver", ["cuda", "hip"])
@pytest.mark.parametrize("used", ["used", "unused"])
def test_a_driver_that_the_parent_used_is_refused_in_a_child_and_any_other_is_not(driver, used):
    done = run(_DRIVER, driver, used)
    assert done.returncode == 0, done.stderr


# These live no longer than a call, whose threads are the caller's or the backend's own.
OF_A_CALL = {"cpu/workers.py", "cpu/tiled_forward.py", "launch/prebuild.py"}


def test_locks_that_outlive_a_call_are_those_that_a_fork_frees():
    root = Path(heedful.__file__).parent
    made = re.compile(r"\b(R?Lock|Condition|Semaphore|ThreadPoolExecutor)\(\)?")
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if made.search(path.read_text()) and "kernels" not in path.parts
    }
    assert found - {"core/base/forks.py"} == OF_A_CALL
