"""The sample of GPU tests that memcheck runs has each value of each parameter."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

import memcheck

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
