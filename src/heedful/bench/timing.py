"""Interleaved timing: A B A B ..., so that heat, clocks and neighbours meet every peer alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

LEAST_ROUNDS = 5
# A peer's share of one round, and how many calls that may take.
ROUND_SECONDS = 0.02
LEAST_CALLS, MOST_CALLS = 3, 50
# The flushed buffer is this many times the L2, so that nothing of the inputs survives.
FLUSH_TIMES_L2 = 4


@dataclass(frozen=True, slots=True)
class Spread:
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
    calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, list[float]]:
    """Microseconds of one call of each, a figure per round: the median of that round's calls."""
    _check_rounds(rounds)
    clock = _gpu_clock(device) if device.type == "cuda" else _cpu_clock
    counts = {name: _calls_a_round(clock, call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(statistics.median(clock(call, counts[name])) * 1e6)
    return times


def interleaved_host(
    calls: Mapping[str, Callable[[int], object]], sets: int, device: torch.device, rounds: int
) -> dict[str, list[float]]:
    """Microseconds that the host spends in one call, the device never waited for inside a round.
    A call is given the number of the argument set to use: every set once a round."""
    _check_rounds(rounds)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(-1, rounds):  # the first is a warm-up
        for name, call in calls.items():
            _synchronize(device)
            start = time.perf_counter()
            for index in range(sets):
                call(index)
            taken = time.perf_counter() - start
            if round_ >= 0:
                times[name].append(taken / sets * 1e6)
            _synchronize(device)
    return times


def _check_rounds(rounds: int) -> None:
    if rounds < LEAST_ROUNDS:
        raise ValueError(f"rounds must be >= {LEAST_ROUNDS}, got {rounds}")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _calls_a_round(clock: Callable, call: Callable[[], object]) -> int:
    seconds = statistics.median(clock(call, LEAST_CALLS))
    return max(LEAST_CALLS, min(MOST_CALLS, round(ROUND_SECONDS / max(seconds, 1e-9))))


def _cpu_clock(call: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of `count` calls."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def _gpu_clock(device: torch.device) -> Callable[[Callable[[], object], int], list[float]]:
    """A clock with a cold L2 before each call, on CUDA events."""
    properties = torch.cuda.get_device_properties(device)
    size = FLUSH_TIMES_L2 * max(properties.L2_cache_size, 64 * 1024 * 1024)
    flushed = torch.empty(size, dtype=torch.int8, device=device)

    def clock(call: Callable[[], object], count: int) -> list[float]:
        # The device sleeps while the host queues the call, or the host's own time would be in it.
        start = time.perf_counter()
        call()
        queued_s = time.perf_counter() - start
        torch.cuda.synchronize(device)
        cycles = int(min(2 * queued_s + 50e-6, 5e-3) * 2e9)
        events = [[torch.cuda.Event(enable_timing=True) for _ in "be"] for _ in range(count)]
        for begin, end in events:
            flushed.zero_()
            torch.cuda._sleep(cycles)
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize(device)
        return [begin.elapsed_time(end) * 1e-3 for begin, end in events]

    return clock
