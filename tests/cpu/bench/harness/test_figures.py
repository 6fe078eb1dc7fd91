"""Numbers of a benchmark mean what their names say: clocks, units, directions of ratios, and what
each peer is asked for."""

import dataclasses
import sys
import time
import types
from typing import Any

import pytest
import torch

from heedful.bench.harness import report, timing
from heedful.bench.harness.cases import Case, cases
from heedful.bench.harness.check import Checker, sampled
from heedful.bench.harness.peers import PEERS, defaults, draw
from heedful.bench.harness.run import Figure, Outcome, measure, records
from heedful.bench.harness.timing import Spread
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem

CPU = torch.device("cpu")


class Event:
    """An event of a device whose calls take as long as `Device` says."""

    def __init__(self, device, enable_timing):
        assert enable_timing
        self.device, self.at = device, None

    def record(self):
        self.at = self.device.now
        self.device.log.append("event")

    def elapsed_time(self, end):
        return end.at - self.at


class Device:
    """A stub of torch.cuda: milliseconds pass only in calls."""

    def __init__(self, monkeypatch, l2: int = 0):
        self.now, self.log, self.slept, self.flushed = 0.0, [], [], []
        for name, stand_in in {
            "Event": lambda enable_timing=False: Event(self, enable_timing),
            "synchronize": lambda *_: self.log.append("wait"),
            "_sleep": self.sleep,
            "get_device_properties": lambda _: types.SimpleNamespace(L2_cache_size=l2),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        empty = torch.empty

        def allocated(size, *, dtype: torch.dtype, device: torch.device):
            assert device == CPU
            self.flushed.append(size * dtype.itemsize)
            made = empty(1, dtype=dtype)
            monkeypatch.setattr(made, "sum", lambda: self.log.append("flush"), raising=False)
            return made

        monkeypatch.setattr(torch, "empty", allocated)

    def sleep(self, cycles):
        self.slept.append(cycles)
        self.log.append("sleep")

    def call(self, milliseconds):
        def run():
            self.now += milliseconds
            self.log.append("call")
            return len(self.log)

        return run


def test_a_gpus_clock_times_calls_alone_behind_a_cold_cache_and_a_sleep(monkeypatch):
    device = Device(monkeypatch, l2=100 * 2**20)
    clock = timing._gpu_clock(CPU)
    assert device.flushed == [4 * 100 * 2**20]
    seconds, kept = clock(device.call(3.0), 4, 2)
    assert seconds == [pytest.approx(3e-3)] * 4
    turn = ["flush", "sleep", "event", "call", "event"]
    assert device.log == ["call", "wait", *turn * 4, "wait"]
    assert kept == 2 + 2 * 5 + 4  # what the third of the timed calls returned
    assert len(device.slept) == 4 and min(device.slept) >= 50e-6 * 2e9
    assert max(device.slept) <= 5e-3 * 2e9


def test_a_small_cache_is_flushed_by_64_mib_times_four(monkeypatch):
    device = Device(monkeypatch, l2=2**20)
    timing._gpu_clock(CPU)
    assert device.flushed == [4 * 64 * 2**20]


def test_a_cpus_clock_gives_seconds_of_each_call_and_what_one_returned(monkeypatch):
    now = iter([1.0, 1.5, 2.0, 2.25, 3.0, 3.125])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    results = iter("abc")
    assert timing._cpu_clock(lambda: next(results), 3, 1) == ([0.5, 0.25, 0.125], "b")


def test_a_rounds_figure_is_the_median_of_its_calls_in_microseconds(monkeypatch):
    def clock(call, count, keep):
        return [3.0, 1.0, 2.0 + call()], None

    monkeypatch.setattr(timing, "_cpu_clock", clock)
    calls = {"a": lambda: 0, "b": lambda: 9}
    times = timing.interleaved(calls, CPU, 5, lambda *_: None)
    assert times == {"a": [2e6] * 5, "b": [3e6] * 5}


@pytest.mark.parametrize(("seconds", "calls"), [(1e-5, 50), (2e-3, 10), (0.1, 3)])
def test_calls_fill_a_peers_share_of_a_round(seconds, calls):

    def clock(call, count, keep):
        return [seconds] * count, None

    assert timing._calls_a_round(clock, lambda: None) == calls


def test_host_time_is_that_of_one_call(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def call():
        now[0] += 2e-6

    times = timing.interleaved_host({"a": [call] * 8}, CPU, 5, [0, 7], lambda *_: None)
    assert times["a"] == [pytest.approx(2.0)] * 5


def outcome(case: Case, **microseconds: float) -> Outcome:
    base = "flash"
    figures = [
        Figure(name, Spread(t, t / 2, t * 2), Spread(microseconds[base] / t, 0.1, 9.0))
        for name, t in microseconds.items()
    ]
    return Outcome(case, base, figures)


def dense(group: str = "forward", **facts) -> Case:
    problem = AttentionProblem.dense(2, 128, 128, 4, 2, 64, dtype="bfloat16", **facts)
    return Case(group, problem)


def test_a_summary_is_above_one_where_heedful_is_faster():
    both = [outcome(dense(), heedful=10.0, flash=20.0, math=40.0)]
    both.append(outcome(dense(causal=True), heedful=40.0, flash=20.0, math=50.0))
    lines = report.summary(both)
    assert any(line.startswith("heedful / flash: geometric mean 1.000 over 2") for line in lines)
    assert any("heedful / best peer: geometric mean 1.000 over 2" in line for line in lines)
    assert all("worst 0.500" in line and "causal" in line for line in lines if "math" not in line)
    assert any("heedful / math: geometric mean 2.236" in line for line in lines)


@pytest.mark.parametrize(
    ("group", "unit", "want"),
    [("forward", "TFLOP/s", 4 * 2 * 4 * 128 * 128 * 64 / 10e-6 / 1e12), ("decode", "us", 10.0)],
)
def test_a_figure_is_in_its_groups_unit(group, unit, want):
    case = dense(group)
    assert report.unit(case) == unit
    assert report.in_unit(case, 10.0) == pytest.approx(want)
    assert report.unit(dense("cpu")) == "GFLOP/s"
    assert report.unit(dataclasses.replace(case, host=True)) == "us on the host"


def test_a_record_has_speed_bandwidth_and_ratio():
    case = dense("decode")
    ours, base = records(outcome(case, heedful=10.0, flash=20.0), CPU)
    assert ours["time_us"] == 10.0 and ours["time_us_low"] == 5.0 and ours["time_us_high"] == 20.0
    assert ours["tflops"] == pytest.approx(4 * 2 * 4 * 128 * 128 * 64 / 10e-6 / 1e12)
    # Keys and values of two entries and two heads, two bytes each.
    assert ours["kv_gb_per_s"] == pytest.approx(2 * 128 * 2 * 128 * 2 / 10e-6 / 1e9)
    assert ours["ratio"] == 2.0 and base["ratio"] == 1.0 and ours["base"] == "flash"
    assert ours["backends"]["forward"] == "sdpa" and "backends" not in base


def test_a_range_reaches_from_the_slowest_round_to_the_fastest():
    (figure, _) = outcome(dense(), heedful=10.0, flash=20.0).figures
    assert figure.time_us is not None
    middle, below, above = report._range(dense(), figure.time_us)
    assert middle == pytest.approx(report.in_unit(dense(), 10.0))
    assert (below, above) == (pytest.approx(middle / 2), pytest.approx(middle))


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 64, 1000, 1024, 16384])
def test_rows_that_are_compared_leave_no_tile_out(count):
    import random

    rows = sampled(count, random.Random(0))
    assert rows[0] == 0 and rows[-1] == count - 1 and all(0 <= row < count for row in rows)
    gaps = [b - a for a, b in zip(sorted(rows), sorted(rows)[1:], strict=False)]
    assert max(gaps, default=0) < 2 * 64 + 1
    assert len(rows) >= min(count, 16) + 2
    for tile in range(0, count, 64):
        # Strata are no wider than a tile: each tile of 128 rows has at least one of its own.
        assert any(tile <= row < tile + 128 for row in rows)
    assert sampled(count, random.Random(1)) != rows or count < 20


def test_other_rows_are_compared_in_other_heads():
    problem = AttentionProblem.dense(2, 300, 300, 2, 2, 16, dtype="float32")
    case = Case("cpu", problem)
    (group,) = Checker(case, draw(case, CPU)).groups
    assert len({tuple(rows.tolist()) for rows in group.rows}) == 4


def test_rows_are_told_apart_by_how_many_keys_they_see():
    from heedful.bench.harness.check import _band

    for bounds in ((-1, 0), (20, 0), (-1, -1), (0, 0), (3, 5), (20, -1), (0, -1)):
        mask = MaskSpec(*bounds)
        problem = AttentionProblem.dense(1, 70, 90, 1, 1, 16, dtype="float32", mask=mask)
        rows = torch.arange(70)
        seen = [sum(mask.visible(i, j, 70, 90) for j in range(90)) for i in range(70)]
        want = [n.bit_length() - 1 for n in seen]
        assert _band(Case("cpu", problem), rows[None], 70, 90).tolist() == [want]


@pytest.fixture
def library(monkeypatch):
    """A package `flash_attn` that notes what it is asked for and answers with heedful."""
    import heedful

    asked = []

    def dense_call(q, k, v, **more):
        asked.append(more)
        return heedful.flash_attn_func(q, k, v, **more), None

    def packed_call(q, k, v, **more):
        asked.append(more)
        return heedful.flash_attn_varlen_func(q, k, v, **more)

    made = types.ModuleType("flash_attn")
    made.__dict__.update(flash_attn_func=dense_call, flash_attn_varlen_func=packed_call)
    monkeypatch.setitem(sys.modules, "flash_attn", made)
    return asked


@pytest.mark.parametrize(
    "case",
    [
        Case("cpu", AttentionProblem.dense(2, 40, 40, 2, 2, 16, dtype="float32", causal=True)),
        Case(
            "cpu",
            AttentionProblem.dense(
                2, 40, 40, 2, 2, 16, dtype="float32", mask=MaskSpec.of(True, (7, 0))
            ),
        ),
        Case(
            "cpu",
            AttentionProblem.dense(
                2, 30, 30, 2, 2, 16, dtype="float32", causal=True, total_q=39, total_k=39
            ),
            lengths=(9, 30),
        ),
    ],
    ids=["causal", "window", "packed"],
)
def test_the_flash_packages_are_asked_for_the_cases_problem(case, library):
    peer = dataclasses.replace(PEERS["flash_attn"], unfit=lambda case, device: None)
    (figure,) = measure(case, [peer], CPU, 5).figures
    assert figure.time_us is not None, figure
    assert len(library) > 5


def test_peers_that_nobody_named():

    def names(case, where):
        return [peer.name for peer in defaults(case, torch.device(where))]

    case, host = dense(), cases("overhead")[0]
    assert "sdpa" not in names(case, "cuda") and "sdpa" in names(host, "cuda")
    assert {"flex", "math", "fa3", "fa4", "cudnn"} <= set(names(case, "cuda"))
    assert not {"flex", "math", "sdpa"} & set(names(case, "cpu")) and "flash" in names(case, "cpu")
    compiled = dataclasses.replace(host, compiled=True)
    assert names(compiled, "cuda") == ["heedful", "sdpa"]


def test_scores_that_would_not_fit_are_not_made():
    big = Case("forward", AttentionProblem.dense(4, 16384, 16384, 16, 16, 64))
    assert PEERS["math"].why_not(big, torch.device("cuda")) == "would hold 64 GiB of scores"
    fits = Case("forward", AttentionProblem.dense(1, 16384, 16384, 16, 16, 64))
    assert PEERS["math"].why_not(fits, torch.device("cuda")) is None


def test_the_device_is_waited_for_around_a_turn_of_host_calls_and_never_within(monkeypatch):
    seen: list[Any] = []
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "synchronize", seen.append)
    calls = {"ours": [lambda: seen.append("call")] * 3}
    timing.interleaved_host(calls, gpu, 5, [1], lambda *_: seen.append("look"))
    assert seen == [gpu, "call", "call", "call", gpu, "look"] * 6
