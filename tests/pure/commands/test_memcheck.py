"""The sample of GPU tests that memcheck runs has each value of each parameter."""

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

import memcheck
from heedful.launch import prebuild

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Problem:
    dim: int
    is_paged: bool = False


GRIDS = {
    "a product": [
        {"dim": d, "dtype": t, "splits": s} for d in (1, 2, 3) for t in "ab" for s in (1, 2)
    ],
    "fields": [
        {"case": Problem(d, p), "n": n} for d in (1, 2) for p in (False, True) for n in (0, 3)
    ],
    "none": [{}],
    "unlike tests": [{"a": 1}, {"a": 1}, {"b": 2}],
}


@pytest.mark.parametrize("cases", GRIDS.values(), ids=GRIDS)
def test_cases_that_are_taken_have_every_value_and_each_adds_one(cases):
    chosen = memcheck.covering(cases)
    everything = set().union(*map(memcheck.values, cases))
    seen: set = set()
    for index in chosen:
        assert memcheck.values(cases[index]) - seen or not everything
        seen |= memcheck.values(cases[index])
    assert seen == everything and chosen


def item(name: str, case: int = 0, mark: str = "", **more):
    marks = {mark: True}
    callspec = SimpleNamespace(params={"case": case})
    return SimpleNamespace(
        nodeid=f"a.py::{name}[{case}]",
        originalname=name,
        obj=SimpleNamespace(**more),
        callspec=callspec,
        get_closest_marker=marks.get,
    )


def test_tests_come_in_turns_without_long_grids_random_problems_and_graphs():
    items = [item("test_one", n) for n in range(3)] + [item("test_two", n) for n in range(2)]
    items += [item("test_long", mark="slow"), item("test_a_captured_call"), item("test_a_replay")]
    items += [item("test_random", hypothesis=True)]
    names = [found.nodeid.removeprefix("a.py::test_") for found in memcheck.sampled(items)]
    assert names == ["one[0]", "two[0]", "one[1]", "two[1]", "one[2]"]


def test_every_file_of_the_sample_is_there():
    assert all((ROOT / name).is_file() for name in memcheck.FILES)


def told(folder: Path, log: str, **outcomes: list[str]) -> int:
    (folder / "0.log").write_text(log)
    some = {"chosen": ["a", "b"], "passed": ["a", "b"], "failed": [], "skipped": []} | outcomes
    (folder / "0.json").write_text(memcheck.json.dumps(some))
    return memcheck.report(1, folder)


CLEAN = "========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(
    ("log", "outcomes", "words"),
    [
        (CLEAN.replace("0", "3"), {}, "process 0: ['3']"),
        ("Killed\n", {}, "no summary"),
        (CLEAN, {"passed": ["a"], "failed": ["b"]}, "b\n"),
        (CLEAN, {"passed": ["a"]}, "1 not run"),
    ],
    ids=["an error", "killed", "a failed test", "out of time"],
)
def test_what_is_wrong_is_said_and_returns_1(tmp_path, capsys, log, outcomes, words):
    assert told(tmp_path, log, **outcomes) == 1
    assert words in capsys.readouterr().out


def test_a_clean_run_returns_0(tmp_path):
    assert told(tmp_path, CLEAN) == 0


@pytest.mark.parametrize(("shards", "processes"), [(1, 3), (2, 3), (4, 1), (3, 5)])
def test_shards_have_each_test_once(monkeypatch, tmp_path, shards, processes):
    started = []

    def popen(command, env, **more):
        started.append(memcheck.json.loads(env[memcheck._TOLD]))

    monkeypatch.setattr(memcheck, "checked", lambda processes: [])
    monkeypatch.setattr(memcheck.subprocess, "Popen", popen)
    for which in range(1, shards + 1):
        on = memcheck.shard(f"{which}/{shards}")
        given = memcheck.argparse.Namespace(processes=processes, shard=on, files=[])
        for part in range(processes):
            memcheck.start(part, given, tmp_path, 0.0, "0")
    seen = []
    for told in started:
        items = [item("test_one", n) for n in range(17)]
        told["file"] = tmp_path / "told.json"
        memcheck.Sample(**told).pytest_collection_modifyitems(items)
        seen += [found.nodeid for found in items]
    assert sorted(seen) == sorted(item("test_one", n).nodeid for n in range(17))


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/0", "/4", "-1/4", "a/b", ""])
def test_what_is_no_shard_is_refused(text):
    with pytest.raises(memcheck.argparse.ArgumentTypeError, match="is no shard"):
        memcheck.shard(text)


def test_a_shard_s_kernels_are_compiled_ahead(monkeypatch):
    """Once each, without the sanitizer, by the tool that finds them without a GPU."""
    told, compiled = [], []

    def collect(arguments, device):
        told.append((arguments, json.loads(os.environ[memcheck._TOLD])))
        return SimpleNamespace(calls={"a": 1, "b": 2}, ended={})

    monkeypatch.setenv(memcheck._TOLD, "")
    monkeypatch.setitem(sys.modules, "precompile", SimpleNamespace(collect=collect))
    monkeypatch.setattr(
        prebuild, "compile_all", lambda calls, jobs: compiled.append((calls, jobs)) or len(calls)
    )
    monkeypatch.setattr(sys, "argv", ["memcheck", "--compile", "16", "--shard", "2/5", "one.py"])
    assert memcheck.main() == 0
    ((arguments, share),) = told
    assert arguments[-1] == "one.py" and (share["part"], share["parts"]) == (1, 5)
    assert share["until"] == math.inf and compiled == [([1, 2], 16)]


def test_gpus_that_are_given_are_those_that_are_used(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert memcheck.gpus() == ["3", "1"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    told = SimpleNamespace(stdout="GPU 0: H200\nGPU 1: H200\n")
    monkeypatch.setattr(memcheck.subprocess, "run", lambda *a, **k: told)
    assert memcheck.gpus() == ["0", "1"]
