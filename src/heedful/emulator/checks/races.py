"""Races in global memory: who last wrote and read each unit of every buffer.

Nothing orders the workgroups of a launch, so two of them may not touch the same bytes if one
writes. Within a workgroup barriers order the waves, for accesses that the wave has waited for.
Writing what is there already is no race, and atomics do not race with each other.

A Triton atomic that acquires and releases is `buffer_wbl2 sc1`, a wait, the atomic, a wait and
`buffer_inv sc1`. A workgroup that has executed the last is ordered after reads by others, and after
the writes that they have released: those that have ended when the `buffer_wbl2` begins. A wave
knows that its own have, since it waits for them in order; for another's, the other must have waited
and met a barrier.

Which accesses conflict does not depend on the order in which they are executed, but for what has
been released by then, so this runs under the first schedule of a launch only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from heedful.emulator.floats import I64

if TYPE_CHECKING:
    from heedful.emulator.machine.memory import GlobalMemory
    from heedful.emulator.machine.state import Batch, Rect
    from heedful.emulator.program.asm import Instruction
    from heedful.emulator.report import Sink

_WAVE_SHIFT, _GROUP_SHIFT = 24, 32
_PC_MASK, _WAVE_MASK = (1 << _WAVE_SHIFT) - 1, 0xFF


class GlobalRaces:
    """The shadow of global memory, of `unit` bytes a place.

    A mark is workgroup + 1, wave and pc; 0 is nobody. A negative mark of a read says that several
    workgroups have read. It remembers the last reader among the waves of one workgroup.
    """

    def __init__(self, memory: GlobalMemory, unit: int, code, sink: Sink, shape: tuple[int, ...]):
        """shape: copies of the launch, its workgroups, waves of each."""
        self.memory, self.code, self.sink = memory, code, sink
        # When each wave began its last release that has ended.
        self.released = np.zeros(shape, I64)
        self._shift = unit.bit_length() - 1
        units = memory.words.nbytes >> self._shift
        self._writer, self._written = np.zeros(units, I64), np.zeros(units, I64)
        self._reader, self._read = np.zeros(units, I64), np.zeros(units, I64)

    def _index(self, offset, nbytes: int):
        """Units of an access, (groups, waves, 64, units)."""
        count = max(nbytes >> self._shift, 1)
        if (offset & ((1 << self._shift) - 1)).any():
            count += 1
        return (offset >> self._shift)[..., None] + np.arange(count)

    def _marks(self, batch: Batch, at: Instruction):
        """Marks of an access by each wave, (groups, waves, 1, 1)."""
        machine, (g, w) = batch.machine, batch.rect.index
        group = (machine.ordinal[g, None] + 1) << _GROUP_SHIFT
        return (group | machine.dealt[g, w] << _WAVE_SHIFT | at.pc)[..., None, None]

    def read(self, batch: Batch, at: Instruction, offset, nbytes: int) -> tuple[GlobalTouch, ...]:
        """Check and note a read at byte offsets in the arena, (groups, waves, 64)."""
        live, index = self.memory.live(batch, offset), self._index(offset, nbytes)
        mark, now = self._marks(batch, at), batch.machine.lds.clock(batch.rect)
        self._check(batch, at, index, live, self._writer, self._written, "write")
        known = self._reader[index]
        several = (known != 0) & ((known < 0) | (known >> _GROUP_SHIFT != mark >> _GROUP_SHIFT))
        self._reader[index] = np.where(several, -mark, mark)
        back = np.abs(self._reader[index])  # another workgroup of the batch may have been last
        mixed = back >> _GROUP_SHIFT != mark >> _GROUP_SHIFT
        if mixed.any():
            self._reader[index[mixed]] = -back[mixed]
        self._read[index] = now
        return (GlobalTouch(self._read, index, batch),)

    def write(
        self, batch: Batch, at: Instruction, offset, nbytes: int, changes: Callable
    ) -> tuple[GlobalTouch, ...]:
        """Check and note a write; `changes` says which lanes write other data than is there."""
        live, index = self.memory.live(batch, offset), self._index(offset, nbytes)
        mark, now = self._marks(batch, at), batch.machine.lds.clock(batch.rect)
        self._check(batch, at, index, live, self._writer, self._written, "write", changes)
        self._check(batch, at, index, live, self._reader, self._read, "read", changes)
        self._writer[index] = mark
        self._written[index] = now
        return (GlobalTouch(self._written, index, batch),)

    def release(self, batch: Batch) -> tuple[Release, ...]:
        """The effect of a write-back once its wave has waited for it."""
        return (Release(self.released, batch),)

    def settled(self, batch: Batch, at: Instruction, offset, nbytes: int, changes: Callable):
        """After a write has landed: find another wave of the batch whose data it replaced."""
        index = self._index(offset, nbytes)
        seen, mark = self._writer[index], self._marks(batch, at)
        bad = (seen >> _WAVE_SHIFT != mark >> _WAVE_SHIFT) & self.memory.live(batch, offset)
        if bad.any():
            self._report(batch, at, bad & changes(), seen, index, "write")

    def _check(self, batch, at, index, live, marks, times, kind: str, changes=None):
        """Report accesses of others, noted in `marks` at `times`, that nothing orders."""
        known = marks[index]
        if not known.any():
            return
        mark, machine = self._marks(batch, at), batch.machine
        g = batch.rect.index[0]
        last = np.abs(known)
        apart = (known < 0) | (last >> _GROUP_SHIFT != mark >> _GROUP_SHIFT)
        ordered = machine.acquired[g, None, None, None]
        if kind == "write" and ordered.any():
            copy = machine.copy[g, None, None, None]
            ordered = ordered & self._is_released(copy, last, times[index])
        apart &= ~ordered
        waves = (last >> _WAVE_SHIFT != mark >> _WAVE_SHIFT) & (known > 0)
        waves &= last >> _GROUP_SHIFT == mark >> _GROUP_SHIFT
        waves &= times[index] >= machine.lds.clock(batch.rect)
        bad = (known != 0) & (apart | waves) & live
        if changes and bad.any():
            bad &= changes()
        self._report(batch, at, bad, known, index, kind)

    def _is_released(self, copy, marks, times):
        """Whether accesses had ended when their workgroup began to release. A wave's own in the
        epoch of its release are taken to be before it."""
        group, wave = (marks >> _GROUP_SHIFT) - 1, marks >> _WAVE_SHIFT & _WAVE_MASK
        by_any = self.released.max(-1)
        return (times <= self.released[copy, group, wave]) | (times < by_any[copy, group])

    def _report(self, batch: Batch, at: Instruction, bad, marks, index, kind: str):
        if not bad.any():
            return
        group, wave, lane, unit = (int(x) for x in np.argwhere(bad)[0])
        mark = abs(int(marks[group, wave, lane, unit]))
        machine = batch.machine
        other = machine.coordinates[(mark >> _GROUP_SHIFT) - 1]
        where = self.memory.describe(int(index[group, wave, lane, unit]) << self._shift)
        message = (
            f"lane {lane} at {where} conflicts with a {kind} by "
            f"workgroup {other}, wave {mark >> _WAVE_SHIFT & _WAVE_MASK}"
        )
        culprit = self.code[mark & _PC_MASK]
        self.sink.add("global-race", message, at, culprit, **machine.place(batch, group, wave))


class GlobalTouch:
    """A global access in flight; until its wave has waited for it, no barrier orders it."""

    def __init__(self, times: np.ndarray, index, batch: Batch):
        self.times, self.index, self.rect = times, index, batch.rect

    def complete(self, batch: Batch):
        """Nothing to do: its time is that of the epoch in which it ended."""

    def outlive_barrier(self, batch: Batch):
        """The access may still happen after the barrier, so it belongs to the new epoch too."""
        rect: Rect | None = self.rect.intersect(batch.rect)
        if rect:
            self.times[self.index[rect.within(self.rect)]] = batch.machine.lds.clock(rect)


class Release:
    """A write-back in flight: what it finds written is for others to see once it has ended."""

    def __init__(self, released: np.ndarray, batch: Batch):
        self.released, self.rect = released, batch.rect
        self.began = batch.machine.lds.clock(batch.rect)[..., 0, 0]

    def complete(self, batch: Batch):
        """The write-back has ended."""
        rect: Rect | None = self.rect.intersect(batch.rect)
        if rect:
            g, w = rect.index
            machine, (groups, _) = batch.machine, rect.within(self.rect)
            place = machine.copy[g, None], machine.ordinal[g, None], machine.dealt[g, w]
            self.released[place] = self.began[groups]

    def outlive_barrier(self, batch: Batch):
        """Nothing to do: what counts is when it began."""
