"""Zeroed scratch: whoever counts in some finds zeros, whatever else runs on the stream."""

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from heedful.core.base.arrays import ArraySpec
from heedful.core.planning.sizes import Workspace
from heedful.launch.spec import Program
from heedful.torch.eager import execute, zeros

# More than a region has room for, several times.
CALLS, COUNTERS = 2000, 75


class Stream:
    """A stream and its memory: what is queued, to be run in order at the end. waits: how often that
    was waited for."""

    def __init__(self):
        self.queue: list[int | None] = []
        self.regions = self.waits = 0

    def region(self, nbytes: int):
        """A region that can do what zeros.py asks of a tensor."""
        self.regions += 1
        base = self.regions << 32
        return SimpleNamespace(
            data_ptr=lambda: base,
            numel=lambda: nbytes,
            zero_=lambda: self.queue.append(None),
        )

    def finish(self):
        assert self.queue[-1] is None
        self.waits += 1

    def run(self) -> int:
        """Runs what was queued, where each kernel must find zeros; returns how many there were."""
        used: set[int] | None = None
        for address in self.queue:
            if address is None:
                used = set()
                continue
            assert used is not None and address % 256 == 0
            assert address not in used, "counted in bytes that are not zero"
            used.add(address)
        return sum(address is not None for address in self.queue)


@pytest.fixture
def stream(monkeypatch):
    """Executables queue their launches, every now and then late, on a stream of the test's own."""
    fake, number = Stream(), itertools.count()

    def run(addresses, _):
        if next(number) % 100 == 0:
            time.sleep(0.01)
        fake.queue.append(addresses[-1])

    bound = SimpleNamespace(bind=lambda _: run, run=lambda _, *given: run(*given))
    monkeypatch.setattr(execute, "ProgramKind", lambda *_: bound)
    monkeypatch.setattr(execute, "current_device", lambda: None)
    monkeypatch.setattr(execute, "raw_stream", lambda _: 0)
    monkeypatch.setattr(execute, "_is_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(zeros, "unpooled", lambda nbytes, _: fake.region(nbytes))
    monkeypatch.setattr(zeros, "_of_stream", {})
    monkeypatch.setattr(zeros, "_lasting", {})
    monkeypatch.setattr(zeros, "finish", lambda _: fake.finish())
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield fake
    sys.setswitchinterval(before)


def alone(program: Program, *names: str) -> Callable:
    """Runs a program by itself, on tensors."""
    run = execute.Case(program, "sm_90", torch.device("cpu"), names, {}).alone()
    return lambda tensors: run([tensor.data_ptr() for tensor in tensors])


def counting(counters: int = COUNTERS, left_zero: bool = False) -> Callable:
    """A program that counts from zero, and may take back what it counted."""
    buffer = ArraySpec.contiguous((counters,), "int32")
    scratch = Workspace("counts", buffer, zeroed=True, left_zero=left_zero)
    return alone(Program((), (scratch,)))


def test_every_call_counts_from_zero_in_one_region(stream):
    small, large = counting(), counting(4 * COUNTERS)
    for _ in range(CALLS):
        small([])
        large([])
    assert stream.run() == 2 * CALLS
    assert stream.regions == 1


def test_threads_that_share_a_stream_count_from_zero(stream):
    """However long a thread is held up between taking bytes and queueing its launch."""
    program = counting()

    def work():
        for _ in range(CALLS):
            program([])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stream.run() == 4 * CALLS
    assert stream.regions == 1


def test_a_launch_that_fails_leaves_the_stream_usable(stream, monkeypatch):
    def refuse(*_):
        raise RuntimeError("launch failed")

    with monkeypatch.context() as patch:
        failing = SimpleNamespace(bind=lambda _: refuse)
        patch.setattr(execute, "ProgramKind", lambda *_: failing)
        program = counting()
    with pytest.raises(RuntimeError, match="launch failed"):
        program([])
    again = counting()
    for _ in range(CALLS):
        again([])
    assert stream.run() == CALLS


def test_a_capture_takes_nothing_from_the_region(stream, monkeypatch):
    """A graph runs again and again: it must fill bytes of its own each time."""
    monkeypatch.setattr(execute, "_is_capturing", lambda: True)
    counting()([])
    assert stream.regions == 0 and len(stream.queue) == 1


def capture(monkeypatch, program: Callable, calls: int) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(execute, "_is_capturing", lambda: True)
        for _ in range(calls):
            program([])


def test_a_captured_call_that_leaves_zeros_has_bytes_of_its_own_and_fills_none(stream, monkeypatch):
    program = counting(left_zero=True)
    program([])
    # What captured calls use was filled and waited for; eager calls have the stream's region.
    assert (stream.regions, stream.waits) == (2, 1)
    del stream.queue[:]
    capture(monkeypatch, program, 50)
    program([])
    capture(monkeypatch, counting(8 * COUNTERS, left_zero=True), 50)
    assert len(set(stream.queue)) == 101 and None not in stream.queue
    first, second = sorted(address for address in stream.queue if address is not None)[:2]
    assert second - first == 512 and first % 256 == 0


def test_of_programs_that_leave_zeros_in_a_part_alone_captured_calls_fill_theirs(
    stream, monkeypatch
):
    buffer = ArraySpec.contiguous((COUNTERS,), "int32")
    both = [Workspace(name, buffer, zeroed=True, left_zero=name == "a") for name in "ab"]
    program = alone(Program((), tuple(both)))
    program([])
    assert (stream.regions, stream.waits) == (1, 0)
    capture(monkeypatch, program, 3)
    assert (stream.regions, stream.waits) == (1, 0)


def test_bytes_for_captured_calls_are_made_by_others_before_they_are_used_up(stream, monkeypatch):
    """A captured call can allocate none: without any left it fills its own."""
    each = zeros.LASTING_BYTES // 8
    program = counting(each // 4, left_zero=True)
    capture(monkeypatch, program, 1)
    assert stream.waits == 0
    program([])
    program([])
    assert stream.waits == 1
    capture(monkeypatch, program, 5)
    program([])
    assert stream.waits == 2
    capture(monkeypatch, program, 9)
    # Of eight there was room for; the ninth filled its own.
    taken = [address for address in stream.queue[-9:] if address is not None]
    places = [address for address in taken if address >> 32 == stream.regions]
    assert len(places) == 8 == len(set(places))


def test_calls_captured_over_and_over_take_so_much_and_no_more(stream, monkeypatch):
    program = counting(zeros.LASTING_BYTES // 4, left_zero=True)
    for _ in range(30):
        program([])
        capture(monkeypatch, program, 1)
    assert stream.waits == zeros.MOST_LASTING_BYTES // zeros.LASTING_BYTES == 16


def test_a_device_that_is_full_serves_calls_all_the_same(stream, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("no room")

    program = counting(left_zero=True)
    program([])
    capture(monkeypatch, program, zeros.LASTING_BYTES // 512 // 2 + 1)
    with monkeypatch.context() as patch:
        patch.setattr(zeros, "unpooled", full)
        program([])
        assert stream.waits == 1
    # What there is lasts, and more is asked for when some of it is used.
    capture(monkeypatch, program, 1)
    program([])
    assert stream.waits == 2


def test_threads_that_capture_have_bytes_of_their_own(stream, monkeypatch):
    program = counting(left_zero=True)
    program([])
    del stream.queue[:]
    monkeypatch.setattr(execute, "_is_capturing", lambda: True)
    threads = [
        threading.Thread(target=lambda: [program([]) for _ in range(CALLS // 4)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stream.queue) == len(set(stream.queue)) == CALLS


def test_streams_have_regions_of_their_own(stream, monkeypatch):
    program = counting()
    for handle in (0, 7, 0, 7):
        monkeypatch.setattr(execute, "raw_stream", lambda _, handle=handle: handle)
        program([])
    assert stream.regions == 2
    addresses = [address for address in stream.queue if address is not None]
    assert len(set(addresses)) == 4


def test_a_stream_that_every_thread_has_one_of_takes_nothing_from_a_region(stream, monkeypatch):
    monkeypatch.setattr(execute, "raw_stream", lambda _: 2)
    counting()([])
    assert stream.regions == 0


@pytest.fixture
def events(monkeypatch):
    """What streams of a GPU that is not there were asked for: ("record" or "wait", thread)."""
    found: list[tuple[str, int]] = []

    def note(what: str):
        return lambda *_: found.append((what, threading.get_ident()))

    fake = SimpleNamespace(record_event=note("record"), wait_event=note("wait"))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: fake)
    return found


def test_the_region_is_made_outside_of_any_state_of_the_calling_thread(events):
    """Pools are a thread's own, as these states are; the default stream is waited for."""
    with torch.inference_mode(), torch.device("meta"):
        region = zeros.unpooled(256, torch.device("cpu"))
    assert region.device.type == "cpu" and not region.is_inference()
    (first, elsewhere), (second, here) = events
    assert (first, second) == ("record", "wait")
    assert here == threading.get_ident() != elsewhere


def test_an_error_of_the_allocator_reaches_the_caller(events, monkeypatch):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        zeros.unpooled(256, torch.device("cpu"))
