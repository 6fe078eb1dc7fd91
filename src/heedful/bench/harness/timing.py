"""Interleaved timing: A B A B ..., so that heat, clocks and neighbours meet every peer alike."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

LEAST_ROUNDS = 5
# A peer's share of one round, and how many calls that may take.
ROUND_SECONDS = 0.02
LEAST_CALLS, MOST_CALLS = 3, 50
# The flushed buffer is this many times the L2, so that nothing of the inputs survives.
FLUSH_TIMES_L2 = 4
# Takes a call, how often to make it, and the number of the call whose result is kept. Returns the
# seconds of each call, and that result.
Clock = Callable[[Callable[[], Any], int, int], tuple[list[float], Any]]


class Spread(NamedTuple):
    """Median and range of one figure over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


def ratios(base: list[float], other: list[float]) -> Spread:
    """How many times faster `other` is than `base`, round by round."""
    return Spread.of([b / o for b, o in zip(base, other, strict=True)])


def interleaved(
    calls: Mapping[str, Callable[[], Any]],
    device: torch.device,
    rounds: int,
    inspect: Callable[[str, Any], None],
    most_calls: int = MOST_CALLS,
) -> dict[str, list[float]]:
    """Microseconds of one call of each, a figure per round: the median of that round's calls.

    inspect: called after each turn with the peer's name and the result of one of its timed calls,
    drawn at random each time. most_calls: of each in a round.
    """
    _check_rounds(rounds)
    clock = clock_of(device)
    counts = {name: _calls_a_round(clock, call, most_calls) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    chosen = random.Random(0)
    for _ in range(rounds):
        for name, call in calls.items():
            seconds, kept = clock(call, counts[name], chosen.randrange(counts[name]))
            times[name].append(statistics.median(seconds) * 1e6)
            inspect(name, kept)
            del kept
    return times


def interleaved_host(
    calls: Mapping[str, Sequence[Callable[[], Any]]],
    device: torch.device,
    rounds: int,
    watched: Sequence[int],
    inspect: Callable[[str, int, Any], None],
) -> dict[str, list[float]]:
    """Microseconds that the host spends in one call, the device never waited for inside a round.

    calls: of each name one a set of arguments, every one of which is made once a round. inspect: is
    given, after each turn, whose it was, the number of one call of those `watched`, and what that
    returned.
    """
    _check_rounds(rounds)
    times: dict[str, list[float]] = {name: [] for name in calls}
    chosen = random.Random(0)
    for round_ in range(-1, rounds):  # the first is a warm-up
        for name, sets in calls.items():
            number = chosen.choice(watched)
            before, call, after = sets[:number], sets[number], sets[number + 1 :]
            _synchronize(device)
            start = time.perf_counter()
            for other in before:
                other()
            kept = call()
            for other in after:
                other()
            taken = time.perf_counter() - start
            if round_ >= 0:
                times[name].append(taken / len(sets) * 1e6)
            _synchronize(device)
            inspect(name, number, kept)
            del kept
    return times


def host_us(calls: Sequence[Callable[[], Any]], wait: Callable[[], Any], queued: int) -> float:
    """Microseconds of the host in one call, the median. The device is waited for before each
    `queued` of them, for a full queue would hold up the next, and in the end."""
    taken = []
    for number, call in enumerate(calls):
        if number % queued == 0:
            wait()
        start = time.perf_counter_ns()
        call()
        taken.append(time.perf_counter_ns() - start)
    wait()
    return statistics.median(taken) / 1e3


def _check_rounds(rounds: int) -> None:
    if rounds < LEAST_ROUNDS:
        raise ValueError(f"rounds must be >= {LEAST_ROUNDS}, got {rounds}")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _calls_a_round(clock: Clock, call: Callable[[], Any], most: int = MOST_CALLS) -> int:
    seconds, _ = clock(call, LEAST_CALLS, 0)
    median = statistics.median(seconds)
    return max(LEAST_CALLS, min(most, round(ROUND_SECONDS / max(median, 1e-9))))


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return _gpu_clock(device) if device.type == "cuda" else _cpu_clock


def _cpu_clock(call: Callable[[], Any], count: int, keep: int) -> tuple[list[float], Any]:
    """Seconds of each of `count` calls, and what call number `keep` returned."""
    seconds, kept = [], None
    for number in range(count):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
        if number == keep:
            kept = result
        del result
    return seconds, kept


def _gpu_clock(device: torch.device) -> Clock:
    """A clock on CUDA events. Before each call the L2 is filled with other lines, by reading them:
    written ones would go to memory while the call's own arrive, which takes 4 to 5 us of a call
    that reads 32 MB. In a model, too, the kernels before attention read more than they write."""
    properties = torch.cuda.get_device_properties(device)
    size = FLUSH_TIMES_L2 * max(properties.L2_cache_size, 64 * 1024 * 1024)
    flushed = torch.empty(size // 4, dtype=torch.float32, device=device)

    def clock(call: Callable[[], Any], count: int, keep: int) -> tuple[list[float], Any]:
        # The device sleeps while the host queues the call, or the host's own time would be in it.
        start = time.perf_counter()
        call()
        queued_s = time.perf_counter() - start
        torch.cuda.synchronize(device)
        cycles = int(min(2 * queued_s + 50e-6, 5e-3) * 2e9)
        events = [[torch.cuda.Event(enable_timing=True) for _ in "be"] for _ in range(count)]
        kept = None
        for number, (begin, end) in enumerate(events):
            flushed.sum()
            torch.cuda._sleep(cycles)
            begin.record()
            result = call()
            end.record()
            if number == keep:
                kept = result
            del result
        torch.cuda.synchronize(device)
        return [begin.elapsed_time(end) * 1e-3 for begin, end in events], kept

    return clock
