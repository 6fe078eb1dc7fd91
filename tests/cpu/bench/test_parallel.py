"""The batches that context parallelism is timed on, and what is said of them. One rank stands in
for all, and devices are the CPU.
"""

import math
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from heedful import flash_attn_with_kvcache
from heedful.bench import parallel
from heedful.bench.parallel import Case, Work, cases, log_normal
from heedful.distributed.layouts import LAYOUTS


@pytest.mark.parametrize("ranks", [2, 4])
def test_batches_grow_with_the_ranks_and_their_names_say_how_much(ranks):
    found = {case.name: sum(case.lengths) for case in cases(ranks)}
    assert found["causal, 8192 a GPU"] == 8192 * ranks
    assert found[f"64 documents of {32 * ranks}k, seed 4"] == 32768 * ranks
    assert all(case.layout in LAYOUTS for case in cases(ranks))


def test_log_normal_lengths_fill_the_batch_and_are_the_same_again():
    found = log_normal(64, 65536, 1)
    assert sum(found) == 65536 and min(found) >= 1
    assert found == log_normal(64, 65536, 1) != log_normal(64, 65536, 2)


def test_batches_are_of_one_document_of_many_and_of_a_window_what_says_most_first():
    found = [(case.name, len(case.lengths), case.window, case.layout) for case in cases(2, seeds=2)]
    assert found == [
        ("causal, 8192 a GPU", 1, -1, "zigzag"),
        ("64 documents of 64k, seed 0", 64, -1, "documents"),
        ("window 1024 of 64k", 1, 1024, "contiguous"),
        ("causal, 32768 a GPU", 1, -1, "zigzag"),
        ("64 documents of 64k, seed 1", 64, -1, "documents"),
        ("causal, 16384 a GPU", 1, -1, "zigzag"),
    ]
    assert cases(4)[0].name == "causal, 16384 a GPU" and len(cases(4)) == 9
    assert [sum(case.lengths) for case in cases(3, seeds=0)] == [
        each * 3 for each in (16384, 32768, 32768, 8192)
    ]


def test_logarithms_of_lengths_are_spread_as_told():
    for sigma in (0.3, 1.2):
        lengths = torch.tensor(log_normal(4000, 10**9, 7, sigma), dtype=torch.float64)
        assert lengths.log().std().item() == pytest.approx(sigma, rel=0.05)
    assert log_normal(3, 3, 0) == (1, 1, 1)


@pytest.fixture
def one(monkeypatch):
    """Ranks of which this is the first of two; none waits."""
    reduced = []
    ranks = SimpleNamespace(
        ReduceOp=parallel.dist.ReduceOp,
        get_rank=lambda: 0,
        get_world_size=lambda: 2,
        barrier=lambda: reduced.append("barrier"),
        all_reduce=lambda tensor, op: reduced.append(op),
    )
    monkeypatch.setattr(parallel, "dist", ranks)
    ranks.reduced = reduced
    return ranks


def test_each_time_is_a_median_of_as_many_calls_as_its_milliseconds_hold(one, monkeypatch):
    once = iter([100.0, 1.0, 50.0, 1e9])
    taken, counts = {}, []

    def timed(call, together):
        assert together
        if call not in taken:
            taken[call] = next(once)
            counts.append(0)
            return taken[call]
        counts[-1] += 1
        # The first are slow, and are not most.
        return 9.0 if counts[-1] < 3 else float(len(counts))

    monkeypatch.setattr(parallel, "_timed", timed)
    monkeypatch.setattr(parallel, "captured", lambda call: lambda: call())
    ran = []
    work = Work(lambda x: ran.append(x.requires_grad) or x * 2, [torch.ones(2)], torch.ones(2))
    assert work.times(True) == [1.0, 2.0, 3.0, 4.0]
    # 400 ms, at least 7 times and at most 50.
    assert counts == [7, 50, 8, 7]
    assert one.reduced == [parallel.dist.ReduceOp.MAX] * 4
    assert len(ran) == 4


def test_work_is_a_forward_without_gradients_or_with_all_of_them():
    x, y = torch.tensor([3.0]), torch.tensor([5.0])
    work = Work(lambda a, b: a * b, [x, y], torch.tensor([2.0]))
    assert not work.forward().requires_grad and work.forward().item() == 15
    assert [grad.item() for grad in work.both()] == [10.0, 6.0]


def test_a_call_is_timed_by_events_once_all_ranks_are_there(one, monkeypatch):
    order = one.reduced

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            order.append("record")

        def synchronize(self):
            order.append("end")

        def elapsed_time(self, end):
            assert end is not self
            return 2.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("sync"))
    assert parallel._timed(lambda: order.append("call"), True) == 2.5
    assert order == ["sync", "barrier", "sync", "record", "call", "record", "end"]
    order.clear()
    parallel._timed(lambda: order.append("call"), False)
    assert order == ["sync", "record", "call", "record", "end"]


def test_what_ranks_computed_is_near_by_the_roundings_of_each_part(one):
    want = torch.tensor([1.0, -8.0], dtype=torch.bfloat16)
    # Four roundings by half an eps of the largest: 8 * 2 / 128.
    for moved, near in ((0.125, True), (-0.125, True), (0.13, False), (-0.13, False)):
        got = torch.tensor([1.0 + moved, -8.0])
        assert parallel._is_near(got, want) is near


def test_one_gpu_takes_the_faster_way(monkeypatch):
    asked = []

    def packed(q, k, v, *lengths, causal, window_size):
        asked.append(("packed", lengths[0].tolist(), lengths[2:], causal, window_size))
        return q

    def dense(q, k, v, causal, window_size):
        asked.append(("dense", tuple(q.shape), causal, window_size))
        return q

    def times(work, together):
        assert not together
        work.forward()
        return [1.0, 4.0] if asked[-1][0] == "packed" else [2.0, 3.0]

    monkeypatch.setattr(parallel, "flash_attn_varlen_func", packed)
    monkeypatch.setattr(parallel, "flash_attn_func", dense)
    monkeypatch.setattr(Work, "times", times)
    tensors = [torch.zeros(5, 2, 4) for _ in range(3)]
    _, found = parallel.alone(Case("documents", (2, 3), 6), tensors, tensors[0], [])
    assert found == [1.0, 4.0] and asked == [("packed", [0, 2, 5], (3, 3), True, (6, 0))]
    asked.clear()
    _, found = parallel.alone(Case("one", (5,)), tensors, tensors[0], [])
    assert found == [1.0, 3.0] and asked[1] == ("dense", (1, 5, 2, 4), True, (-1, 0))
    assert asked[0] == ("packed", [0, 5], (5, 5), True, (-1, 0))
    asked.clear()
    # Its times are known.
    assert parallel.alone(Case("one", (5,)), tensors, tensors[0], [7.0])[1] == [7.0] and not asked


class Plan:
    """One rank's shard is all rows."""

    def __init__(self, **facts):
        self.facts, self.mask = facts, "mask"
        self.layout = SimpleNamespace(balance=lambda mask: 1.25 if mask == "mask" else 0)

    def shard(self, x):
        return x

    def unshard(self, x):
        return x


@pytest.mark.parametrize("rank", [0, 1])
def test_a_row_has_times_of_both_their_efficiency_balance_and_the_plans_time(
    rank, one, monkeypatch
):
    one.get_rank = lambda: rank
    ways = [way for way in parallel.WAYS if way not in parallel.PEERS]
    # The first is right, the last cannot be.
    plans, wrong = [], iter([0.0, *[7.0] * (len(ways) - 2)])
    monkeypatch.setattr(parallel, "HEADS", 4)
    monkeypatch.setattr(parallel, "HEADS_K", 2)
    monkeypatch.setattr(parallel, "DIM", 8)

    def made(**facts):
        plans.append(Plan(**facts))
        if len(plans) == len(ways):
            raise ValueError("no such way here")
        plans[-1].off = next(wrong)
        return plans[-1]

    def whole(q, k, v):
        return q + k.sum() * 0 + v.sum() * 0

    def call(q, k, v, plan, causal, window_size):
        assert causal and window_size == (3, 0)
        return whole(q, k, v) + plan.off

    def alone(case, tensors, dout, times):
        assert times == []
        assert [x.shape[1] for x in tensors] == [4, 2, 2] and dout.shape == (5, 4, 8)
        return Work(whole, tensors, dout), [1.0, 3.0, 2.0, 6.0]

    clock = iter([1.0, 1.5] * (len(ways) - 1) + [1.0])
    monkeypatch.setattr(parallel.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(parallel, "plan", made)
    monkeypatch.setattr(parallel, "attention", call)
    monkeypatch.setattr(parallel, "alone", alone)
    monkeypatch.setattr(Work, "times", lambda work, together: [0.5, 2.0, 4.0, 3.0])
    monkeypatch.setattr(parallel, "token_times", lambda made, q, out: (0.25, 0.125))
    monkeypatch.setattr(parallel, "more_memory", lambda call, made: len(call()))
    monkeypatch.setattr(parallel, "predicted", lambda made: (0.75, 0.5))
    case, measured = Case("a case", (2, 3), 3), parallel.Links(225e9, 352e9)
    known: dict[str, list[float]] = {}
    found = list(parallel.rows(case, torch.device("cpu"), measured, ways, known))
    assert one.reduced.count(parallel.dist.ReduceOp.MAX) == len(ways) - 1
    facts = {"heads_q": 4, "heads_k": 2, "head_dim": 8, "lengths": (2, 3), "window_size": (3, 0)}
    told = [facts | parallel.WAYS[way] | {"layout": "zigzag"} for way in ways]
    assert [plan.facts for plan in plans] == told
    if rank:
        assert not found and not known
        return
    assert known == {"a case": [1.0, 3.0, 2.0, 6.0]}
    numbers = [1.0, 0.5, 1.0, 3.0, 2.0, 0.75, 2.0, 4.0, 0.25, 6.0, 3.0, 1.0, 0.75, 0.5, 1.25, 500.0]
    numbers += [0.25, 0.125, 225, 352, 5, 3]
    words = f"{'a case':34} {ways[0]:12} {'zigzag':10}"
    assert found[0].startswith(words)
    assert [float(x) for x in found[0].removeprefix(words).split()] == numbers
    said = ["wrong"] * (len(ways) - 2) + ["refused: no such way here"]
    expected = zip(ways[1:], said, strict=True)
    assert found[1:] == [f"{'a case':34} {way:12} {'zigzag':10} {end}" for way, end in expected]


@pytest.mark.parametrize(
    "words, names, ways",
    [
        ([], ["a b", "c"], [*parallel.WAYS]),
        (["c"], ["c"], [*parallel.WAYS]),
        (["b", "x", "=ring"], ["a b"], ["ring"]),
    ],
)
def test_a_rank_says_the_cases_and_ways_that_words_choose(words, names, ways, one, monkeypatch):
    told, said, kept = [], [], {}
    one.init_process_group = lambda *where, **facts: told.append((where, facts))
    one.destroy_process_group = lambda: told.append("destroyed")
    monkeypatch.setattr(parallel, "cases", lambda ranks: [Case("a b", (ranks,)), Case("c", (1,))])
    monkeypatch.setattr(parallel, "links", lambda device: "links")
    monkeypatch.setattr(parallel, "decode_row", lambda batch, keys, device: f"{batch} of {keys}")

    def rows(case, device, measured, some, known):
        assert measured == "links" and known is kept.setdefault("known", known)
        return [f"{case.name} by {way}" for way in some]

    monkeypatch.setattr(parallel, "rows", rows)
    monkeypatch.setattr(torch.cuda, "set_device", told.append)
    monkeypatch.setattr(parallel.script, "say", said.append)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "")
    monkeypatch.delenv("NCCL_NVLS_ENABLE")
    parallel._rank(1, 2, 77, words)
    group = {"init_method": "tcp://127.0.0.1:77", "rank": 1, "world_size": 2}
    assert told == [torch.device("cuda", 1), (("nccl",), group), "destroyed"]
    assert parallel.os.environ["NCCL_NVLS_ENABLE"] == "0"
    decodes = [f"{batch} of {keys}" for batch, keys in parallel.DECODES]
    # All cases by the first way, then each by the others.
    lines = [f"{name} by {ways[0]}" for name in names]
    lines += [f"{name} by {way}" for name in names for way in ways[1:]]
    assert said == lines + decodes * (not words)


def test_the_program_starts_a_process_for_each_gpu(monkeypatch):
    said, spawned = [], []
    monkeypatch.setattr(parallel.script, "current_gpu", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(parallel.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.setattr(parallel.script, "say", lambda *lines: said.extend(lines))
    monkeypatch.setattr(parallel, "spawn", lambda *how, **more: spawned.append((how, more)))
    monkeypatch.setattr(parallel.sys, "argv", ["bench", "causal"])
    parallel.main()
    ((rank, (ranks, port, words)), more) = spawned[0]
    assert (rank, ranks, words, more) == (parallel._rank, 3, ["causal"], {"nprocs": 3}) and port > 0
    assert said[0] == "3 x GPU, NCCL 2.27.5"
    names = "case way layout one fwd E one both E one fwd graph E one both grph E predicted both"
    names += " balance plan shard unshard GB/s copied MiB both"
    assert said[1].split() == names.split()


def test_a_way_that_there_is_not_is_refused(monkeypatch):
    monkeypatch.setattr(parallel.script, "current_gpu", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(parallel.sys, "argv", ["bench", "=rings"])
    with pytest.raises(parallel.script.Refused, match="a way must be one of .* got 'rings'"):
        parallel.main()


def test_links_are_bytes_of_other_ranks_a_second_of_the_slowest(one, monkeypatch):
    taken = iter([4.0, 2.0])
    monkeypatch.setattr(parallel, "LINK_BYTES", 1 << 20)
    monkeypatch.setattr(parallel, "_median", lambda call: next(taken))
    shared = SimpleNamespace(view=lambda rank, *_: torch.zeros(1 << 20))
    monkeypatch.setattr(parallel, "peers_of", lambda group, size: (shared, ""))
    found = parallel.links(torch.device("cpu"))
    assert (found.send, found.copy) == ((1 << 20) / 4e-3, (1 << 20) / 2e-3)
    taken = iter([4.0])
    monkeypatch.setattr(parallel, "peers_of", lambda group, size: (None, "of many hosts"))
    assert parallel.links(torch.device("cpu")).copy == 0


def test_a_decode_of_one_rank_has_times_of_both(monkeypatch, tmp_path):
    dist = parallel.dist
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        taken = iter([[4.0, 2.0], [2.0, 1.0]])
        monkeypatch.setattr(
            parallel, "_decoded", lambda call, together: call() is None or next(taken)
        )
        found = parallel.decode_row(2, 24, torch.device("cpu"))
        words = "decode, 2 x 24 keys a GPU"
        assert found.startswith(words)
        assert [*map(float, found.removeprefix(words).split())] == [4, 2, 2, 2, 1, 2]
        monkeypatch.setattr(parallel, "attention_with_kvcache", lambda q, k, v: q * 9)
        taken = iter([[4.0, 2.0], [2.0, 1.0]])
        assert parallel.decode_row(2, 24, torch.device("cpu")).endswith(" wrong")
    finally:
        dist.destroy_process_group()


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


def test_a_time_is_the_median_of_the_slowest_rank_after_a_first_call(one, monkeypatch):
    tensor, calls, taken = (
        torch.tensor,
        [],
        [9.0, 1.0, 5.0, 2.0, 3.0, 4.0, 8.0, 7.0, 6.0, 10.0, 11.0],
    )
    given = iter(taken)

    def timed(call, together):
        assert together and calls == ["first"]
        return next(given)

    monkeypatch.setattr(torch, "tensor", lambda value, device: tensor(value))
    monkeypatch.setattr(parallel, "_timed", timed)
    assert parallel._median(lambda: calls.append("first")) == 6
    assert one.reduced == [parallel.dist.ReduceOp.MAX]
    assert next(given, None) is None


def test_a_graph_is_captured_on_a_stream_of_its_own_behind_a_first_call(monkeypatch):
    happened: list[Any] = []

    def noting(name: str):
        @contextmanager
        def entered(*given, **named):
            happened.append((name, given, named))
            yield
            happened.append(f"{name} ends")

        return entered

    graph = SimpleNamespace(replay=lambda: happened.append("replay"))
    stream = SimpleNamespace(wait_stream=lambda other: happened.append(("waits for", other)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the current one")
    monkeypatch.setattr(torch.cuda, "stream", noting("stream"))
    monkeypatch.setattr(torch.cuda, "graph", noting("graph"))
    replay = parallel.captured(lambda: happened.append("call"))
    mode = {"stream": stream, "capture_error_mode": "thread_local"}
    inside = [("stream", (stream,), {}), "call", "stream ends"]
    inside += [("graph", (graph,), mode), "call", "graph ends"]
    assert happened == [("waits for", "the current one"), *inside]
    replay()
    assert happened[-1] == "replay"


def test_a_decode_is_timed_as_a_call_and_as_a_graph(monkeypatch):
    told: list[Any] = []
    taken = iter([float(n) for n in (*range(parallel.MOST), *range(50, 50 + parallel.MOST))])
    monkeypatch.setattr(parallel, "captured", lambda call: lambda: told.append("replay"))

    def timed(run, together):
        assert together == "together"
        return next(taken)

    monkeypatch.setattr(parallel, "_timed", timed)
    together: Any = "together"
    found = parallel._decoded(lambda: told.append("call"), together)
    middle = (parallel.MOST - 1) / 2
    assert found == [middle, 50 + middle] and told == ["call", "replay"]


def test_tokens_are_timed_to_a_ranks_part_and_back(monkeypatch):
    made = SimpleNamespace(shard=lambda x: ("part of", x), unshard=lambda x: ("whole of", x))
    called = []
    monkeypatch.setattr(parallel, "_median", lambda call: called.append(call()) or len(called))
    whole: Any = "q"
    out: Any = "out"
    assert parallel.token_times(made, whole, out) == (1, 2)
    assert called == [("part of", "q"), ("whole of", ("part of", "out"))]


@pytest.mark.parametrize("kind", ["grid", "gather", "a peer"])
def test_predictions_are_of_the_plans_own_way(kind, monkeypatch):
    asked: list[Any] = []
    both = SimpleNamespace(forward=0.002, both=0.007)
    monkeypatch.setattr(parallel.cost, "in_grid", lambda *told: asked.append(told) or both)
    found = {"ring": None, "gather": both}
    monkeypatch.setattr(parallel.cost, "times", lambda *told: asked.append(told) or found)
    grid = SimpleNamespace(shards="shards", row=SimpleNamespace(ranks=4))
    facts: dict[str, Any] = {"mask": "mask", "heads": (8, 2), "strategy": "gather"}
    made: Any = SimpleNamespace(layout="layout", grid=None, peers="peers", **facts)
    if kind == "a peer":
        peer: Any = object.__new__(parallel.Peer)
        assert all(map(math.isnan, parallel.predicted(peer))) and not asked
        return
    told = "mask", (8, 2), (parallel.DIM, parallel.DIM), 2
    if kind == "grid":
        made.grid = grid
        assert parallel.predicted(made) == (2.0, 7.0) and asked == [("shards", 4, *told)]
        return
    assert parallel.predicted(made) == (2.0, 7.0)
    made.peers = None
    assert parallel.predicted(made) == (2.0, 7.0)
    assert asked == [("layout", *told, True), ("layout", *told, False)]


def test_a_peer_is_made_of_lengths_and_window_and_takes_no_time(monkeypatch):
    way, *_ = parallel.PEERS
    monkeypatch.setitem(parallel.PEERS, way, lambda *told: told)
    assert parallel.planned(Case("a case", (2, 3), 7), way) == (((2, 3), 7), 0.0)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_keys_of_a_decode_are_dealt_out_by_rank_0(rank, one, monkeypatch):
    """A rank's part of keys and of values, in their order; rank 0 has the first, and a line."""
    one.get_rank, one.get_world_size = lambda: rank, lambda: 3
    sent: list[Any] = []
    one.send = lambda x, other: sent.append((other, x.clone()))
    one.recv = lambda x, source: sent.append((source, x))
    parts: list[Any] = []

    def over_ranks(q, k, v):
        parts.append((q, k, v))
        return flash_attn_with_kvcache(q, whole[0], whole[1]) if rank == 0 else q

    timed = iter([[3.0, 6.0], [2.0, 1.0]] if rank == 0 else [[2.0, 1.0]])
    flags = []

    def decoded(call, together):
        flags.append(together)
        call()
        return next(timed)

    whole: list[Any] = []

    def alone(q, k, v):
        whole[:] = k, v
        return flash_attn_with_kvcache(q, k, v)

    monkeypatch.setattr(parallel, "attention_with_kvcache", over_ranks)
    monkeypatch.setattr(parallel, "flash_attn_with_kvcache", alone)
    monkeypatch.setattr(parallel, "_decoded", decoded)
    line = parallel.decode_row(2, 24, torch.device("cpu"))
    assert flags == ([False, True] if rank == 0 else [True])
    shape = 2, 24, parallel.HEADS_K, parallel.DIM
    for q, k, v in parts:
        assert q.shape == (2, 1, parallel.HEADS, parallel.DIM) and k.shape == v.shape == shape
    if rank:
        assert line == "" and [(0, shape)] * 2 == [(other, x.shape) for other, x in sent]
        assert sent[0][1] is parts[0][1] and sent[1][1] is parts[0][2]
        return
    assert [other for other, _ in sent] == [1, 1, 2, 2]
    for side in range(2):
        got = [parts[0][1 + side], sent[side][1], sent[2 + side][1]]
        assert torch.equal(torch.cat(got, 1), whole[side])
    assert [float(x) for x in line.split("GPU")[1].split()] == [3, 2, 0.5, 6, 1, 2]
