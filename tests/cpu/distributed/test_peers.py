"""Which ranks read each other's memory, why others cannot, and how much memory there is. The other
ranks and the GPUs are stand-ins."""

import math
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from heedful.core.call.spread import CAUSAL
from heedful.distributed import peers as module
from heedful.distributed.layouts import zigzag
from heedful.distributed.schedules import crossing, gathered, rows_of

# Stand-ins are no groups.
peers: Any = module
MIB = 2**20
HERE = torch.device("cpu", 0)
GROUP: Any = "a group"


@pytest.fixture
def others(monkeypatch):
    """What the one other rank says: facts of its GPU to all, and to each reduction a tensor."""
    said = SimpleNamespace(facts=[1, 2], reductions=[], reaches=True, seen=2, asked=[])

    def gather(into, mine, group=None):
        assert group is GROUP
        for tensor, facts in zip(into, (mine.tolist(), said.facts), strict=True):
            tensor.copy_(torch.tensor(facts))

    def reduce(told, op, group=None):
        assert group is GROUP
        other = said.reductions.pop(0)(told)
        join = torch.maximum if op == dist.ReduceOp.MAX else torch.minimum
        told.copy_(join(told, other))

    def reaches(one, other):
        said.asked.append((one, other))
        return said.reaches

    monkeypatch.setattr(dist, "get_world_size", {GROUP: 2}.get)
    monkeypatch.setattr(dist, "all_gather", gather)
    monkeypatch.setattr(dist, "all_reduce", reduce)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: said.seen)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)
    return said


def test_ranks_are_on_one_host_where_their_names_of_it_are_the_same(others):
    step = torch.tensor([1, -1])
    for other, is_same in ((0, True), (step, False), (-step, False)):
        others.reductions = [lambda told, other=other: told + other]
        assert peers._is_one_host(GROUP, HERE) is is_same


@pytest.mark.parametrize(
    "change, why",
    [
        ({}, ""),
        ({"seen": 3, "facts": [1, 3]}, ""),
        ({"facts": [0, 2]}, "ranks do not see all GPUs of the group"),
        ({"facts": [1, 1]}, "ranks do not see all GPUs of the group"),
        ({"seen": 1}, "ranks do not see all GPUs of the group"),
        ({"reaches": False}, "a GPU cannot read the memory of another"),
        ({"other reaches": False}, "a GPU cannot read the memory of another"),
        ({"same host": False}, "ranks are on several hosts"),
    ],
    ids=str,
)
def test_ranks_say_why_they_cannot_read_each_others_memory(others, change, why):
    of_host = (lambda told: told) if change.get("same host", True) else (lambda told: told + 1)
    reached = torch.tensor(int(change.get("other reaches", True)))
    others.reductions = [of_host, lambda told: reached]
    vars(others).update({name: value for name, value in change.items() if " " not in name})
    assert peers._why_not(GROUP, HERE) == why
    assert set(others.asked) <= {(0, 1)}
    assert others.asked or why not in ("", "a GPU cannot read the memory of another")


@pytest.fixture
def gpus(monkeypatch):
    """Ranks that are GPUs under NCCL; why: what they answer when they are asked."""
    made = SimpleNamespace(backend="nccl", why="", asked=[])

    def why_not(group, device):
        made.asked.append((group, device))
        return made.why

    monkeypatch.setattr(peers, "_HAS_SYMMETRIC", True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: made.backend)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD="all"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(peers, "_why_not", why_not)
    monkeypatch.setattr(peers, "_KNOWN", {})
    monkeypatch.setattr(peers, "_REFUSED", {})
    monkeypatch.setattr(peers, "Peers", lambda *facts: SimpleNamespace(facts=facts, size=facts[2]))
    return made


def test_memory_that_is_too_small_is_followed_by_twice_as_much_and_else_kept(gpus):
    sizes = {1: 2, 2 * MIB: 2, 2 * MIB + 1: 4, 9 * MIB: 10, 4 * MIB: 10, 11 * MIB: 20}
    last = None
    for size, mib in sizes.items():
        found, why = peers.peers_of(None, size)
        assert (found.size, why) == (mib * MIB, "") and found.facts[0] == "all"
        assert found.facts[1] == torch.device("cuda", 3)
        assert last is None or (found is last) == (found.size == last.size)
        last = found
    other, _ = peers.peers_of("some", 1)
    assert other.size == 2 * MIB and other.facts[0] == "some"
    assert gpus.asked == [(group, torch.device("cuda", 3)) for group in ("all", "some")]


def test_where_ranks_share_no_memory_it_is_said_and_asked_once(gpus, monkeypatch):
    assert peers.peers_of(None, 0) == (None, "")
    gpus.why = "so"
    assert peers.peers_of(None, 5) == peers.peers_of(None, 6) == (None, "so")
    assert len(gpus.asked) == 1
    words = "ranks are not GPUs of NVIDIA's under NCCL with torch's symmetric memory but under "
    for change in ("gloo", "hip", "symmetric"):
        with monkeypatch.context() as patch:
            if change == "gloo":
                patch.setattr(gpus, "backend", "gloo")
            elif change == "hip":
                patch.setattr(torch.version, "hip", "7.2")
            else:
                patch.setattr(peers, "_HAS_SYMMETRIC", False)
            assert peers.peers_of(None, 0) == (None, words + gpus.backend)


class Stream:
    """A GPU's: it notes what it is told, in order."""

    def __init__(self, name: Any):
        self.name, self.log = name, []

    def wait_event(self, event: Any) -> None:
        self.log.append(("waits for", event))

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(("waits for", other))


class Event:
    def __init__(self):
        self.of = []

    def record(self, *stream: Any) -> None:
        self.of.append(stream)

    def wait(self) -> None:
        self.of.append("waited for")


@pytest.fixture
def memory(monkeypatch) -> Any:
    """Memory of a rank, and what it asks of torch; current: the stream that is."""
    said = SimpleNamespace(meets=[], views=[], copies=[], is_captured=False)
    said.current = Stream("current")
    handle = SimpleNamespace(
        barrier=lambda *given: said.meets.append(given),
        get_buffer=lambda *given: said.views.append(given),
    )

    def empty(size: int, dtype: torch.dtype, device: torch.device) -> Any:
        said.empty = size, dtype, device
        return "memory"

    def rendezvous(mine: Any, group: Any) -> Any:
        said.met = mine, group
        return handle

    options = SimpleNamespace(_timeout=timedelta(seconds=1.5))
    group: Any = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=options))
    symmetric = SimpleNamespace(empty=empty, rendezvous=rendezvous)
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", symmetric)
    monkeypatch.setattr(torch.distributed, "_symmetric_memory", symmetric, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: said.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: said.is_captured)
    monkeypatch.setattr(peers, "copy_on", lambda *given: said.copies.append(given))
    said.group, said.peers = group, peers.Peers(group, HERE, 512)
    return said


def test_memory_is_bytes_of_the_size_that_all_ranks_of_the_group_have(memory):
    assert memory.peers.size == 512 and memory.empty == (512, torch.uint8, HERE)
    assert memory.met == ("memory", memory.group)
    memory.peers.view(1, 24, (2, 3), torch.float32)
    assert memory.views == [(1, [2, 3], torch.float32, 6)]


@pytest.mark.parametrize("again", [False, True])
def test_a_step_on_another_stream_waits_for_the_one_before_and_ranks_meet(memory, again):
    def begin(stream: Stream) -> None:
        memory.current = stream
        memory.peers.begin_again(stream) if again else memory.peers.begin()

    first, second = Stream(1), Stream(2)
    for stream in (first, first, second, second, first):
        begin(stream)
    # Ranks meet as long as a transfer of the group may take.
    assert memory.meets == [(0, 1500)] * 5
    assert first.log == [("waits for", second)] and second.log == [("waits for", first)]


def test_a_step_that_is_captured_waits_for_no_other_stream(memory):
    first, second, third = Stream(1), Stream(2), Stream(3)
    for memory.current, memory.is_captured in ((first, False), (second, True), (third, False)):
        memory.peers.begin()
    assert (first.log, second.log) == ([], []) and third.log == [("waits for", first)]
    assert len(memory.meets) == 3


def test_ranks_meet_before_the_event_after_which_rows_are_there(memory):
    event = memory.peers.ready(7)
    assert memory.meets == [(7, 1500)] and event.of == [()]


@pytest.mark.parametrize("of_keys", [False, True])
def test_keys_and_gradients_are_copied_on_streams_of_their_own_after_an_event(memory, of_keys):
    copies = memory.peers.pull([("a", "b"), ("c", "d")], "after", of_keys)
    (stream, *_), _ = memory.copies
    assert memory.copies == [(stream, "a", "b"), (stream, "c", "d")]
    assert (stream is memory.peers.of_keys) == of_keys and stream.name == HERE
    assert stream.log == [("waits for", "after")]
    copies.wait()
    assert copies._event.of == [(stream,), "waited for"]


# Where rows of some heads lie in a rank's memory.
LAYOUT = zigzag([1024], 2)


@pytest.mark.parametrize("rank", range(2))
def test_heads_lie_one_after_another_and_gradients_after_all_keys(rank):
    """In elements: of each head as many rows as the rank with most has, up to whole tiles."""
    asked: list[Any] = []
    memory = SimpleNamespace(view=lambda *given: asked.append(given))
    schedule = gathered(LAYOUT, CAUSAL, rank)
    rooms = [-(-max(counts) // 128) * 128 for counts in (schedule.counts, schedule.back.counts)]
    shared = peers.SharedRows(memory, schedule, 4, 10, torch.float16)
    shared.keys(1, slice(1, 3))
    shared.gradients(0, slice(3, 4))
    (of, begin, shape, dtype), (of_back, after, shape_back, _) = asked
    assert (of, of_back, dtype) == (1, 0, torch.float16)
    assert begin == 1 * rooms[0] * 10 * 2 and shape == (schedule.counts[1], 2, 10)
    assert after == 4 * rooms[0] * 10 * 2 + 3 * rooms[1] * 10 * 2
    assert shape_back == (schedule.back.counts[0], 1, 10)
    needed = peers.SharedRows.bytes_of(schedule, 4, 10, 2)
    assert needed == sum(rooms) * 4 * 10 * 2
    for counts, room in (((1, 128), 128), ((129, 5), 256), ((0, 0), 0)):
        assert peers._room(counts) == room


def test_rows_that_no_rank_needs_take_no_memory():
    alone = gathered(zigzag([1024], 1), CAUSAL, 0)
    assert peers.SharedRows.bytes_of(alone, 4, 10, 2) == 0


def test_slots_say_where_each_own_row_lies_among_the_gathered():
    own = (slice(12, 14), slice(3, 5)), (slice(5, 8), slice(0, 3)), (slice(9, 10), slice(7, 8))
    schedule: Any = SimpleNamespace(own=own, counts=(9,))
    shared = peers.SharedRows(None, schedule, 1, 8, torch.float16)
    slots = shared.slots(torch.device("cpu"))
    assert slots.tolist() == [0, 1, 2, -1, 7, -1, -1, 3, 4]
    assert slots.dtype == torch.int32 and shared.slots(torch.device("cpu")) is slots


class Memory:
    """That of all ranks, in this process."""

    def __init__(self, ranks: int, size: int):
        self.size = size
        self.ranks = [torch.zeros(size, dtype=torch.uint8) for _ in range(ranks)]

    def view(self, rank: int, begin: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        return self.ranks[rank][begin : begin + size].view(dtype).view(*shape)


RANKS, DIMS = 3, (3, 5)


@pytest.mark.parametrize("heads", [slice(0, 2), slice(1, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_ranks_pack_and_copy_are_the_rows_that_each_of_them_needs(heads, dtype):
    """Rows are numbered as in the batch. float64 is a wide word."""
    layout, count = zigzag([1900, 300], RANKS), 2
    schedules = [gathered(layout, CAUSAL, rank) for rank in range(RANKS)]
    memory: Any = Memory(RANKS, 1 << 20)
    parts = []
    for rank, schedule in enumerate(schedules):
        shared = peers.SharedRows(memory, schedule, count, sum(DIMS), dtype)
        part = shared.part(rank, heads)
        assert shared.part(rank, heads) is part
        rows = torch.from_numpy(rows_of(layout, rank)).to(dtype)[:, None, None]
        k, v = (rows.expand(-1, count, dim).clone() for dim in DIMS)
        v += 0.5
        part.pack(k, v)
        parts.append(part)
    for rank, (schedule, part) in enumerate(zip(schedules, parts, strict=True)):
        for into, theirs in part.keys:
            into.copy_(theirs)
        runs = crossing(layout, CAUSAL).needed[rank]
        wanted = torch.cat([torch.arange(*run) for run in runs]).to(dtype)
        assert part.rows.shape == (schedule.counts[rank], heads.stop - heads.start, sum(DIMS))
        k, v = part.of(slice(0, len(wanted)), DIMS)
        assert (k == wanted[:, None, None]).all() and (v == wanted[:, None, None] + 0.5).all()
        assert k.shape[-1] == DIMS[0] and part.of(slice(0, len(wanted)), DIMS)[0] is k
        later, _ = part.of(slice(2, 5), DIMS)
        assert (later == wanted[2:5, None, None]).all()


def owner_of(memory: Any, rows: torch.Tensor) -> int:
    """The rank in whose memory a view lies."""
    (found,) = (
        rank
        for rank, every in enumerate(memory.ranks)
        if rows.untyped_storage().data_ptr() == every.untyped_storage().data_ptr()
    )
    return found


@pytest.mark.parametrize("rank", range(RANKS))
def test_copies_begin_with_the_next_rank_and_gradients_are_those_of_own_rows(rank):
    layout, heads = zigzag([1900, 300], RANKS), slice(0, 2)
    schedule = gathered(layout, CAUSAL, rank)
    memory: Any = Memory(RANKS, 1 << 20)
    shared = peers.SharedRows(memory, schedule, 2, sum(DIMS), torch.float32)
    for other in range(RANKS):
        of_rank = shared.gradients(other, heads)
        of_rank.copy_(torch.arange(len(of_rank))[:, None, None] + 10_000.0 * other)
    part = shared.part(rank, heads)
    order = [other for other in ((rank + 1) % RANKS, (rank + 2) % RANKS)]
    for pairs in (part.keys, part.taken):
        owners = [owner_of(memory, theirs) for _, theirs in pairs]
        later = [other for other in (*range(rank + 1, RANKS), *range(rank)) if other in owners]
        assert owners == sorted(owners, key=later.index) and {*owners} <= {*order}
    found = torch.full((schedule.back.parts,), torch.nan)
    for place, theirs in part.taken:
        found[place] = theirs[:, 0, 0]
    for other in order:
        for into, there in zip(
            schedule.back.received[other], schedule.back.there[other], strict=True
        ):
            wanted = torch.arange(there.start, there.stop) + 10_000.0 * other
            assert torch.equal(found[into], wanted)
    assert not found.isnan().any()


def test_rows_are_shared_where_all_that_is_needed_fits_and_that_is_found_once():
    schedule = gathered(LAYOUT, CAUSAL, 0)
    k, v = torch.zeros(512, 4, 8).half(), torch.zeros(512, 4, 24).half()
    needed = peers.SharedRows.bytes_of(schedule, 4, 32, 2)
    for size, fits in ((needed, True), (needed - 1, False)):
        on = SimpleNamespace(schedule=schedule, kept={})
        memory = SimpleNamespace(size=size)
        found = peers.shared_rows(memory, on, k, v)
        assert (found is not None) == fits and peers.shared_rows(memory, on, k, v) is found
        assert len(on.kept) == 1
        peers.shared_rows(memory, on, k.float(), v.float())
        assert len(on.kept) == 2
    assert peers.shared_rows(None, on, k, v) is None
