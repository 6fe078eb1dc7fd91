"""The batches that context parallelism is timed on, and what is said of them. One rank stands in
for all, and devices are the CPU.
"""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from heedful.bench import parallel
from heedful.bench.parallel import Case, Work, cases, log_normal
from heedful.distributed.layouts import LAYOUTS

CPU = torch.device("cpu")


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


def test_each_length_is_its_share_of_the_whole_and_the_longest_has_the_rest():
    drawn = np.random.default_rng(3).lognormal(0.0, 1.2, 9)
    shares = [max(1, int(x * 5000 / drawn.sum())) for x in drawn]
    shares[shares.index(max(shares))] += 5000 - sum(shares)
    assert log_normal(9, 5000, 3) == tuple(shares)


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
    near, compared = parallel._is_near, []

    def is_near(got, want):
        compared.append((got - want).mean().item())
        return near(got, want)

    monkeypatch.setattr(parallel, "_is_near", is_near)
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
    # What ranks computed comes first: where it is wrong, it is too large.
    assert compared == [0.0] * 4 + [pytest.approx(7, rel=1e-2)] * (len(ways) - 2)
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


def test_links_send_each_rank_as_much_and_copy_from_every_other_after_an_event(one, monkeypatch):
    size, ranks, rank = 1 << 10, 3, 1
    one.get_rank, one.get_world_size = (lambda: rank), (lambda: ranks)
    taken, done = iter([4.0, 2.0]), []
    events = []

    class Event:
        def __init__(self):
            events.append("made")

        def record(self):
            events.append("recorded")

    def median(call):
        call()
        return next(taken)

    def swapped(group, rows, sent, received, into):
        assert group is None and [*sent] == [*received] == [size] * ranks
        assert rows.shape == into.shape == (size * ranks,) and rows.dtype == torch.uint8
        assert rows.data_ptr() != into.data_ptr()
        return SimpleNamespace(wait=lambda: done.append("swapped"))

    def view(other, begin, shape, dtype):
        assert (begin, shape, dtype) == (0, (size,), torch.uint8)
        return other

    def pull(pairs, event, of_keys):
        assert isinstance(event, Event) and events == ["made", "recorded"] and of_keys
        # Each from another one first; rows that are copied into lie within.
        assert [other for _, other in pairs] == [2, 0]
        assert {into.shape for into, _ in pairs} == {(size,)}
        return SimpleNamespace(wait=lambda: done.append("copied"))

    def peers_of(group, nbytes):
        assert (group, nbytes) == (None, size)
        return SimpleNamespace(view=view, pull=pull), ""

    monkeypatch.setattr(parallel, "LINK_BYTES", size)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(parallel, "_median", median)
    monkeypatch.setattr(parallel, "swap", swapped)
    monkeypatch.setattr(parallel, "peers_of", peers_of)
    found = parallel.links(CPU)
    assert (found.send, found.copy) == (2 * size / 4e-3, 2 * size / 2e-3)
    assert done == ["swapped", "copied"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_decodes_keys_are_dealt_out_in_the_ranks_order(rank, one, monkeypatch):
    """The first has keys of its own in front and the line; the time of others counts, too."""
    sent: dict[int, list] = {}
    one.get_rank = lambda: rank
    one.get_world_size = lambda: 3
    one.send = lambda x, other: sent.setdefault(other, []).append(x)
    one.recv = lambda x, other: x.fill_(7 + other)
    one.all_reduce = lambda tensor, op: tensor.mul_(2)
    wholes, parts = [], []

    def whole(q, k, v):
        wholes.append((k, v))
        return q

    def spread(q, k, v):
        parts.append((k, v))
        return q

    def decoded(call, together):
        calls.append(together)
        call()
        return [8.0, 12.0] if not together else [2.0, 1.0]

    calls: list[bool] = []
    monkeypatch.setattr(parallel, "HEADS", 2)
    monkeypatch.setattr(parallel, "HEADS_K", 1)
    monkeypatch.setattr(parallel, "DIM", 4)
    monkeypatch.setattr(parallel, "flash_attn_with_kvcache", whole)
    monkeypatch.setattr(parallel, "attention_with_kvcache", spread)
    monkeypatch.setattr(parallel, "_decoded", decoded)
    line = parallel.decode_row(2, 5, CPU)
    assert {x.shape for both in parts for x in both} == {(2, 5, 1, 4)}
    if rank:
        assert line == "" and calls == [True] and not wholes
        assert all((x == 7).all() for both in parts for x in both)
        return
    assert calls == [False, True]
    assert [*map(float, line.removeprefix("decode, 2 x 5 keys a GPU").split())] == pytest.approx(
        [8, 4, 0.667, 12, 2, 2]
    )
    for i, x in enumerate(wholes[0]):
        assert torch.equal(torch.cat([parts[0][i], sent[1][i], sent[2][i]], 1), x)
    assert not torch.equal(*wholes[0])
    assert all(x.is_contiguous() for x in (*sent[1], *sent[2], *parts[0]))


def test_the_tensors_of_a_batch_are_the_same_on_every_rank(one, monkeypatch):
    drawn = []

    def alone(case, tensors, dout, times):
        drawn.append([*tensors, dout])
        return None, times

    monkeypatch.setattr(parallel, "alone", alone)
    monkeypatch.setattr(parallel, "DIM", 8)
    measured = parallel.Links(1.0, 1.0)
    for _ in range(2):
        assert not [*parallel.rows(Case("a", (2, 3)), CPU, measured, [], {})]
    first, again = drawn
    assert all(map(torch.equal, first, again)) and not torch.equal(first[1], first[2])
    heads = [parallel.HEADS, parallel.HEADS_K, parallel.HEADS_K, parallel.HEADS]
    assert [x.shape for x in first] == [(5, count, 8) for count in heads]
    assert {x.dtype for x in first} == {torch.bfloat16}
