"""What tries the wheels of kernels finds what they lack, and what is slower than it may be."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import heedful
from heedful.core.base import installed
from heedful.core.base.device import by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.launch import noted, prebuild
from heedful.launch.code import packs, wheels
from heedful.launch.program import buffers as canonical
from heedful.launch.record import Entry
from kernel_wheel import inside, tries
from support.packs import Installed, forget

CAUSAL = MaskSpec.of(True)
H200 = by_name("H200")
PLANNED = {"hopper": (3, 9), "hopper_decode": (3, 9), "portable": (3, 9)}
LISTED = [
    Entry(AttentionProblem.dense(2, 1024, 1024, 8, mask=CAUSAL), "forward"),
    Entry(AttentionProblem.dense(2, 1024, 1024, 8, needs_grad=True), "backward"),
    Entry(AttentionProblem.dense(8, 1, 4096, 8, 2, mask=CAUSAL, used_k=True), "forward"),
]
# An older Triton has no Hopper decode.
OTHER = AttentionProblem.dense(8, 1, 8192, 8, 2, head_dim=64, used_k=True)


def kernels(entries: list[Entry]) -> list[str]:
    return sorted(prebuild.kernels(entries, map(by_name, inside.DEVICES))[0])


@pytest.fixture
def beside(monkeypatch):
    """Installs a wheel of keys beside an older Triton, or beside none; nothing is compiled."""
    wanted = kernels(LISTED)
    forget(monkeypatch)
    monkeypatch.setitem(heedful.counters, "compiles", 0)
    monkeypatch.setattr(wheels, "_looked", True)
    monkeypatch.setattr(inside, "ROOT", Path("/no/checkout"))
    problems = SimpleNamespace(entries=lambda: LISTED, UNLISTED=[OTHER])
    monkeypatch.setitem(sys.modules, "problems", problems)

    def install(keys: list[str] = wanted, triton: str = "3.6.0") -> None:
        monkeypatch.setattr(wheels, "_read", {})
        monkeypatch.setattr(wheels, "_current", Installed(keys, PLANNED))
        monkeypatch.setattr(packs, "load_default", packs._reckon)
        compiler = installed.Compiler(triton, Path("/no")) if triton else None
        monkeypatch.setattr(installed, "compiler", lambda: compiler)

    return install


@pytest.mark.parametrize("triton", ["3.6.0", ""])
def test_listed_problems_are_planned_as_the_wheels_compiler_plans_them(beside, triton, capsys):
    beside(triton=triton)
    assert inside.keys()
    assert "{'problems': 6, 'equal': 6}" in capsys.readouterr().out


@pytest.mark.parametrize("triton", ["3.6.0", ""])
@pytest.mark.parametrize("entry", LISTED, ids=lambda entry: entry.problem.key())
def test_a_kernel_that_the_wheel_lacks_is_found(beside, entry, triton, capsys):
    gone = kernels([entry])[0]
    beside([key for key in kernels(LISTED) if key != gone], triton)
    assert not inside.keys()
    assert "1 not in the wheel" in capsys.readouterr().out


def test_other_problems_are_planned_as_without_the_wheel(beside, capsys):
    beside()
    assert inside.keys()
    assert "1 directions of other problems, 0 not" in capsys.readouterr().out
    beside(kernels([*LISTED, Entry(OTHER, "forward")]))
    assert not inside.keys(), "it is listed"


def test_a_checkouts_heedful_is_not_tried(beside, monkeypatch):
    beside()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="heedful is the checkout's"):
        inside.toolchain()


def test_without_a_wheel_nothing_is_tried(beside, monkeypatch):
    beside()
    monkeypatch.setattr(wheels, "_current", None)
    with pytest.raises(RuntimeError, match="no wheel of kernels is found"):
        inside.toolchain()


def stepping(monkeypatch, apart: float = 0.0, name: str = "train") -> list[str]:
    """A model whose one job needs the listed kernels; returns the attentions beside ours."""
    ran: list[str] = []

    def compare(model, theirs, run) -> float:
        ran.append(theirs)
        run()
        return apart

    def run() -> None:
        for entry in LISTED:
            buffers = canonical.forward(entry.problem)
            if entry.direction == "backward":
                buffers = canonical.backward(entry.problem)
            noted.note(plan(entry.problem, H200), entry.direction, buffers)

    jobs = [("Llama", object(), "sdpa", [SimpleNamespace(name=name, run=run)])]
    bench = SimpleNamespace(compare=compare, jobs=lambda: jobs, MOST_APART=0.05)
    transformers = SimpleNamespace(register=lambda continuous: None)
    for package, module in (("bench", "in_transformers"), ("integrations", "transformers")):
        given = bench if package == "bench" else transformers
        monkeypatch.setitem(sys.modules, f"heedful.{package}.{module}", given)
        parent = importlib.import_module(f"heedful.{package}")
        monkeypatch.setattr(parent, module, given, raising=False)
    return ran


def test_models_need_the_wheel_alone(beside, monkeypatch, capsys):
    ran = stepping(monkeypatch)
    beside()
    assert inside.models() and ran == ["sdpa"]
    assert "{'problems': 3, 'equal': 3}" in capsys.readouterr().out
    assert inside.models("none", "Llama tr")
    beside(kernels(LISTED[1:]))
    assert not inside.models()


def test_models_that_are_wrong_or_compile_are_found(beside, monkeypatch):
    beside()
    stepping(monkeypatch, apart=0.5)
    assert not inside.models()
    # Generated tokens may differ where rounding does.
    stepping(monkeypatch, apart=0.5, name="generate 1 x 1")
    assert inside.models()
    monkeypatch.setitem(heedful.counters, "compiles", 1)
    assert not inside.models()


FIRST = """
import json, sys
of = {"torch": 0.25, "sdpa": 0.5, "heedful": %s}
more = {"counters": {"compiles": %s}, "triton": %s} if sys.argv[1] == "heedful" else {}
print(json.dumps({"call": of[sys.argv[1]], **more}))
"""


@pytest.mark.parametrize(
    ("seconds", "compiles", "triton", "good"),
    [
        (0.34, 0, False, True),
        (0.36, 0, False, False),
        (0.3, 1, False, False),
        (0.3, 0, True, False),
    ],
)
def test_a_first_call_is_held_to_its_time_and_meets_no_compiler(
    seconds, compiles, triton, good, monkeypatch, capsys
):
    monkeypatch.setattr(tries, "FIRST", FIRST % (seconds, compiles, triton))
    assert tries.first_calls({}, 1) is good
    assert f"{1e3 * (seconds - 0.25):.1f} ms over torch alone" in capsys.readouterr().out


def test_a_first_call_that_warns_of_the_wheel_ends_the_try(monkeypatch):
    words = "import warnings; warnings.warn('others'); warnings.warn('kernels of the installed')"
    monkeypatch.setattr(tries, "FIRST", words)
    with pytest.raises(SystemExit, match=r"torch: [\s\S]*Warning: kernels of the installed"):
        tries.first_calls({}, 1)


TIMED = """
import os, sys
print({}, flush=True)
for line in sys.stdin:
    print(float(os.environ.get("SLOWER", 1)), flush=True)
"""


@pytest.mark.parametrize(("slower", "good"), [("1.009", True), ("1.011", False)])
def test_kernels_of_the_wheel_are_held_to_the_times_of_those_compiled(slower, good, monkeypatch):
    monkeypatch.setattr(tries, "TIMED", TIMED)
    assert tries.times({"SLOWER": slower}, Path("/src")) is good


# By what the wheel's folder has: a call that finds a fault warns of it.
CALLED = """
import json, os
site, after = os.environ["PYTHONPATH"].split(":")
folder = site + "/heedful_kernels_sm90/"
said = []
try:
    manifest = json.load(open(folder + "manifest.json"))
    if manifest != {"format": 3, "wheel": {"heedful": "1.0", "cuda": 13}}:
        said = ["kernels of the installed wheel"]
    elif open(folder + "one.kernel").read() != "code":
        said = ["kernels of the installed wheel"] * %s
except ValueError:
    said = ["kernels of the installed wheel"]
print(json.dumps({"apart": [%s, 0.5], "said": said, "counters": {}}))
"""


@pytest.mark.parametrize(("times", "apart", "good"), [(1, 1, 1), (0, 1, 0), (2, 1, 0), (1, 1.1, 0)])
def test_a_call_beside_a_damaged_wheel_warns_once_and_is_right(
    times, apart, good, monkeypatch, tmp_path, capsys
):
    folder = tmp_path / "heedful_kernels_sm90"
    folder.mkdir()
    (folder / "one.kernel").write_text("code")
    facts = {"format": 3, "wheel": {"heedful": "1.0", "cuda": 13}}
    (folder / "manifest.json").write_text(json.dumps(facts))
    monkeypatch.setattr(tries, "DAMAGED", CALLED % (times, apart))
    assert tries.damaged({"PYTHONPATH": str(tmp_path)}, tmp_path) is bool(good)
    assert len(capsys.readouterr().out.splitlines()) == len(tries.damages()) == 5
    assert json.loads((folder / "manifest.json").read_text()) == facts


def test_a_call_that_fails_beside_a_damaged_wheel_is_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tries, "DAMAGED", "raise OSError('it raised')")
    assert not tries.damaged({"PYTHONPATH": str(tmp_path)}, tmp_path)
    assert "it raised" in capsys.readouterr().out


def test_wheels_are_tried_with_no_checkout_and_no_settings(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: asked.append(command))
    for name in ("PYTHONPATH", "HEEDFUL_PACK", "TRITON_PTXAS_PATH", "KEPT"):
        monkeypatch.setenv(name, "x")
    env = tries.installed_in(tmp_path, Path("a.whl"), Path("b.whl"), beside=[Path("/older")])
    assert env["PYTHONPATH"] == f"{tmp_path}:/older" and env["KEPT"] == "x"
    assert not {"HEEDFUL_PACK", "TRITON_PTXAS_PATH"} & env.keys()
    # No kernel that this user has compiled before.
    assert not Path(env["HEEDFUL_CACHE_DIR"]).exists()
    assert asked[0][-3:] == [tmp_path, Path("a.whl"), Path("b.whl")] and "--no-index" in asked[0]


@pytest.mark.parametrize(
    ("options", "missed", "status"),
    [
        (["--keys"], "", 0),
        (["--keys", "--first", "3"], "first 3", 1),
        (["--damaged"], "damaged", 1),
        (["--models", "a b", "--keys", "--first", "2", "--times", "src"], "models a b", 1),
    ],
)
def test_what_is_asked_is_tried_and_a_missed_bar_is_told(options, missed, status, monkeypatch):
    ran: list[str] = []

    def attempt(name: str) -> bool:
        ran.append(name)
        return name != missed

    monkeypatch.setattr(tries, "installed_in", lambda *_, **__: {})
    monkeypatch.setattr(tries, "inside", lambda env, *what: attempt(" ".join(what)))
    monkeypatch.setattr(tries, "first_calls", lambda env, rounds: attempt(f"first {rounds}"))
    monkeypatch.setattr(tries, "damaged", lambda env, folder: attempt("damaged"))
    monkeypatch.setattr(tries, "times", lambda env, source: attempt(f"times {source}"))
    monkeypatch.setattr(sys, "argv", ["tries.py", "a.whl", "b.whl", *options])
    with pytest.raises(SystemExit) as ended:
        tries.main()
    assert bool(ended.value.code) == bool(status)
    every = ("keys", "models", "first", "times", "damaged")
    wanted = [name for name in every if f"--{name}" in options]
    assert [name.split()[0] for name in ran] == wanted
