"""In which order a rank's step asks a GPU for what, and by which launches. The GPU, its streams and
the other rank are stand-ins."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import torch.distributed as dist

import heedful
from heedful.core.call.numerics import margin_of
from heedful.core.call.spread import CAUSAL, Mask
from heedful.distributed import attention, calls, cost, gather, peers
from heedful.distributed.layouts import contiguous, zigzag
from heedful.distributed.plan import ContextPlan
from heedful.torch.eager import over_ranks
from heedful.torch.eager.slots import append_slots
from support.runs import standin

HEADS, DIM = (4, 2), 16


class Memory(peers.Peers):
    """Of two ranks, and what a step asks for."""

    def __init__(self, size: int = 1 << 20):
        self.size, self.log = size, []
        self._ranks = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]

    def begin(self) -> None:
        self.log.append("begin")

    def begin_again(self, stream: Any) -> None:
        self.log.append("begin")

    def meet(self, channel: int) -> None:
        self.log.append("ready")

    _streams: Any = (SimpleNamespace(cuda_stream=0, device_index=0),)

    def view(self, rank, begin, shape, dtype):
        size = math.prod(shape) * dtype.itemsize
        return self._ranks[rank][begin : begin + size].view(dtype).view(*shape)

    def pull(self, pairs, after, of_keys) -> Any:
        self.log.append("pull")
        return SimpleNamespace(wait=lambda: None)


class Stream:
    """All streams run at once."""

    def __init__(self, *_: Any):
        self.wait_event = self.wait_stream = lambda other: None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


def planned(monkeypatch, window: int, rank: int = 1) -> tuple[ContextPlan, Memory]:
    """Of one document over two ranks, whose keys come in one group of heads, or without a window in
    two."""
    monkeypatch.setattr(dist, "get_rank", lambda group=None: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    event = SimpleNamespace(record=lambda *_: None, wait=lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    nothing = SimpleNamespace(copy=lambda *_: None)
    monkeypatch.setattr(over_ranks, "driver", lambda vendor: nothing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(calls, "_STREAMS", {})
    monkeypatch.setattr(gather.Step, "lanes", lambda self, like: calls.Lanes(like.device, 2))
    each = [gather.Group(slice(n, n + 1), slice(2 * n, 2 * n + 2)) for n in range(2)]
    told = ([gather.Group(slice(0, 2), slice(0, 4))], True) if window > 0 else (each, False)
    monkeypatch.setattr(gather, "groups", lambda *_: told)
    mask = Mask(window, 0) if window > 0 else CAUSAL
    layout = contiguous([512], 2, mask) if window > 0 else zigzag([512], 2)
    memory = Memory()
    return ContextPlan(None, layout, "gather", HEADS, mask, (), memory), memory


def rows(made: ContextPlan, seed: int = 0) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    shapes = [(made.tokens, heads, DIM) for heads in (HEADS[0], HEADS[1], HEADS[1])]
    return [torch.randn(shape, generator=drawn) for shape in shapes]


@pytest.mark.parametrize(
    ("change", "want"),
    [
        # Own rows are packed on SMs that the local call leaves, if there are few.
        ("", ["local", "begin", "ready", "pull", "other"]),
        ("much", ["begin", "local", "ready", "pull", "other"]),
        # Bits could depend on how many SMs a call has, and on where its keys begin: none are local.
        ("invariant", ["begin", "ready", "pull", "other"]),
        ("captured", ["begin", "ready", "local", "pull", "other"]),
    ],
)
def test_local_calls_that_hide_copies_go_first_and_leave_sms_to_meet_on(monkeypatch, change, want):
    made, memory = planned(monkeypatch, 128)
    monkeypatch.setattr(cost, "packs_little", lambda *_: change != "much")
    monkeypatch.setattr(gather, "_is_captured", lambda q: change == "captured")
    real, margins = gather.attended, []

    def attended(given: Any, more: Any, out: Any) -> Any:
        is_local = given[1].untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        memory.log.append("local" if is_local else "other")
        margins.append(margin_of(more["backend"]))
        return real(given, more | {"backend": None}, out)

    monkeypatch.setattr(gather, "attended", attended)
    backend = " numerics=invariant" if change == "invariant" else None
    q, k, v = rows(made)
    attention(q, k, v, made, causal=True, window_size=(128, 0), backend=backend)
    assert memory.log == want
    first = {"invariant": [], "captured": [0]}.get(change, [cost.LEFT])
    assert margins == [*first, 0]


@pytest.mark.parametrize("size", ["shard", "few rows"])
def test_few_rows_are_packed_beside_a_local_call(size):
    held = {"shard": 32768, "few rows": 1024}[size]
    local = Mask(1024, 0).tiles
    layout = contiguous([65536], 2, Mask(1024, 0))
    fewest = sum(local(piece, 65536) for piece in layout.shards[1])
    needs: Any = SimpleNamespace(own=((slice(0, held), slice(0, held)),), fewest=(fewest, 0))
    assert cost.packs_little(needs, (32, 8), (128, 128), 2) == (size == "few rows")


@contextmanager
def counted(monkeypatch) -> Iterator[list[Any]]:
    """The arguments of calls that are not bound."""
    found, real = [], gather.attended

    def attended(*given):
        found.append(given)
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(gather, "attended", attended)
        yield found


def launched(gpu: Any, made: ContextPlan, given: list[torch.Tensor], window: int, **more: Any):
    """What a forward launches for attention: kernels, grids, and where their operands begin."""
    begin = len(gpu.launches)
    q, k, v = given
    out = attention(q, k, v, made, causal=True, window_size=(window, 0), **more)
    found = [x for x in gpu.launches[begin:] if "append" not in x.kernel.function]
    memory = made.peers.view(0, 0, (1,), torch.uint8), made.peers.view(1, 0, (1,), torch.uint8)
    bases = [*given, out, *memory]
    return [(x.kernel, x.grid, x.constants, _places(x, bases)) for x in found]


def _places(launch: Any, bases: list[torch.Tensor]) -> list[tuple[str, int, int]]:
    """Each address that lies in one of these tensors: its name, the tensor and the distance."""
    found = []
    for name, value in launch.arguments.items():
        address = getattr(value, "address", value)
        for index, base in enumerate(bases):
            distance = address - base.data_ptr() if isinstance(address, int) else -1
            if name in launch.memory and 0 <= distance < base.untyped_storage().nbytes():
                found.append((name, index, distance))
    return found


@pytest.mark.parametrize("window", [128, -1])
def test_calls_that_come_again_launch_what_the_first_did_in_other_memory(monkeypatch, window):
    made, memory = planned(monkeypatch, window)
    with standin.gpu() as gpu, counted(monkeypatch) as seen:
        steps = []
        for step in range(4):
            seen.clear()
            steps.append(launched(gpu, made, rows(made, step), window))
            assert bool(seen) == (step < 2)
        assert steps[0] and all(step == steps[0] for step in steps)
        assert {index for _, *_, places in steps[0] for _, index, _ in places} >= {0, 3, 5}
        # Of other options, or settings, nothing is bound.
        for change in ({"softcap": 2.0}, {"sink": torch.zeros(4)}):
            seen.clear()
            launched(gpu, made, rows(made), window, **change)
            assert seen
        heedful.configure(sm_margin=3)
        seen.clear()
        launched(gpu, made, rows(made), window)
        assert seen
        heedful.configure(sm_margin=None)
        with torch.autocast("cpu", torch.bfloat16):
            seen.clear()
            launched(gpu, made, rows(made), window)
            assert seen


@pytest.mark.parametrize("window", [128, -1])
def test_one_launch_packs_own_rows_where_copies_would(monkeypatch, window):
    made, memory = planned(monkeypatch, window)
    on = made.schedule(made.mask, False, torch.device("cpu"))
    _, k, v = rows(made)
    k = torch.cat([k, k + 1], 1)[:, :2]  # with rows of other heads between its own
    shared: Any = peers.shared_rows(memory, on, k, v)
    launches: list[int] = []

    def writer(*like):
        def write(*begins):
            assert begins == (like[0].data_ptr(), like[1].data_ptr())
            launches.append(len(like[4]))
            append_slots(*like)

        return write

    for heads in (slice(1, 2), slice(0, 2)):
        want = peers.SharedPart(shared, made.rank, heads)
        want.rows.fill_(torch.nan)
        want.pack(k, v)
        packed = want.rows.clone()
        want.rows.fill_(torch.nan)
        with monkeypatch.context() as patch:
            patch.setattr(peers, "slot_writer", writer)
            part = peers.SharedPart(shared, made.rank, heads)
            for _ in range(2):
                part.pack(k, v)
        assert torch.equal(part.rows.nan_to_num(7.0), packed.nan_to_num(7.0))
        assert not part.rows.isnan().all()
    # From the first to the last row that the other rank needs, of one window the last ones.
    assert launches == 4 * [128 if window > 0 else made.tokens]


class Trace:
    """What a step asks streams for. Events are numbered as they are recorded."""

    def __init__(self, monkeypatch, gpu: Any):
        self.log: list[Any] = []
        self.now: Any = "main"
        self._events: dict[int, int] = {}
        trace = self

        class Queue:
            cuda_stream = device_index = 0

            def __init__(self, *_: Any, name: str = ""):
                self.name = name or ("main" if _ else "?")

            def wait_event(self, event: Any) -> None:
                trace.log.append(("wait", self.name, event.number))

            def wait_stream(self, other: Any) -> None:
                event = Event()
                event.record(other)
                event.wait(self)

            def __enter__(self) -> None:
                self._before, trace.now = trace.now, self.name

            def __exit__(self, *_: Any) -> None:
                trace.now = self._before

        class Event:
            number = -1

            def record(self, stream: Any = None) -> None:
                self.number = sum(what == "record" for what, *_ in trace.log)
                trace.log.append(("record", stream.name if stream else trace.now, self.number))

            def wait(self, stream: Any = None) -> None:
                trace.log.append(("wait", stream.name if stream else trace.now, self.number))

        def switched(stream: Any) -> None:
            trace.now = stream.name

        main, side, keys = (Queue(name=name) for name in ("main", "side", "keys"))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: main)
        monkeypatch.setattr(torch.cuda, "set_stream", switched)
        monkeypatch.setattr(calls, "_STREAMS", {torch.device("cpu"): (side, side)})
        copies = SimpleNamespace(copy=lambda *places: self.log.append(("copy", "keys", places)))
        monkeypatch.setattr(over_ranks, "driver", lambda vendor: copies)
        gpu.before_launch = lambda launch: self.log.append(("launch", self.now))
        self.streams = keys, keys


class Real(Memory):
    """Peers whose streams and barriers are stand-ins."""

    begin, ready, pull = peers.Peers.begin, peers.Peers.ready, peers.Peers.pull
    meet, begin_again = peers.Peers.meet, peers.Peers.begin_again

    def trace(self, trace: Trace) -> None:
        def barrier(channel: int, wait_ms: int) -> None:
            trace.log.append(("barrier", trace.now, channel))

        self._streams, self._device, self._latest, self._wait_ms = trace.streams, None, None, 0
        self._handle = SimpleNamespace(barrier=barrier)


@pytest.mark.parametrize("records", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("window", [128, -1])
def test_a_step_that_comes_again_asks_for_the_same_in_the_same_order(
    monkeypatch, window, rank, records
):
    made, _ = planned(monkeypatch, window, rank)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made.peers = Real()
    found = []
    with standin.gpu() as gpu:
        trace = Trace(monkeypatch, gpu)
        made.peers.trace(trace)
        for step in range(5):
            trace.log.clear()
            given: Any = *(x.requires_grad_(records) for x in rows(made, step)), made
            more: Any = {"causal": True, "window_size": (window, 0)}
            _, lse = attention(*given, **more, return_lse=True)
            assert lse.shape == (HEADS[0], made.tokens) and trace.now == "main"
            found.append([*trace.log])
        assert len(made.recent) == 1
    assert ("barrier", "side" if window > 0 else "main", 0) in found[0]
    assert any(what == "copy" for what, *_ in found[0]) or (window, rank) == (128, 0)
    assert found == [found[0]] * len(found)


def test_parts_take_lanes_in_turn_and_the_second_waits_once_for_the_first_event(monkeypatch):
    log, current = [], ["main"]

    class Named:
        def __init__(self, name):
            self.name = name

        def wait_event(self, event):
            log.append((self.name, event))

        wait_stream = wait_event

        def __enter__(self):
            current.append(self.name)

        def __exit__(self, *_):
            current.pop()

    names = iter(("second", "aside"))
    main = Named("main")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Named(next(names)))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    kept: Any = SimpleNamespace(record_stream=lambda stream: log.append((current[-1], stream)))
    monkeypatch.setattr(calls, "_STREAMS", {})
    lanes = calls.Lanes(torch.device("cuda:0"), 2)
    lanes.begin("first")
    lanes.begin("later")
    took = []
    for part in range(5):
        with lanes.on(part):
            took.append(current[-1])
            assert lanes.keep(kept, part) is kept
    assert took == ["main", "second", "main", "second", "main"]
    assert log == [("second", "first"), ("second", main), ("second", main)]
    lanes.join()
    # The stream aside had nothing to do.
    assert log[3:] == [("main", lanes.side)]


def test_with_one_lane_all_parts_take_the_current_stream_and_nothing_is_marked():
    lanes = calls.Lanes(torch.device("cpu"), 1)
    assert all(isinstance(lanes.on(part), nullcontext) for part in range(3))
    assert isinstance(lanes.aside(None), nullcontext)
    assert lanes.mark() is None
    lanes.join()
