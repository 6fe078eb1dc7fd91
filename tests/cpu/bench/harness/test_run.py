"""One case through a benchmark: who is let in, what is called when, what is written down."""

import dataclasses
import itertools
import random
import statistics
import time
from typing import Any

import pytest
import torch

from heedful.bench.harness import machine, run, timing
from heedful.bench.harness.cases import Case
from heedful.bench.harness.check import Checker
from heedful.bench.harness.exact import Results
from heedful.bench.harness.peers import PEERS, Peer, draw
from heedful.bench.harness.run import BASES, Figure, Outcome, Trial, measure, records
from heedful.bench.harness.timing import Spread
from heedful.core.call.problem import AttentionProblem

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def dense(direction: str = "forward", **facts) -> Case:
    problem = AttentionProblem.dense(
        2, 24, 32, 4, 2, 16, dtype="float32", needs_grad=direction == "backward"
    )
    return Case("forward", problem, direction, **facts)


def peer(name: str, make=PEERS["math"].make) -> Peer:
    return Peer(name, "", lambda case, device: None, make)


def test_base_ratios_come_from_the_first_that_was_timed():
    assert BASES == ("bf16", "cudnn", "flash", "sdpa", "math")
    # As docs/benchmarks.md says of host time.
    assert run.HOST_SETS == 256


class Stub:
    """A trial whose peers took so long, round by round."""

    times_of: dict[str, list[float]] = {}

    def __init__(self, case, device, entrants):
        self.peers, self.entered = entrants, []
        self.refused = {"gone": Figure("gone", missing="is not here")}

    def enter_all(self):
        self.entered = [peer.name for peer in self.peers]

    def times(self, rounds):
        assert rounds == 6 and self.entered == ["gone", *self.times_of]
        return self.times_of


@pytest.fixture
def stub(monkeypatch):
    clocks = ({"sm_mhz": number} for number in itertools.count())
    monkeypatch.setattr(machine, "clocks", lambda: next(clocks))
    monkeypatch.setattr(run, "Trial", Stub)

    def measured(case, device, bases=BASES, **times):
        monkeypatch.setattr(Stub, "times_of", times)
        named = [peer(name) for name in ("gone", *times)]
        return measure(case, named, device, 6, bases)

    return measured


def test_an_outcome_has_every_peers_figure_in_their_order(stub):
    made = stub(dense(), CPU, flash=[4.0, 8.0, 6.0], heedful=[2.0, 2.0, 1.5])
    assert [figure.peer for figure in made.figures] == ["gone", "flash", "heedful"]
    gone, flash, ours = made.figures
    assert gone == Figure("gone", missing="is not here") and not gone.wrong
    assert flash == Figure("flash", Spread(6.0, 4.0, 8.0), Spread(1.0, 1.0, 1.0))
    assert ours == Figure("heedful", Spread(2.0, 1.5, 2.0), Spread(4.0, 2.0, 4.0))
    assert (
        made.base == "flash"
        and made.figure("heedful") is ours
        and made.figure("none") == Figure("none")
    )
    # A CPU has no clocks to ask for; a GPU's are asked for before and after.
    assert made.clocks == ({}, {})
    assert stub(dense(), CUDA, flash=[1.0]).clocks == ({"sm_mhz": 0}, {"sm_mhz": 1})


def test_the_base_is_the_first_of_those_wanted(stub):
    three = {"math": [1.0], "sdpa": [1.0], "flash": [1.0]}
    assert stub(dense(), CUDA, **three).base == "flash"
    assert stub(dense(), CUDA, ("math", "flash"), **three).base == "math"
    # SDPA's own dispatch is what a user would call, and calls are what host time is about.
    assert stub(dense(host=True), CUDA, **three).base == "sdpa"
    alone = stub(dense(), CUDA, heedful=[2.0])
    assert alone.base is None and alone.figures[1].ratio is None
    assert alone.figures[1].time_us == Spread(2.0, 2.0, 2.0)


def test_host_time_on_a_cpu_is_refused_for_every_peer():
    made = measure(dense(host=True), [PEERS["heedful"], PEERS["math"]], CPU)
    reason = "on a CPU the host's time is the kernel's"
    assert made.figures == [Figure(name, missing=reason) for name in ("heedful", "math")]
    assert made.base is None


# The trial itself.


class Log:
    """A peer that notes the inputs of each of its calls."""

    def __init__(self, name="noted", change=lambda number, out: out):
        self.calls: list[Any] = []
        self.made = 0
        self.change = change
        self.peer = peer(name, self.make)

    def make(self, case, inputs):
        self.made += 1
        forward = PEERS["math"].make(case, inputs)

        def call(q, k, v):
            self.calls.append((q, k, v))
            return self.change(len(self.calls), forward(q, k, v))

        return call


def test_three_calls_are_looked_at_before_any_is_timed():
    log = Log()
    trial = Trial(dense(), CPU, entrants=[log.peer])
    trial.enter_all()
    assert len(log.calls) == 3 and log.made == 1 and not trial.refused
    q, k, v = log.calls[0]
    assert not (q.requires_grad or k.requires_grad or v.requires_grad)
    inputs = draw(dense(), CPU)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), inputs, strict=False))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_graph_is_made_where_the_case_has_one(direction, grad):
    log = Log()
    trial = Trial(dense(direction, grad=grad), CPU, entrants=[log.peer])
    trial.enter_all()
    assert not trial.refused
    wants = grad or direction == "backward"
    assert all(x.requires_grad == wants and x.is_leaf for x in log.calls[0])
    # A backward's forward is kept.
    assert len(log.calls) == (1 if direction == "backward" else 3)


@pytest.fixture
def few_sets(monkeypatch):
    monkeypatch.setattr(run, "HOST_SETS", 9)
    return dense(host=True)


def test_host_calls_go_over_many_sets_of_which_some_are_looked_at(few_sets):
    log = Log()
    trial = Trial(few_sets, CPU, entrants=[log.peer])
    trial.enter_all()
    watched = {float(q.sum()): number for number, (q, _, _) in enumerate(log.calls)}
    # Three calls of each of four sets, the first among them.
    assert len(log.calls) == 12 and len(watched) == 4
    first = draw(few_sets, CPU, 0)
    assert torch.equal(log.calls[0][0], first.q)
    assert [float(q.sum()) for q, _, _ in log.calls[:4]] == list(watched)
    log.calls.clear()
    times = trial.times(5)
    assert len(times["noted"]) == 5 and len(log.calls) == 9 * 6
    want = [float(draw(few_sets, CPU, seed).q.sum()) for seed in range(9)]
    assert [float(q.sum()) for q, _, _ in log.calls[:9]] == want and len(set(want)) == 9
    assert set(watched) <= set(want)


def test_a_call_that_is_wrong_on_a_watched_set_alone_is_refused(few_sets):
    # Calls before the timing go over the watched sets in turn: the second is another's.
    log = Log(change=lambda number, out: out * 2 if number == 2 else out)
    trial = Trial(few_sets, CPU, entrants=[log.peer])
    trial.enter_all()
    assert trial.refused["noted"].wrong
    assert trial.times(5) == {}


def test_a_set_beyond_the_watched_makes_no_reference(few_sets, monkeypatch):
    made = []

    class Counted(Checker):
        def __init__(self, case, inputs):
            made.append(inputs)
            super().__init__(case, inputs)

    monkeypatch.setattr(run, "Checker", Counted)
    trial = Trial(few_sets, CPU, entrants=[Log(name).peer for name in ("one", "two")])
    trial.enter_all()
    trial.times(5)
    # One reference a watched set, whoever asks for it.
    assert len(made) == 4


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("first\nsecond"), "ValueError: first"),
        (RuntimeError(), "RuntimeError: "),
        (MemoryError("much"), "MemoryError: much"),
    ],
)
@pytest.mark.parametrize("name", ["fa3", "heedful", "heedful:cpu"])
def test_what_a_peer_raises_is_why_it_has_no_figure(name, error, reason):
    def raising(case, inputs):
        raise error

    later = Log(name, lambda number, out: exec("raise error", {"error": error}))
    for bad in (peer(name, raising), later.peer):
        trial = Trial(dense(), CPU, entrants=[bad])
        trial.enter_all()
        # An error of heedful itself is a wrong result.
        assert trial.refused == {
            name: Figure(name, missing=reason, wrong=name.startswith("heedful"))
        }
        assert trial.times(5) == {}


def test_a_peer_that_cannot_is_never_made():
    log = Log()
    trial = Trial(
        dense(),
        CPU,
        entrants=[dataclasses.replace(log.peer, unfit=lambda case, device: f"not on {device}")],
    )
    trial.enter_all()
    assert trial.refused == {"noted": Figure("noted", missing="not on cpu")} and not log.made


def test_a_wrong_peer_is_told_once_and_by_its_first_fault():
    log = Log(change=lambda number, out: out / 0 if number == 1 else out[:, 1:])
    trial = Trial(dense(), CPU, entrants=[log.peer])
    trial.enter_all()
    assert (trial.refused["noted"].missing or "").startswith("out is not finite")


def test_a_compiled_case_compiles_each_peer_anew(monkeypatch):
    steps = []

    def compiled(function):
        steps.append("compile")

        def call(*tensors):
            steps.append("call")
            return function(*tensors)

        return call

    monkeypatch.setattr(torch._dynamo, "reset", lambda: steps.append("reset"))
    monkeypatch.setattr(torch, "compile", compiled)
    for case, want in (
        (dense(compiled=True), ["reset", "compile", "call", "call", "call"]),
        (dense(), []),
    ):
        steps.clear()
        trial = Trial(case, CPU, entrants=[peer("math")])
        trial.enter_all()
        assert steps == want and not trial.refused


def test_a_gpus_memory_is_given_back_after_each_peer(monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    monkeypatch.setattr(run, "draw", lambda case, device, seed: draw(case, CPU, seed))
    trial = Trial(dense(), CUDA, entrants=[Log().peer])
    trial.enter_all()
    assert emptied == [1] and not trial.refused
    Trial(dense(), CPU, entrants=[Log().peer]).enter_all()
    assert emptied == [1]


# What is written down.


def test_a_record_says_what_the_case_was(monkeypatch):
    monkeypatch.setattr(run, "surroundings", lambda device: {"device": str(device)})
    problem = AttentionProblem.dense(
        3, 70, 70, 6, 2, 16, dtype="float32", causal=True, head_dim_v=8, total_q=88, total_k=88
    )
    case = Case("shapes", problem, "forward", True, True, True, True, 4.0, (9, 70, 9))
    made = Outcome(case, "flash", [Figure("fa3", missing="no", wrong=True)], ({"a": 1}, {"a": 2}))
    (record,) = records(made, CPU)
    assert record == {
        "device": "cpu",
        "case": case.name,
        "group": "shapes",
        "direction": "forward",
        "host": True,
        "grad": True,
        "compiled": True,
        "paged": True,
        "batch": 3,
        "seqlen_q": 70,
        "seqlen_k": 70,
        "heads_q": 6,
        "heads_k": 2,
        "head_dim": 16,
        "head_dim_v": 8,
        "dtype": "float32",
        "causal": True,
        "window": [-1, 0],
        "lengths": [9, 70, 9],
        "input_scale": 4.0,
        "clocks_before": {"a": 1},
        "clocks_after": {"a": 2},
        "base": "flash",
        "peer": "fa3",
        "missing": "no",
        "wrong": True,
    }


def test_a_record_of_heedful_says_what_ran():
    spread = Spread(1.0, 0.5, 2.0)
    names = ["heedful", "heedful:cpu", "heedful:sdpa", "heedful:portable", "math"]
    figures = [Figure(name, spread) for name in names]
    backward = dense("backward")
    ours, tiled, *others = records(Outcome(backward, None, figures), CPU)
    want = {"forward": "cpu", "backward": "cpu"}
    assert ours["backends"] == tiled["backends"] == want
    assert ours["num_splits"] >= 1 and ours["tiles"] == {}
    # Neither runs this case here, nor is another peer's plan known.
    assert not any({"backends", "tiles", "num_splits"} & record.keys() for record in others)
    forward = records(Outcome(dense(), None, figures), CPU)
    assert [r.get("backends", {}).get("forward") for r in forward] == [
        "sdpa",
        "cpu",
        "sdpa",
        None,
        None,
    ]


def test_a_record_has_the_numbers_of_its_figure():
    figure = Figure("math", Spread(4.0, 2.0, 8.0), Spread(1.5, 1.25, 1.75))
    times = {"time_us": 4.0, "time_us_low": 2.0, "time_us_high": 8.0}
    ratios = {"ratio": 1.5, "ratio_low": 1.25, "ratio_high": 1.75}
    case = dense()
    speed = {"tflops": case.flops() / 4e6, "kv_gb_per_s": case.kv_bytes() / 4e3}
    assert run._numbers(case, figure) == pytest.approx(times | ratios | speed)
    # The host's time says nothing of the device's speed.
    assert run._numbers(dense(host=True), figure) == times | ratios
    assert run._numbers(case, dataclasses.replace(figure, ratio=None)) == pytest.approx(
        times | speed
    )


# Clocks.


def test_a_gpu_sleeps_for_as_long_as_a_call_takes_to_queue_within_bounds(monkeypatch):
    slept = []

    class Event:
        def __init__(self, enable_timing):
            pass

        record = elapsed_time = lambda *_: 1.0

    for name, stand_in in {
        "Event": Event,
        "synchronize": lambda *_: None,
        "_sleep": slept.append,
        "get_device_properties": lambda _: type("P", (), {"L2_cache_size": 0}),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(timing, "FLUSH_TIMES_L2", 0)
    clock = timing._gpu_clock(CPU)
    for queued in (0.0, 1e-4, 1.0):
        now = iter([7.0, 7.0 + queued])
        monkeypatch.setattr(time, "perf_counter", lambda now=now: next(now))
        assert clock(lambda: 5, 1, 0) == ([1e-3], 5)
    # Twice that and 50 us, at most 5 ms, of cycles at 2 GHz.
    assert slept == pytest.approx([1e5, 5e5, 1e7], rel=1e-5)


def test_the_first_round_of_host_times_is_a_warm_up(monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now) ** 2 * 1e-6)
    times = timing.interleaved_host({"a": [lambda: None] * 4}, CPU, 5, [1], lambda *_: None)
    # Round n begins at (2n)^2 us and ends at (2n + 1)^2.
    assert times["a"] == pytest.approx([(4 * n + 1) / 4 for n in range(1, 6)])


def test_host_times_wait_for_the_device_between_turns_alone(monkeypatch):
    log = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    sets = [lambda: log.append("call")] * 3
    timing.interleaved_host({"a": sets}, CUDA, 5, [2], lambda *_: log.append("look"))
    assert log == ["wait", "call", "call", "call", "wait", "look"] * 6
    log.clear()
    timing.interleaved_host({"a": sets}, CPU, 5, [2], lambda *_: None)
    assert "wait" not in log


def test_fewer_than_five_rounds_of_host_times_are_refused():
    with pytest.raises(ValueError, match="rounds must be >= 5, got 4"):
        timing.interleaved_host({}, CPU, 4, [0], lambda *_: None)
    assert timing.interleaved_host({}, CPU, 5, [0], lambda *_: None) == {}


def test_a_rounds_calls_are_counted_by_the_median_of_three(monkeypatch):
    asked = []

    def clock(call, count, keep):
        asked.append((count, keep))
        return [0.004, 1.0, 0.001], None

    assert timing._calls_a_round(clock, lambda: None) == 5
    assert asked == [(3, 0)]
    # A clock that says nothing passed gets the most.
    assert timing._calls_a_round(lambda *_: ([0.0] * 3, None), lambda: None) == 50


def test_which_call_is_looked_at_is_drawn_among_all_of_a_turn(monkeypatch):
    kept = []

    def clock(call, count, keep):
        kept.append((count, keep))
        return [0.005] * count, None

    monkeypatch.setattr(timing, "_cpu_clock", clock)
    timing.interleaved({"a": lambda: None}, CPU, 40, lambda *_: None)
    assert {count for count, _ in kept[1:]} == {4}
    assert {keep for _, keep in kept[1:]} == {0, 1, 2, 3}


def test_a_spread_is_the_median_between_the_ends():
    values = [random.random() for _ in range(9)]
    spread = Spread.of(values)
    assert spread == Spread(statistics.median(values), min(values), max(values))
    with pytest.raises(ValueError):
        timing.ratios([1.0, 2.0], [1.0])


def test_spoiling_leaves_no_number_in_what_was_returned():
    one, two = torch.ones(3, requires_grad=True) * 2, torch.ones(2)
    run._spoil(one)
    assert one.isnan().all()
    run._spoil((two, None))
    assert two.isnan().all()


def test_results_of_a_call_are_named_in_their_order():
    case = dense("backward")
    inputs = draw(case, CPU)
    call = run.call_of(case, PEERS["math"].make(case, inputs), inputs)
    first, second = call.results(call.run()), call.results(call.run())
    for one, other, like in zip(first, second, (inputs.q, *inputs[:3]), strict=True):
        assert one is not None and other is not None
        assert one.shape == like.shape and torch.equal(one, other) and one.grad_fn is None
    assert Checker(case, inputs).why_wrong(first) is None
    assert Checker(case, inputs).why_wrong(Results(first.out, *first[:0:-1])) is not None
