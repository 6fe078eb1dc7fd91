"""How one side times a burst of calls: microseconds of each."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Calls = Sequence[Callable[[], Any]]
Clock = Callable[[Calls], list[float]]
# The buffer that is read before each call is this many times the L2.
FLUSH_TIMES_L2 = 4
LEAST_L2 = 64 * 1024**2
# Host calls after which the device is waited for: a full queue would hold up the next.
QUEUED = 16


def wall(device: torch.device) -> Clock:
    """Calls on a CPU, where the host computes."""

    def clock(calls: Calls) -> list[float]:
        taken = []
        for call in calls:
            start = time.perf_counter()
            call()
            taken.append((time.perf_counter() - start) * 1e6)
        return taken

    return clock


def host(device: torch.device) -> Clock:
    """The host's time of calls, the device waited for now and then."""

    def clock(calls: Calls) -> list[float]:
        taken = []
        for number, call in enumerate(calls):
            if number % QUEUED == 0:
                synchronize(device)
            start = time.perf_counter()
            call()
            taken.append((time.perf_counter() - start) * 1e6)
        synchronize(device)
        return taken

    return clock


def host_one_by_one(device: torch.device) -> Clock:
    """The host's time of calls, the device waited for before each."""

    def clock(calls: Calls) -> list[float]:
        taken = []
        for call in calls:
            synchronize(device)
            start = time.perf_counter()
            call()
            taken.append((time.perf_counter() - start) * 1e6)
        synchronize(device)
        return taken

    return clock


def events(device: torch.device) -> Clock:
    """CUDA events around each call. The L2 is filled with other lines first, by reading them."""
    size = FLUSH_TIMES_L2 * max(torch.cuda.get_device_properties(device).L2_cache_size, LEAST_L2)
    flushed = torch.empty(size // 4, dtype=torch.float32, device=device)

    def clock(calls: Calls) -> list[float]:
        # The device sleeps while the host queues a call, or the host's own time would be in it.
        start = time.perf_counter()
        calls[0]()
        queued_s = time.perf_counter() - start
        synchronize(device)
        cycles = int(min(2 * queued_s + 50e-6, 5e-3) * 2e9)
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in "be"] for _ in calls]
        for call, (begin, end) in zip(calls, pairs, strict=True):
            flushed.sum()
            torch.cuda._sleep(cycles)
            begin.record()
            call()
            end.record()
        synchronize(device)
        return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]

    return clock


def kernels(device: torch.device) -> Clock:
    """How long CUPTI says that the device is at work: the mean of the calls, as one figure."""
    from torch.profiler import ProfilerActivity, profile

    def clock(calls: Calls) -> list[float]:
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            for call in calls:
                call()
            synchronize(device)
        found = [e for e in recorded.events() or () if e.device_type.name == "CUDA"]
        if not found:
            raise RuntimeError("CUPTI recorded no kernel")
        return [sum(event.time_range.elapsed_us() for event in found) / len(calls)]

    return clock


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def of(clock: str, framework: str, device: torch.device) -> Clock:
    """The clock of a cell on a device."""
    if clock == "host":
        return host(device)
    if clock == "new":
        return host_one_by_one(device)
    if device.type == "cpu":
        return wall(device)
    return kernels(device) if framework == "jax" else events(device)
