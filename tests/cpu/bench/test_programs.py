"""`python -m heedful.bench.X WORDS`: the words reach what is timed, on the current device."""

import runpy
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from heedful.bench import training as bench
from heedful.bench.harness import cases
from heedful.demo import training


class Reached(Exception):
    """Raised in place of what needs a GPU, with what it was given."""


def reached(*given: Any) -> Any:
    raise Reached(*given)


def run(name: str, *words: str) -> None:
    """The module as a program."""
    file = import_module(f"heedful.bench.{name}").__file__
    with pytest.MonkeyPatch.context() as patch:
        # The first word is not one of the user's, whatever it is.
        patch.setattr(sys, "argv", ["decode", *words])
        runpy.run_path(str(file), run_name="__main__")


@pytest.mark.parametrize("name", ["lengths", "steps", "training"])
def test_a_bench_that_is_run_asks_for_the_current_device(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", reached)
    with pytest.raises(Reached):
        run(name)


def test_steps_are_picked_by_the_words(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert ended("steps", ("no", "such", "step"), capsys) == (None, "", "")


@pytest.mark.parametrize(("words", "steps"), [([], bench.RECIPE.steps), (["7"], 7)])
def test_training_takes_as_many_steps_as_the_word_says(words, steps, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(training, "start", reached)
    with pytest.raises(Reached) as given:
        run("training", *words)
    assert given.value.args[0].steps == steps


def test_jax_is_timed_on_cases_that_have_the_words(monkeypatch):
    pytest.importorskip("jax")
    asked = []

    class Name:
        def __contains__(self, words: str) -> bool:
            asked.append(words)
            return False

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    # Behind the groups of training shapes comes the one whose dispatch is timed.
    made = {name: [SimpleNamespace(name=Name())] for name in ("forward", "backward")}
    monkeypatch.setattr(cases, "cases", lambda group: made.get(group) or reached(group))
    with pytest.raises(Reached, match="overhead"):
        run("in_jax", "backward", "4x4096")
    assert asked == ["backward 4x4096"] * 2


GPU_PROGRAMS = {"host": (), "in_jax": (), "lengths": (), "mixed": (), "splits": ("out.csv",)}
GPU_PROGRAMS |= {"in_transformers": (), "layers": (), "parallel": (), "steps": (), "torchs": ()}
GPU_PROGRAMS |= {"training": ()}
# By program the framework that it needs.
NEEDS = {"in_jax": "jax", "in_transformers": "transformers", "layers": "transformers"}


def ended(name: str, words: tuple[str, ...], capsys) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as ending:
        run(name, *words)
    return ending.value.code, *capsys.readouterr()


@pytest.mark.parametrize(("name", "words"), GPU_PROGRAMS.items())
def test_a_bench_without_a_gpu_is_one_line(name, words, monkeypatch, capsys, tmp_path):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.chdir(tmp_path)

    def absent():
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check")

    monkeypatch.setattr(torch.cuda, "current_device", absent)
    code, out, err = ended(name, words, capsys)
    assert code == 2 and not out and err.count("\n") == 1 and not list(tmp_path.iterdir())
    assert err.startswith("error: this program times a GPU") and "no NVIDIA driver" in err


@pytest.mark.parametrize(
    ("name", "words", "named"),
    [
        ("small_calls", ("fast",), "ROUNDS must be a whole number from 1, got 'fast'"),
        ("training", ("0",), "STEPS must be a whole number from 1, got '0'"),
        ("training", ("3", "-1"), "SEED must be a whole number from 0, got '-1'"),
        ("splits", (), "must be named"),
        ("splits", ("--pack",), "must be named"),
    ],
)
def test_a_bench_that_is_asked_wrongly_is_one_line(name, words, named, capsys):
    code, out, err = ended(name, words, capsys)
    assert code == 2 and not out and err.count("\n") == 1
    assert err.startswith("error: ") and named in err


def test_every_bench_says_its_usage(capsys):
    folder = Path(bench.__file__).parent
    programs = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
    assert {*GPU_PROGRAMS, "small_calls"} == set(programs)
    for name in programs:
        if name not in NEEDS or find_spec(NEEDS[name]):
            code, out, err = ended(name, ("--help",), capsys)
            assert not code and not err and f"python -m heedful.bench.{name}" in out
