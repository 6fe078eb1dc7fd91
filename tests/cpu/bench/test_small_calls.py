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


def test_cases_are_named_by_their_sizes():
    assert bench.Case(2, 16).name == "2 x 16"
    assert bench.Case(2, 16, dropout_p=0.25).name == "2 x 16, dropout 0.25"
    assert bench.Case(8, 1024, decode=True).name == "decode 8 x 1024, lengths"
    assert len({case.name for case in bench.CASES}) == len(bench.CASES)


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_both_drop_as_much_of_the_same_tensors(dropout_p, monkeypatch):
    asked: list[Any] = []

    def ours(q, k, v, **options):
        asked.append(((q, k, v), options))
        return q + k + v

    def theirs(q, k, v, **options):
        asked.append(((q, k, v), options))
        return q + k + v

    monkeypatch.setattr(bench.heedful, "flash_attn_func", ours)
    monkeypatch.setattr(bench.F, "scaled_dot_product_attention", theirs)
    both: Any = [step() for step in bench.steps(bench.Case(3, 16, dropout_p=dropout_p))]
    (mine, options), (other, more) = asked
    assert options == more == {"dropout_p": dropout_p}
    for x, y, got, want in zip(mine, other, *both, strict=True):
        assert x.shape == (3, 16, bench.HEADS, bench.DIM) and x.dtype == torch.float32
        assert x.requires_grad and torch.equal(x, y.transpose(1, 2))
        # One gradient for all, and of each output the same.
        assert torch.equal(got, want) and torch.equal(got, both[0][0])


def test_decodes_are_of_lengths_from_a_quarter_to_all_keys(monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(
        bench.heedful, "flash_attn_with_kvcache", lambda *given, **more: asked.append((given, more))
    )
    ours, _ = bench.steps(bench.Case(4, 40, decode=True))
    ours()
    ((q, k, v), options) = asked[0]
    assert q.shape == (4, 1, bench.HEADS, bench.DIM)
    assert k.shape == v.shape == (4, 40, bench.HEADS, bench.DIM)
    lengths = options.pop("cache_seqlens")
    assert lengths.tolist() == [10, 20, 30, 40] and lengths.dtype == torch.int32
    assert options == {"causal": True}


def test_a_round_calls_for_its_time_and_at_least_once(monkeypatch):
    took = {"short": iter([1e-3 / 4, 3e-6]), "long": iter([1.0, 0.5])}
    asked: list[Any] = []

    def seconds(step, calls):
        asked.append((step(), calls))
        return next(took[step()])

    monkeypatch.setattr(bench, "_seconds", seconds)
    monkeypatch.setattr(bench, "steps", lambda case: (lambda: "short", lambda: "long"))
    trial = bench.Trial(bench.Case(1, 16), torch.device("cpu"))
    trial.enter_all()
    assert [*trial.calls] == ["heedful", "SDPA"]
    us = [trial.microseconds(name, call) for name, call in trial.calls.items()]
    assert us == pytest.approx([3, 5e5])
    # Eight of a quarter of a millisecond in two milliseconds.
    assert asked == [("short", 1), ("long", 1), ("short", 8), ("long", 1)]


def test_each_setting_has_its_threads_and_its_neighbour_on_the_second_core(monkeypatch, capsys):
    told: list[Any] = []

    class Beside:
        def __init__(self, core):
            self.core = core

        def __enter__(self):
            told.append(f"spins on {self.core}")

        def __exit__(self, *_):
            told.append("ends")

    def figures(case, rounds):
        told.append((torch.get_num_threads(), rounds))
        return 1000.0, 900.0

    monkeypatch.setattr(bench, "CASES", (bench.Case(1, 16),))
    monkeypatch.setattr(bench, "figures", figures)
    monkeypatch.setattr(bench, "neighbour", Beside)
    monkeypatch.setattr(bench.os, "sched_getaffinity", lambda _: {7, 3, 9})
    assert bench.main() == 0
    rounds = bench.ROUNDS
    assert told == [(1, rounds), (2, rounds), "spins on 7", (2, rounds), "ends"]
    last = capsys.readouterr().out.splitlines()[-1]
    setting = f"{'2 threads, busy neighbour':26} {'1 x 16':24}"
    assert last == f"{setting} heedful     1,000 us, SDPA       900 us: 0.90"
