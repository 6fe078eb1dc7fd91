"""From replayed workgroups to the time of a launch: occupancy, dies, tails, power, ranges."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from heedful.emulator.clock.constants import constant
from heedful.emulator.clock.replay import ComputeUnit, Timing
from heedful.emulator.clock.trace import Trace
from heedful.emulator.program.asm import Program

# A clock that changes by less than this share is settled.
_SETTLED, _MOST_ROUNDS = 0.01, 8


@dataclass
class Prediction:
    """How long a launch takes.

    Attributes:
        clocks: of the compute units, from the first workgroup to the last.
        clock_hz: the clock at which the launch takes the power there is; low and high are the
            bounds of what it may be.
        memory_seconds: for the bytes that must go to memory once.
        resident: workgroups that share a compute unit. timing: of the longest of them.
    """

    clocks: float
    clock_hz: float
    low_hz: float
    high_hz: float
    memory_seconds: float
    resident: int
    timing: Timing = field(default_factory=Timing)

    def seconds_at(self, clock_hz: float) -> float:
        """The time at some clock."""
        return max(self.clocks / clock_hz, self.memory_seconds)

    @property
    def seconds(self) -> float:
        """The time at the predicted clock."""
        return self.seconds_at(self.clock_hz)

    @property
    def range(self) -> tuple[float, float]:
        """Seconds at the highest clock and at the lowest."""
        return self.seconds_at(self.high_hz), self.seconds_at(self.low_hz)

    def facts(self) -> dict:
        """For machines: seconds with their range, clocks, where they go."""
        return {
            "seconds": self.seconds,
            "range": self.range,
            "clock_hz": self.clock_hz,
            "clocks": self.clocks,
            "resident": self.resident,
            "busy": self.timing.busy,
            "stalls": dict(self.timing.stalls),
        }

    def summary(self) -> str:
        """A few lines for people: the time, its range, and where the clocks go."""
        fastest, slowest = self.range
        busy = ", ".join(
            f"{unit} {100 * n / self.timing.clocks:.0f} %"
            for unit, n in self.timing.busy.items()
            if n
        )
        waves = max(self.timing.waves, 1)
        stalls = ", ".join(
            f"{what} {100 * n / waves / self.timing.clocks:.0f} %"
            for what, n in sorted(self.timing.stalls.items(), key=lambda x: -x[1])[:6]
        )
        return (
            f"predicted {_time(self.seconds)} at {self.clock_hz / 1e9:.2f} GHz (by its power), "
            f"between {_time(fastest)} and {_time(slowest)} at {self.high_hz / 1e9:.1f} and "
            f"{self.low_hz / 1e9:.1f} GHz\n"
            f"{self.clocks:.0f} clocks, {self.resident} workgroups on a compute unit\n"
            f"units busy: {busy}\na wave waits: {stalls or 'never'}"
        )


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def occupancy(program: Program, waves: int, lds_bytes: int) -> int:
    """Workgroups that a compute unit holds: by registers, LDS and places for waves."""
    arch = program.arch
    unit = int(constant("register_unit", arch))
    registers = program.vector_registers or program.directives.get("next_free_vgpr", 1)
    registers = -(-registers // unit) * unit
    simds = int(constant("simds", arch))
    a_simd = min(int(constant("waves", arch)), int(constant("registers", arch)) // registers)
    by_registers = a_simd // -(-waves // simds)
    if waves < simds:
        by_registers = a_simd * simds // waves
    unit = int(constant("lds_unit", arch))
    share = -(-lds_bytes // unit) * unit
    by_lds = int(constant("lds_bytes", arch)) // share if share else by_registers
    return max(min(by_registers, by_lds), 1)


def makespan(lengths: Sequence[float], arch: str, resident: int) -> float:
    """Clocks until the last workgroup has ended.

    Workgroups go to the dies in turn, and on a die to the place that is free first.
    """
    dies = int(constant("dies", arch))
    places = int(constant("compute_units", arch)) // dies * resident
    last = 0.0
    for die in range(dies):
        free = [0.0] * places
        for length in lengths[die::dies]:
            heapq.heappush(free, heapq.heappop(free) + length)
        last = max(last, *free)
    return last


def activity(timing: Timing, arch: str) -> float:
    """The power of a busy compute unit over that of one whose matrix units are always busy. AMD
    says what lowers the clock: matrix work, data that move through shared memory, and memory."""
    moved = timing.busy["lds"] + timing.busy["memory"] + timing.busy["atomic"]
    power = timing.busy["mfma"] + constant("data_power", arch) * moved
    return power / timing.clocks if timing.clocks else 0.0


def clock_of(arch: str, active: float, used: float) -> float:
    """The clock at which a launch takes the power there is.

    Args:
        active: mean activity of its busy compute units. used: the share of compute units and of
            time that is busy.
    """
    highest, least = constant("clock_high", arch), constant("least_activity", arch)
    if active <= 0 or used <= 0:
        return highest
    # The rule of loads that are nearly full is not stretched to light ones.
    idle = used * min(active / least, 1.0)
    clock = constant("clock_full", arch) / max(active, least)
    return min(clock / idle ** constant("idle_exponent", arch), highest)


def replay(
    trace: Trace, resident: int = 1, window: float = 0.0, clock_hz: float = 0.0
) -> dict[tuple[int, ...], Timing]:
    """Each recorded workgroup replayed beside copies of itself; equal streams once. clock_hz: as
    for ComputeUnit."""
    known: dict[bytes, Timing] = {}
    timings = {}
    for workgroup, streams in trace.streams.items():
        key = b"|".join(stream.tobytes() for stream in streams)
        if key not in known:
            unit = ComputeUnit(trace, window=window, clock_hz=clock_hz)
            known[key] = unit.run([[s.tolist() for s in streams]] * resident)
        timings[workgroup] = known[key]
    return timings


def predict(
    trace: Trace,
    grid: Sequence[int],
    memory_bytes: float = 0.0,
    window: float = 0.0,
) -> Prediction:
    """The time of a launch of which some workgroups were recorded.

    Args:
        grid: workgroups along x, y, z. One that was not recorded takes as long as the recorded one
            that is nearest in launch order.
        memory_bytes: that must go to or from memory once, whatever the caches do.
        window: clocks for which events are kept.
    """
    arch, shape = trace.program.arch, (*grid, 1, 1)[:3]
    resident = occupancy(trace.program, trace.waves, trace.lds_bytes)
    resident = min(resident, max(-(-math.prod(shape) // int(constant("compute_units", arch))), 1))
    timings, clocks, clock = _settled(trace, shape, resident, window)
    longest = max(timings.values(), key=lambda t: t.clocks)
    return Prediction(
        clocks,
        clock,
        min(constant("clock_low", arch), clock),
        constant("clock_high", arch),
        memory_bytes / constant("hbm_bytes", arch),
        resident,
        longest,
    )


def _settled(
    trace: Trace, shape: Sequence[int], resident: int, window: float
) -> tuple[dict[tuple[int, ...], Timing], float, float]:
    """Timings, clocks of the launch and its clock, where the clock decides how fast atomics are in
    clocks, and these decide about the clock."""
    arch = trace.program.arch
    places = int(constant("compute_units", arch)) * resident
    clock = constant("clock_full", arch)
    for last in (*[False] * (_MOST_ROUNDS - 1), True):
        timings = replay(trace, resident, window, clock)
        chosen = _nearest(list(timings), shape)
        lengths = [timings[workgroup].clocks for workgroup in chosen]
        clocks, total = makespan(lengths, arch, resident), sum(lengths)
        power = sum(timings[w].clocks * activity(timings[w], arch) for w in chosen)
        before = clock
        clock = clock_of(arch, power / max(total, 1.0), total / max(clocks * places, 1.0))
        has_atomics = any(t.busy["atomic"] for t in timings.values())
        if last or not has_atomics or abs(clock / before - 1) < _SETTLED:
            return timings, clocks, clock
        clock = (clock * before) ** 0.5
    raise AssertionError("the last round returns")


def _nearest(recorded: Sequence[tuple[int, ...]], shape: Sequence[int]) -> list[tuple[int, ...]]:
    """For every workgroup of a grid, in launch order, the recorded one that is nearest."""
    order = sorted((x + shape[0] * (y + shape[1] * z), (x, y, z)) for x, y, z in recorded)
    chosen: list[tuple[int, ...]] = []
    for i, (number, workgroup) in enumerate(order):
        after = order[i + 1][0] if i + 1 < len(order) else None
        stop = math.prod(shape) if after is None else (number + after + 1) // 2
        chosen += [workgroup] * (stop - len(chosen))
    return chosen
