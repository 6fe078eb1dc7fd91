"""A planted change of a number or a rule of the clock fails a test of the clock."""

import inspect
import itertools
from dataclasses import replace

import pytest

from emulated.clock import test_grid, test_micro_kernels
from emulated.helpers import clocked
from heedful.emulator.clock import grid, launch, replay, work
from heedful.emulator.clock.constants import CONSTANTS
from support.problems.grids import slow_but

ARCHES = ("gfx942", "gfx950")
# Module, what stands there, what is planted.
RULES = [
    (replay, "self._vector_free[simd], now + work.hold", "self._vector_free[simd], now"),
    (replay, "self._matrix_free[simd] = end", "self._matrix_free[simd] = now"),
    (replay, "self._packed_free[simd] = end + self._packed", "pass"),
    (replay, "self._vector_free[simd] = end", "self._vector_free[simd] = now + 1"),
    (replay, "max(self._vector_free[simd], self._packed_free[simd])", "self._vector_free[simd]"),
    (replay, "work.port not in used and ", ""),
    (replay, "after = end", "pass"),
    (replay, "+ (work.array + extra) / SLOT", "+ work.array / SLOT"),
    (replay, "max(self._array, self._ports[port]) +", "self._array +"),
    (replay, "max(self._array, self._ports[port]) +", "self._ports[port] +"),
    (replay, "port = self._program.extra[pc], simd // self._pair", "port = 0, 0"),
    (replay, 'self.timing.busy["lds"] += work.array + extra', "pass"),
    (replay, "self._memory + self._memory_latency", "self._memory"),
    (replay, "self._memory = max(self._memory, now) + work.clocks / SLOT", "self._memory = now"),
    (replay, "self._atomic = max(self._atomic, now) + work.clocks", "self._atomic = work.clocks"),
    (replay, 'self.timing.busy["lds"] += work.array\n', "pass\n"),
    (replay, "_done(wave.lgkm, work.lgkm), now)", "now)"),
    (replay, "max(_done(wave.vm, work.vm), ", "max("),
    (replay, "now = done + 1", "now = done + 2"),
    (replay, "wave.priority, now = work.priority, now + 1", "now += 1"),
    (replay, "-w.priority, w.number", "w.priority, w.number"),
    (replay, "self._advance(wave, last + 1)", "self._advance(wave, when + 1)"),
    (replay, "len(arrived) < self._alive[group]", "False"),
    (replay, "ready = max(now, self._after_results(wave, pc),", "ready = max(now,"),
    (replay, "return wave.vm[-memory]", "return 0.0"),
    (replay, "return wave.lgkm[-lds]", "return 0.0"),
    (replay, "queue[-1 - count]", "queue[-1]"),
    (replay, "simd = number % self.simds", "simd = 0"),
    (replay, "end = max([now, *wave.vm[-1:]]) * SLOT", "end = now"),
    (replay, "clock_hz or constant", "constant"),
    (grid, 'timing.busy["memory"] +', ""),
    (grid, ' + timing.busy["atomic"]', ""),
    (grid, 'timing.busy["mfma"] + constant', "constant"),
    (grid, "idle = used * min", "idle = min"),
    (grid, "min(active / least, 1.0)", "1.0"),
    (grid, "/ max(active, least)", "/ active"),
    (grid, '** constant("idle_exponent", arch), highest)', ", 9e9)"),
    (grid, "power / max(total, 1.0), total", "1.0, total"),
    (grid, 'places = int(constant("compute_units", arch)) * resident\n    clock', "clock"),
    (grid, "trace, resident, window, clock)", "trace, resident, window)"),
    (grid, "lengths[die::dies]", "lengths"),
    (grid, "heapq.heappop(free) + length", "length"),
    (grid, "max(self.clocks / clock_hz, self.memory_seconds)", "self.clocks / clock_hz"),
    (grid, "(number + after + 1) // 2", "number + 1"),
]
# Names of these modules that others import.
CHANGED = ("ComputeUnit", "activity", "clock_of", "makespan", "occupancy", "predict", "replay")
CHANGES = [(name, arch, by) for name in CONSTANTS for arch in ARCHES for by in (0.5, 2.0)]
# Fitted numbers set a scale that no small kernel can show; the tables hold them.
FITTED = {"clock_full", "data_power", "atomics"}
# The path to L2 is as wide as its narrower part, which on gfx950 are both.
NO_CHANGE = {("memory_bytes", "gfx942", 2.0), ("memory_bytes", "gfx950", 2.0)}
NO_CHANGE |= {("l2_bytes", "gfx950", 2.0)}
# No instruction of gfx942 has more than 16 bytes of A and B.
NO_CHANGE |= {("mfma_hold_bytes", "gfx942", 2.0)}
CHANGES = [c for c in CHANGES if c[0] not in FITTED and c not in NO_CHANGE]
ONE_EACH = list({change[0]: change for change in CHANGES}.values())


def cases(module):
    """Every test of a module with each of its arguments."""
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if not name.startswith("test_") or function.__module__ != module.__name__:
            continue
        marks = [m for m in getattr(function, "pytestmark", []) if m.name == "parametrize"]
        sets = []
        for mark in marks:
            names = mark.args[0]
            names = [n.strip() for n in names.split(",")] if isinstance(names, str) else names
            values = [v if len(names) > 1 else (v,) for v in mark.args[1]]
            sets.append([dict(zip(names, v, strict=True)) for v in values])
        for chosen in itertools.product(*sets):
            yield function, {k: v for part in chosen for k, v in part.items()}


CASES = [*cases(test_micro_kernels), *cases(test_grid)]


def noticed() -> bool:
    """Whether a test of the clock fails, or what it runs does."""
    work.work_of.cache_clear()
    try:
        for function, arguments in CASES:
            function(**arguments)
    except (Exception, pytest.fail.Exception):
        return True
    finally:
        work.work_of.cache_clear()
    return False


def test_the_tests_pass_unchanged():
    assert not noticed()


@pytest.mark.parametrize("rule", range(len(RULES)))
def test_a_changed_rule_is_noticed(rule, monkeypatch):
    module, here, planted = RULES[rule]
    source = inspect.getsource(module)
    assert here in source
    changed = dict(module.__dict__)
    exec(compile(source.replace(here, planted), module.__file__, "exec"), changed)
    for name in CHANGED:
        if name in changed and changed[name] is not module.__dict__[name]:
            for user in (grid, test_grid, test_micro_kernels, clocked, launch):
                if name in vars(user):
                    monkeypatch.setattr(user, name, changed[name])
    assert noticed()


# By default one change of each number.
@pytest.mark.parametrize(("name", "arch", "by"), slow_but(ONE_EACH, CHANGES))
def test_a_changed_number_is_noticed(name, arch, by, monkeypatch):
    entry = CONSTANTS[name]
    monkeypatch.setitem(CONSTANTS, name, replace(entry, **{arch: by * entry.of(arch)}))
    assert noticed()
