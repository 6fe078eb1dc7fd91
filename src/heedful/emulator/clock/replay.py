"""Replays recorded waves on one compute unit, slot by slot.

A SIMD issues every fourth clock (a slot), at most one instruction of a kind and one of a wave. All
times are in slots; LDS and memory count in clocks, a quarter of one. Waves go by priority, then by
age. An operation's end is known when it is issued, since its unit serves in order; only barriers
have to be waited for.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from heedful.emulator.checks.waitstates import after_mfma, shape_of
from heedful.emulator.clock.constants import SLOT, constant
from heedful.emulator.clock.trace import Trace
from heedful.emulator.clock.work import BRANCH, LDS, MEMORY, VECTOR, Work, work_of
from heedful.emulator.program.asm import SGPR

_NEVER = float("inf")
# Slots after its passes that the result of an MFMA may have to be waited for.
_LONGEST_AFTER = 5


@dataclass
class Timing:
    """The outcome of a replay.

    Attributes:
        clocks: until the last wave ended.
        busy: clocks for which each unit was busy: mfma and valu (mean of the SIMDs), lds, memory,
            atomic.
        stalls: clocks that waves spent waiting, by what for, summed over waves.
        ends: when each workgroup ended, in clocks.
        waves: that were replayed.
        events: (wave, kind, start and end in clocks) of the window that was asked for.
    """

    clocks: float = 0.0
    waves: int = 0
    busy: dict[str, float] = field(default_factory=dict)
    stalls: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    ends: list[float] = field(default_factory=list)
    events: list[tuple[int, str, float, float]] = field(default_factory=list)


class _Program:
    """The part that all waves share: demands by pc, and how far MFMA results reach."""

    def __init__(self, trace: Trace):
        code, arch = trace.program.code, trace.program.arch
        self.work: list[Work] = [work_of(i.text, arch) for i in code]
        self.shapes = [shape_of(i.text, arch) for i in code]
        vector = [frozenset(x for x in s.reads | s.writes if x < SGPR) for s in self.shapes]
        self.touches = vector
        self.extra = [trace.conflicts.get(pc, 0.0) for pc in range(len(code))]
        self._distance: dict[tuple[int, int], int] = {}

    def distance(self, producer: int, consumer: int) -> int:
        """Slots from the issue of an MFMA to that of an instruction that touches its result."""
        key = (producer, consumer)
        if key not in self._distance:
            p, c = self.shapes[producer], self.shapes[consumer]
            self._distance[key] = 1 + after_mfma(p, c, p.vector_writes)[0]
        return self._distance[key]


class _Wave:
    """One wave: where it is, when it may go on, and what it has in flight."""

    __slots__ = (
        "number",
        "group",
        "stream",
        "position",
        "ready",
        "reason",
        "priority",
        "results",
        "vm",
        "lgkm",
    )

    def __init__(self, number: int, group: int, stream: list[int]):
        self.number, self.group, self.stream = number, group, stream
        self.position = 0
        self.ready = 0.0
        self.reason = ""
        self.priority = 0
        # MFMAs whose results may not be there: until when that matters, pc, when it was issued.
        self.results: list[tuple[float, int, float]] = []
        self.vm: list[float] = []
        self.lgkm: list[float] = []


class ComputeUnit:
    """A replay of workgroups that begin together on one compute unit."""

    def __init__(self, trace: Trace, window: float = 0.0, clock_hz: float = 0.0):
        """clock_hz: at which atomics, whose rate is one of seconds, are counted in clocks; by
        default that of full power."""
        arch = trace.program.arch
        self._program, self.window = _Program(trace), window
        self.simds = int(constant("simds", arch))
        self._packed = int(constant("packed_after", arch))
        self._lds_latency = constant("lds_latency", arch) / SLOT
        self._memory_latency = constant("l2_latency", arch) / SLOT
        self._scalar_latency = constant("scalar_latency", arch) / SLOT
        self._limits = (
            int(constant("memory_outstanding", arch)),
            int(constant("lds_outstanding", arch)),
        )
        rate = constant("atomics", arch) / constant("compute_units", arch)
        self._atomics = rate / (clock_hz or constant("clock_full", arch)) * SLOT
        self._pair = self.simds // int(constant("lds_ports", arch))
        self.timing = Timing(busy=dict.fromkeys(("mfma", "valu", "lds", "memory", "atomic"), 0.0))

    def run(self, groups: Sequence[Sequence[Sequence[int]]]) -> Timing:
        """Replay workgroups, each the streams of its waves, from their common start to the end."""
        simds = range(self.simds)
        self._vector_free = [0.0] * self.simds  # VALU instructions may be issued
        self._packed_free = [0.0] * self.simds  # those that run beside no MFMA
        self._matrix_free = [0.0] * self.simds
        self._ports = [0.0] * (self.simds // self._pair)
        self._array = self._memory = self._atomic = 0.0
        self._waves: list[list[_Wave]] = [[] for _ in simds]
        self._simd_of: dict[int, int] = {}
        self._at_barrier: list[list[tuple[_Wave, float]]] = [[] for _ in groups]
        self._alive = [len(waves) for waves in groups]
        self.timing.ends = [0.0] * len(groups)
        self._queue: list[tuple[float, int]] = [(0.0, simd) for simd in simds]
        number = 0
        for group, waves in enumerate(groups):
            for stream in waves:
                wave = _Wave(number, group, list(stream))
                simd = number % self.simds
                self._simd_of[number] = simd
                self._waves[simd].append(wave)
                self._advance(wave, 0.0)
                number += 1
        while self._queue:
            now, simd = heapq.heappop(self._queue)
            while self._queue and self._queue[0] == (now, simd):
                heapq.heappop(self._queue)
            self._slot(simd, now)
        busy = self.timing.busy
        for unit in ("mfma", "valu"):
            busy[unit] /= self.simds
        self.timing.waves = number
        self.timing.clocks = max(self.timing.ends, default=0.0)
        return self.timing

    def _slot(self, simd: int, now: float):
        """Issue what one SIMD can in this slot, and say when to look again."""
        waves, used = self._waves[simd], set()
        if len(waves) > 1:
            waves = sorted(waves, key=lambda w: (-w.priority, w.number))
        for wave in waves:
            if wave.ready <= now:
                work = self._program.work[wave.stream[wave.position]]
                if work.port not in used and self._free(simd, work) <= now:
                    used.add(work.port)
                    self._issue(simd, wave, work, now)
        again = _NEVER
        for wave in self._waves[simd]:
            if wave.ready < _NEVER:
                work = self._program.work[wave.stream[wave.position]]
                again = min(again, max(wave.ready, self._free(simd, work)))
        if again < _NEVER:
            again = max(-(-again // 1), now + 1)
            heapq.heappush(self._queue, (again, simd))

    def _free(self, simd: int, work: Work) -> float:
        """When the unit that a SIMD's instruction needs is free."""
        if work.port != VECTOR:
            return 0.0
        if work.kind == "mfma":
            return self._matrix_free[simd]
        if work.apart:
            return max(self._vector_free[simd], self._packed_free[simd])
        return self._vector_free[simd]

    def _issue(self, simd: int, wave: _Wave, work: Work, now: float):
        """One instruction leaves for its unit."""
        pc, timing = wave.stream[wave.position], self.timing
        if now > wave.ready:
            timing.stalls[f"{work.kind} busy"] += (now - wave.ready) * SLOT
        after, end = now + 1, now + work.slots
        if work.kind == "mfma":
            self._matrix_free[simd] = end
            self._vector_free[simd] = max(self._vector_free[simd], now + work.hold)
            self._packed_free[simd] = end + self._packed
            timing.busy["mfma"] += work.slots * SLOT
            reach = end + _LONGEST_AFTER
            wave.results = [r for r in wave.results if r[0] > now] + [(reach, pc, now)]
        elif work.port == VECTOR:
            self._vector_free[simd] = end
            timing.busy["valu"] += work.slots * SLOT
        elif work.port == LDS:
            end = self._through_lds(simd, wave, work, pc, now)
        elif work.port == MEMORY:
            end = self._through_memory(wave, work, now)
        elif work.kind == "scalar-load":
            end = now + self._scalar_latency
            _in_order(wave.lgkm, end)
        elif work.port == BRANCH:
            after = end
        if now * SLOT < self.window:
            timing.events.append((wave.number, work.kind, now * SLOT, end * SLOT))
        wave.position += 1
        self._advance(wave, after)

    def _through_lds(self, simd: int, wave: _Wave, work: Work, pc: int, now: float) -> float:
        """The array and a port, each in order; the later of the two counts."""
        extra, port = self._program.extra[pc], simd // self._pair
        self._array = max(self._array, now) + (work.array + extra) / SLOT
        self._ports[port] = max(self._ports[port], now) + (work.port_clocks + extra) / SLOT
        self.timing.busy["lds"] += work.array + extra
        return _in_order(wave.lgkm, max(self._array, self._ports[port]) + self._lds_latency)

    def _through_memory(self, wave: _Wave, work: Work, now: float) -> float:
        """Loads and stores by the path to L2, atomics at their own rate."""
        if work.kind == "atomic":
            self._atomic = max(self._atomic, now) + work.clocks / self._atomics
            self.timing.busy["atomic"] += work.clocks / self._atomics * SLOT
            return _in_order(wave.vm, self._atomic + self._memory_latency)
        self._memory = max(self._memory, now) + work.clocks / SLOT
        self.timing.busy["memory"] += work.clocks
        end = self._memory + self._memory_latency
        if work.to_lds:
            self._array = max(self._array, now) + work.array / SLOT
            self.timing.busy["lds"] += work.array
        return _in_order(wave.vm, end)

    def _advance(self, wave: _Wave, now: float):
        """Pass over what needs no port, up to the next instruction that does."""
        program, stalls = self._program, self.timing.stalls
        while True:
            pc = wave.stream[wave.position]
            work = program.work[pc]
            if work.port is not None:
                break
            wave.position += 1
            if work.kind == "wait":
                done = max(_done(wave.vm, work.vm), _done(wave.lgkm, work.lgkm), now)
                if done > now:
                    late = _done(wave.vm, work.vm) >= _done(wave.lgkm, work.lgkm)
                    stalls["wait for memory" if late else "wait for lds"] += (done - now) * SLOT
                now = done + 1
            elif work.kind == "priority":
                wave.priority, now = work.priority, now + 1
            elif work.kind == "barrier":
                wave.ready = _NEVER
                self._at_barrier[wave.group].append((wave, now))
                return self._release(wave.group)
            elif work.kind == "end":
                return self._finish(wave, now)
            else:
                now += work.slots
        ready = max(now, self._after_results(wave, pc), self._outstanding(wave, work))
        if ready > now:
            stalls["wait for mfma result" if work.port == VECTOR else "queue full"] += (
                ready - now
            ) * SLOT
        wave.ready = ready

    def _after_results(self, wave: _Wave, pc: int) -> float:
        """When the results of MFMAs that this instruction touches are there."""
        touched = self._program.touches[pc]
        if not wave.results or not touched:
            return 0.0
        latest = 0.0
        for _, producer, start in wave.results:
            if not self._program.shapes[producer].vector_writes.isdisjoint(touched):
                latest = max(latest, start + self._program.distance(producer, pc))
        return latest

    def _outstanding(self, wave: _Wave, work: Work) -> float:
        """When the counter has room for one more."""
        memory, lds = self._limits
        if work.port == MEMORY and len(wave.vm) >= memory:
            return wave.vm[-memory]
        if work.port == LDS and len(wave.lgkm) >= lds:
            return wave.lgkm[-lds]
        return 0.0

    def _release(self, group: int):
        """Let a workgroup go on once all its living waves are at the barrier."""
        arrived = self._at_barrier[group]
        if not arrived or len(arrived) < self._alive[group]:
            return
        last = max(when for _, when in arrived)
        self._at_barrier[group] = []
        for wave, when in arrived:
            self.timing.stalls["barrier"] += (last - when) * SLOT
            self._advance(wave, last + 1)
            if wave.ready < _NEVER:
                wake = max(-(-wave.ready // 1), 0.0)
                heapq.heappush(self._queue, (wake, self._simd_of[wave.number]))

    def _finish(self, wave: _Wave, now: float):
        wave.ready = _NEVER
        end = max([now, *wave.vm[-1:]]) * SLOT
        self._waves[self._simd_of[wave.number]].remove(wave)
        self._alive[wave.group] -= 1
        ends = self.timing.ends
        ends[wave.group] = max(ends[wave.group], end)
        self._release(wave.group)


def _in_order(queue: list[float], end: float) -> float:
    """Note an operation that ends no earlier than those before it."""
    end = max(end, queue[-1]) if queue else end
    queue.append(end)
    if len(queue) > 128:
        del queue[:64]
    return end


def _done(queue: list[float], count: int) -> float:
    """When no more than `count` of a queue are outstanding; -1: nothing is waited for."""
    return queue[-1 - count] if 0 <= count < len(queue) else 0.0
