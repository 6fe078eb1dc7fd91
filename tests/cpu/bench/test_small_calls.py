"""The benchmark of short calls: it times one attention twice, and a missed bar is its status."""

import dataclasses
from typing import Any

import pytest
import torch

from heedful.bench import small_calls as bench
from heedful.bench.harness import script


@pytest.mark.parametrize("case", [bench.Case(2, 16), bench.Case(3, 40, decode=True)], ids=str)
def test_both_compute_the_same(case):
    ours, theirs = (step() for step in bench.steps(case))
    both: Any = ours, theirs
    pairs = [both] if case.decode else zip(*both, strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want)


def test_the_first_of_a_round_alternates_and_the_figure_is_of_medians(monkeypatch):
    times = {"a": iter([9, 1, 5, 2]), "b": iter([9, 4, 8, 4])}
    turns: list[str] = []

    def seconds(step, calls):
        turns.append(step())
        return next(times[step()]) * 1e-6

    monkeypatch.setattr(bench, "_seconds", seconds)
    monkeypatch.setattr(bench, "steps", lambda case: (lambda: "a", lambda: "b"))
    assert bench.figures(bench.Case(1, 16), 3) == pytest.approx((2, 4))
    assert turns == ["a", "b", *"ba", *"ab", *"ba"]


@pytest.mark.parametrize(("found", "status"), [(0.9, 0), (0.65, 1), (0.45, 1)])
def test_a_missed_bar_is_the_status(found, status, monkeypatch, capsys):
    case = bench.Case(1, 16)
    monkeypatch.setattr(bench, "CASES", (case,))
    monkeypatch.setattr(bench, "figures", lambda *_: (1e3, found * 1e3))
    alone = [dataclasses.replace(setting, neighbour=False) for setting in bench.SETTINGS]
    monkeypatch.setattr(bench, "SETTINGS", alone)
    monkeypatch.setattr(bench.os, "sched_getaffinity", lambda _: {0, 1})
    before = torch.get_num_threads()
    assert bench.main(["1"]) == status
    assert torch.get_num_threads() == before
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3 and all("1 x 16" in line for line in said)
    assert [("below" in line) for line in said] == [found < 0.7, found < 0.7, found < 0.5]


def test_one_core_is_too_few(monkeypatch):
    monkeypatch.setattr(bench.os, "sched_getaffinity", lambda _: {3})
    with pytest.raises(script.Refused, match="two cores"):
        bench.main()


def test_seconds_are_those_of_one_of_several_calls(monkeypatch):
    calls, clock = [], iter([10.0, 16.0])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    assert bench._seconds(lambda: calls.append(1), 3) == 2.0
    assert len(calls) == 3


def test_the_neighbour_spins_on_its_core_from_before_the_first_call_until_the_last(monkeypatch):
    told: list[Any] = []

    class Context:
        def Process(self, target, args, daemon):
            told.append((target, args, daemon))
            return self

        def __getattr__(self, name):
            return lambda: told.append(name)

    made = lambda way: told.append(way) or Context()  # noqa: E731
    monkeypatch.setattr(bench.multiprocessing, "get_context", made)
    monkeypatch.setattr(bench.time, "sleep", told.append)
    with pytest.raises(ValueError, match="in between"), bench.neighbour(5):
        told.append("called")
        raise ValueError("in between")
    spun = (bench._spin, (5,), True)
    assert told == ["spawn", spun, "start", 1.0, "called", "terminate", "join"]

    def pin(process, cores):
        raise RuntimeError(f"{process} {cores}")

    monkeypatch.setattr(bench.os, "sched_setaffinity", pin)
    with pytest.raises(RuntimeError, match=r"0 \{5\}"):
        bench._spin(5)
