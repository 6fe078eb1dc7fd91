"""The public call: run a kernel's assembly over a grid and report what happened."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from heedful.emulator.arguments import bind
from heedful.emulator.checks.races import GlobalRaces
from heedful.emulator.clock.trace import Recorder
from heedful.emulator.machine.memory import GlobalMemory
from heedful.emulator.machine.schedule import Schedule, parse_schedule
from heedful.emulator.machine.workgroups import Machine
from heedful.emulator.program.asm import Program, parse
from heedful.emulator.program.decoder import Code
from heedful.emulator.report import KINDS, Report, Sink, Stop

LDS_LIMIT = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}
# Waves executed together: enough to spread the cost of a NumPy call, few enough to stay in cache.
_WAVES_TOGETHER = 80


def emulate(
    asm: Any,
    grid: Sequence[int],
    args: Sequence[Any] | Mapping[str, Any],
    *,
    lds_bytes: int | None = None,
    threads: int | None = None,
    kernel: str | None = None,
    checks: Iterable[str] | None = None,
    schedule: str | Schedule | Sequence[str | Schedule] = "lockstep",
    early_loads: bool = False,
    strict: bool = True,
    stop_at_first: bool = False,
    max_instructions: int = 10_000_000,
    recorder: Recorder | None = None,
) -> Report:
    """Execute gfx942 or gfx950 assembly on the CPU, watching for what a GPU would not report.

    Args:
        asm: assembly text, what `decode` or `load_object` made, or a compiled kernel with its text
            and launch facts: Triton's (`asm["amdgcn"]`, `metadata`) or heedful's (`text`,
            `shared_bytes`).
        grid: workgroups along x, y, z; missing axes are 1.
        args: one value per kernel argument: C-contiguous NumPy arrays for pointers, which are
            written in place, or At(array, byte) to point into one; Python or NumPy numbers for
            scalars; None for a null pointer.
            Trailing arguments that only Triton knows (scratch pointers) may be left out.
            Or values by the names that the code object's metadata gives; "@16" names the argument
            at byte 16. All must be given but those called pad, which are 0.
        lds_bytes: dynamic LDS of the launch (Triton: `metadata.shared`); default: what the
            kernel itself asks for, else the target's limit, which weakens the bounds check.
        threads: work-items per workgroup; default: the kernel's maximum, which is what Triton uses.
        kernel: name, where the text has several.
        checks: kinds of finding to look for (see `report.KINDS`); default all.
        schedule: order of the waves: lockstep, round-robin, random:SEED, random:FIRST-LAST,
            delay:WAVES, delay:each or delay:halves; or several of them, each on fresh copies of
            the arguments. The arrays then hold what the first gave.
        early_loads: loads to LDS land when they are issued, the earliest moment a chip might, and
            not when their wave has waited for them, the latest.
        strict: whether a wait-state rule that kernels shipped by AMD break is an error like any
            other; else it is advice, with which a report may be clean.
        stop_at_first: end at the first finding instead of collecting them.
        max_instructions: per wave; beyond it the emulation ends with a finding.
        recorder: keeps the path of every wave under the first schedule, and says which workgroups
            run.

    Raises:
        AsmError: the text has no such kernel or cannot be parsed.
        Unsupported: an instruction that is reached has no semantics here.
        ValueError: arguments do not fit the kernel's, an unknown check or schedule.
    """
    text, lds_bytes, threads = _unpack(asm, lds_bytes, threads)
    code = text if isinstance(text, Code) else decode(text, kernel)
    program = code.program
    wanted = frozenset(KINDS if checks is None else checks)
    if unknown := wanted - set(KINDS):
        raise ValueError(f"checks has unknown kinds {sorted(unknown)}; known are {sorted(KINDS)}")
    names = [schedule] if isinstance(schedule, str | Schedule) else list(schedule)
    if not names:
        raise ValueError("schedule is an empty list; name at least one order of the waves")
    plans = [parse_schedule(name) for name in names]
    shape = (*grid, 1, 1)[:3]
    report = Report(program, " ".join(plan.name for plan in plans))
    sink = Sink(report, wanted, stop_at_first)
    memory = GlobalMemory(sink)
    threads = threads or program.max_workgroup or 64
    kernarg = bind(program, memory, args, shape, threads)
    memory.begin()
    static = program.lds_bytes or LDS_LIMIT[program.arch]
    limit = static if lds_bytes is None else lds_bytes
    launch = _Launch(
        code, memory, sink, shape, threads, limit, kernarg, max_instructions, early_loads, recorder
    )
    if recorder:
        recorder.begin(launch.waves, (program.lds_bytes or 0) if lds_bytes is None else lds_bytes)
    first = _First(memory, sink)
    start = time.perf_counter()
    try:
        _check_statically(code, sink, strict)
        for plan in (part for each in plans for part in each.rounds(launch.waves)):
            launch.run(plan, is_first=first.words is None)
            first.compare(plan, plan.copies(launch.waves), program)
    except Stop:
        pass
    report.seconds = time.perf_counter() - start
    first.restore()
    memory.copy_back(skip={0})
    return report


@dataclass(frozen=True)
class _Launch:
    """Everything about a launch but the order of its waves."""

    code: Code
    memory: GlobalMemory
    sink: Sink
    shape: tuple[int, ...]
    threads: int
    lds_bytes: int
    kernarg: int
    max_instructions: int
    early_loads: bool
    recorder: Recorder | None

    @property
    def waves(self) -> int:
        """Waves per workgroup."""
        return -(-self.threads // 64)

    def run(self, plan: Schedule, is_first: bool):
        """Execute all workgroups in fresh memory; what no order changes is counted in the first."""
        copies = plan.copies(self.waves)
        self.memory.begin(copies)
        workgroups = self._workgroups()
        together = max(1, _WAVES_TOGETHER // (self.waves * copies))
        together = max(1, min(together, len(workgroups)))
        machine = Machine(
            self.code,
            self.memory,
            together * copies,
            self.waves,
            self.lds_bytes,
            self.sink,
            plan,
            self.max_instructions,
            self.recorder if is_first else None,
        )
        machine.lds.counts_banks = is_first
        machine.lds.lands_at_once = self.early_loads
        self.memory.races = None
        if is_first and self.sink.wants("global-race"):
            unit, code = self.code.global_unit(), self.code.program.code
            shape = copies, math.prod(self.shape), self.waves
            self.memory.races = GlobalRaces(self.memory, unit, code, self.sink, shape)
        try:
            for chunk in _chunks(workgroups, together):
                machine.run(chunk, self.kernarg, self.threads)
        finally:
            machine.count_executed()

    def _workgroups(self) -> Sequence[tuple[int, int, int]]:
        """Grid coordinates in launch order, x fastest; those that the recorder wants."""
        x, y, z = (range(n) for n in self.shape)
        every = [(i, j, k) for k in z for j in y for i in x]
        return self.recorder.wanted(every) if self.recorder else every


class _First:
    """The memory after the first schedule, with which every other is compared."""

    def __init__(self, memory: GlobalMemory, sink: Sink):
        self.memory, self.sink = memory, sink
        self.words: np.ndarray | None = None
        self.name = ""

    def compare(self, plan: Schedule, copies: int, program: Program):
        """Add a finding for each copy of a run that gave other bits; keep those of the first."""
        for copy in range(copies):
            name, words = plan.copy_name(copy), self.memory.arena(copy)
            if self.words is None:
                self.words, self.name = words.copy(), name
            elif where := self.memory.first_difference(self.words, words):
                message = f"{where} is another under {name} than under {self.name}"
                self.sink.add("order", message, program.code[-1])

    def restore(self):
        """Bring the first result back; nothing to do if no run came to its end."""
        if self.words is not None:
            self.memory.words = self.words


def _unpack(asm: Any, lds_bytes: int | None, threads: int | None):
    """Text and launch facts from a compiled kernel or from plain text."""
    if isinstance(asm, str | Code):
        return asm, lds_bytes, threads
    if hasattr(asm, "text"):
        text, shared, warps = asm.text, asm.shared_bytes, asm.num_warps
    else:
        text = asm.asm["amdgcn"]
        shared, warps = asm.metadata.shared, asm.metadata.num_warps
    lds_bytes = shared if lds_bytes is None else lds_bytes
    return text, lds_bytes, 64 * warps if threads is None else threads


def _check_statically(code: Code, sink: Sink, strict: bool):
    """Checks that need no execution."""
    if not sink.wants("wait-states"):
        return
    for v in code.violations:
        message = f"{v.reason}: needs {v.needed} wait states, has {v.found}"
        sink.add("wait-states", message, v.consumer, v.producer, advice=v.is_advice and not strict)


@lru_cache(maxsize=16)
def decode(text: str, kernel: str | None = None) -> Code:
    """Parse and decode a kernel; kept, since one kernel runs under many schedules and shapes."""
    return Code(parse(text, kernel))


def _chunks(every: Sequence[tuple[int, int, int]], size: int):
    """Workgroups, `size` at a time."""
    for i in range(0, len(every), size):
        yield every[i : i + size]
