"""The instruction streams of the waves of some workgroups, recorded while the emulator runs them in
lockstep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from heedful.emulator.program.asm import Program

if TYPE_CHECKING:
    from heedful.emulator.report import Report


class Recorder:
    """Given to `emulate`, keeps the path that every wave takes; only the named workgroups run.

    Attributes:
        workgroups: grid coordinates, or None for all.
    """

    def __init__(self, workgroups: Sequence[tuple[int, int, int]] | None = None):
        self.workgroups = None if workgroups is None else [tuple(w) for w in workgroups]
        self.waves, self.lds_bytes = 0, 0
        self._paths: dict[tuple[tuple[int, ...], int], list[tuple[int, int]]] = {}

    def begin(self, waves: int, lds_bytes: int):
        """A launch begins: waves of a workgroup, and the LDS that it takes."""
        self.waves, self.lds_bytes = waves, lds_bytes
        self._paths.clear()

    def wanted(self, workgroups: Sequence[tuple[int, int, int]]) -> Sequence[tuple[int, int, int]]:
        """Those of a grid that shall run.

        Raises:
            ValueError: one is not in the grid.
        """
        if self.workgroups is None:
            return workgroups
        if outside := set(self.workgroups) - set(workgroups):
            raise ValueError(f"workgroups {sorted(outside)} are not in the grid")
        return [w for w in workgroups if w in set(self.workgroups)]

    def passed(self, workgroup: tuple[int, ...], wave: int, start: int, count: int):
        """A wave executed `count` instructions from pc `start`."""
        self._paths.setdefault((workgroup, wave), []).append((start, count))

    def trace(self, report: Report) -> Trace:
        """The streams that were recorded in the launch of that report."""
        groups: dict[tuple[int, ...], list[np.ndarray]] = {}
        for (workgroup, _), path in sorted(self._paths.items()):
            steps = [np.arange(start, start + count, dtype=np.int32) for start, count in path]
            groups.setdefault(workgroup, []).append(np.concatenate(steps))
        executed = report.executed
        conflicts = {pc: n / executed[pc] for pc, n in report.bank_conflicts.items()}
        return Trace(report.program, self.waves, self.lds_bytes, groups, conflicts)


@dataclass
class Trace:
    """Streams of one kernel.

    Attributes:
        waves: of a workgroup. lds_bytes: that a workgroup holds.
        streams: by workgroup the pcs that each of its waves executed.
        conflicts: extra LDS clocks of one execution, by pc, on average.
    """

    program: Program
    waves: int
    lds_bytes: int
    streams: dict[tuple[int, ...], list[np.ndarray]]
    conflicts: dict[int, float] = field(default_factory=dict)

    @property
    def instructions(self) -> int:
        """Wave-instructions of all streams."""
        return sum(len(wave) for group in self.streams.values() for wave in group)
