"""What the bench of context parallelism times and predicts beside the calls of its rows, on a
stand-in for a GPU."""

import math
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from heedful.bench import parallel
from heedful.bench.parallel import Case


def test_memory_of_a_call_is_its_peak_beside_what_was_there_and_what_ranks_share(monkeypatch):
    events, held = [], {"now": 5 * 2**20, "peak": 99 * 2**20}

    def call():
        events.append("call")
        held["peak"] += 3 * 2**20

    def reset():
        events.append("reset")
        held["peak"] = held["now"]

    for name, function in {
        "synchronize": lambda: events.append("wait"),
        "reset_peak_memory_stats": reset,
        "memory_allocated": lambda: held["now"],
        "max_memory_allocated": lambda: held["peak"],
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    assert parallel.more_memory(call, SimpleNamespace(peers=None)) == 3
    assert parallel.more_memory(call, object()) == 3
    assert parallel.more_memory(call, SimpleNamespace(peers=SimpleNamespace(size=2**21))) == 5
    assert events == ["wait", "reset", "call", "wait"] * 3


def test_a_call_is_captured_after_a_run_of_its_own_on_the_stream_that_waits(monkeypatch):
    order, within = [], []

    class Stream:
        def wait_stream(self, other):
            order.append(("waits for", other))

    @contextmanager
    def entered(*what, **more):
        within.append((what, more))
        yield
        within.pop()

    graphs = []

    class Graph:
        def __init__(self):
            graphs.append(self)

        def replay(self):
            order.append("replay")

    for name, value in {
        "Stream": Stream,
        "CUDAGraph": Graph,
        "current_stream": lambda: "the callers",
        "stream": lambda stream: entered(stream),
        "graph": lambda graph, **more: entered(graph, **more),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    replay = parallel.captured(lambda: order.append(("call", within[-1], len(within))))
    first, (_, ((stream,), none), depth), (_, capture, _) = order
    assert first == ("waits for", "the callers") and isinstance(stream, Stream)
    assert (none, depth, len(graphs)) == ({}, 1, 1)
    how = {"stream": stream, "capture_error_mode": "thread_local"}
    assert capture == ((graphs[0],), how) and not within
    replay()
    assert order[3:] == ["replay"]


class Other(parallel.Peer):
    """Somebody else's schedule: the batch's last rows are this rank's."""

    def __init__(self, lengths=(4,), window=-1):
        self.given, self.rows = (lengths, window), torch.tensor([2, 3])

    def call(self, q, k, v):
        return q - k + v


def test_others_schedules_are_planned_at_once_spread_their_way_and_predict_nothing(monkeypatch):
    monkeypatch.setitem(parallel.PEERS, "other", Other)
    made, took = parallel.planned(Case("a case", (3, 1), 7), "other")
    assert made.given == ((3, 1), 7) and took == 0
    rows = [torch.arange(4.0).reshape(4, 1) * step for step in (1, 10, 100, 1000)]
    work = parallel.spread(Case("one", (4,)), made, rows[:3], rows[3])
    assert work.forward().flatten().tolist() == [2 - 20 + 200, 3 - 30 + 300]
    # dout's rows are this rank's, too.
    assert [grad.flatten().tolist() for grad in work.both()] == [
        [2000, 3000],
        [-2000, -3000],
        [2000, 3000],
    ]
    assert all(map(math.isnan, parallel.predicted(made)))


def test_a_plan_is_predicted_by_its_strategy_or_its_grid_in_milliseconds(monkeypatch):
    told = "mask", (4, 2), (parallel.DIM, parallel.DIM), 2

    def times(layout, *given):
        assert (layout, *given[:-1]) == ("layout", *told)
        return {"ring": SimpleNamespace(forward=1.0, both=2.0 + given[-1])}

    def in_grid(shards, width, *given):
        assert (shards, width, *given) == ("shards", 3, *told)
        return SimpleNamespace(forward=0.5, both=0.25)

    monkeypatch.setattr(parallel.cost, "times", times)
    monkeypatch.setattr(parallel.cost, "in_grid", in_grid)
    facts = {"mask": "mask", "heads": (4, 2), "layout": "layout", "strategy": "ring"}
    grid = SimpleNamespace(shards="shards", row=SimpleNamespace(ranks=3))
    for more, want in (
        ({"grid": None, "peers": None}, (1000, 2000)),
        ({"grid": None, "peers": "some"}, (1000, 3000)),
        ({"grid": grid, "peers": None}, (500, 250)),
    ):
        assert parallel.predicted(SimpleNamespace(**facts, **more)) == want


def test_tokens_are_timed_on_their_way_out_and_back(monkeypatch):
    said = []

    def shard(x):
        said.append(("shard", x))
        return f"part of {x}"

    made = SimpleNamespace(shard=shard, unshard=lambda x: said.append(("unshard", x)))
    monkeypatch.setattr(parallel, "_median", lambda call: (call(), float(len(said)))[1])
    whole: Any = "q"
    out: Any = "out"
    assert parallel.token_times(made, whole, out) == (2.0, 3.0)
    assert said == [("shard", "out"), ("shard", "q"), ("unshard", "part of out")]


@pytest.mark.parametrize("ranks_begin_at_once", [True, False])
def test_a_decode_is_timed_by_calls_and_by_graphs_after_one_of_each(
    ranks_begin_at_once, monkeypatch
):
    order, taken = [], iter([*range(5), *range(10, 15)])

    def timed(run, together):
        assert together is ranks_begin_at_once
        order.append("timed")
        run()
        return next(taken)

    monkeypatch.setattr(parallel, "MOST", 5)
    monkeypatch.setattr(parallel, "_timed", timed)
    monkeypatch.setattr(parallel, "captured", lambda call: lambda: order.append("replay"))
    assert parallel._decoded(lambda: order.append("call"), ranks_begin_at_once) == [2, 12]
    each = [["call"] + ["timed", "call"] * 5, ["replay"] + ["timed", "replay"] * 5]
    assert order == sum(each, [])
