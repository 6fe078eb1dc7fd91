"""LDS of a few workgroups, with a shadow that finds races, uninitialised reads and accesses out of
bounds.

Between two barriers (one *epoch*) the hardware orders nothing between waves, so two accesses of
different waves to one place, one of them a write, are a race whatever the order in which the
emulator happened to run them. The shadow keeps, for every unit of LDS, the stamp of the last write
and, per wave, of the last read. A stamp is epoch, wave and pc; a write that is still in flight
(DMA) is stamped as later than everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from heedful.emulator.floats import I64, U32
from heedful.emulator.machine.banks import BankCounter
from heedful.emulator.machine.memory import atomically, pick, place
from heedful.emulator.machine.state import POISON

if TYPE_CHECKING:
    from heedful.emulator.machine.state import Batch, Rect
    from heedful.emulator.program.asm import Instruction
    from heedful.emulator.report import Sink

_WAVE_SHIFT, _EPOCH_SHIFT = 24, 32
_PC_MASK, _WAVE_MASK = (1 << _WAVE_SHIFT) - 1, 0xFF
_IN_FLIGHT = 1 << 62
_NEVER = -1

# Which lanes, (groups, waves, 64, 1), a write gives other data than is there; None: all.
Changes = Callable[[], np.ndarray] | None


class Lds:
    """LDS storage and shadow; byte addresses are relative to each workgroup's allocation."""

    def __init__(self, groups: int, waves: int, nbytes: int, unit: int, code, sink: Sink):
        self.nbytes, self.code, self.sink = nbytes, code, sink
        self.waves, self.unit = waves, unit
        self._shift = unit.bit_length() - 1
        # Each wave has 16 bytes of its own past the end, where lanes that access nothing go.
        self._pad = -(-nbytes // 16) * 16
        self.stride = self._pad + 16 * waves
        total = groups * self.stride
        self.words = np.empty(total // 4, U32)
        self._units = total >> self._shift
        self._written = np.empty(self._units, I64)
        self._read = np.empty(waves * self._units, I64)
        self._base = (np.arange(groups, dtype=I64) * self.stride)[:, None, None]
        wave = np.arange(waves, dtype=I64)[None, :, None]
        self._parking = self._base + self._pad + 16 * wave
        self._wave = wave
        self._stamp = np.zeros((groups, 1, 1), I64)
        # When each wave read last: spares a write the search for reads in an epoch without any.
        self._last_read = np.full((groups, waves), _NEVER, I64)
        self._clock = 0
        self._races = sink.wants("lds-race") or sink.wants("lds-uninit")
        self.counts_banks, self.lands_at_once = True, False
        self._banks = BankCounter(sink.report.program.arch, sink.report.bank_conflicts)

    def reset(self):
        """Forget contents and history."""
        self.words.fill(POISON)
        self._written.fill(_NEVER)
        self._read.fill(_NEVER)
        self._last_read.fill(_NEVER)
        self._clock += 1
        self._stamp[...] = self._clock << _EPOCH_SHIFT

    def pass_barrier(self, groups):
        """These workgroups enter their next epoch."""
        self._clock += 1
        self._stamp[groups] = self._clock << _EPOCH_SHIFT

    def clock(self, rect: Rect):
        """The present epoch of each workgroup, (groups, 1, 1, 1); a later one is greater."""
        return self._stamp[rect.g0 : rect.g1, ..., None]

    def _resolve(self, batch: Batch, at: Instruction, address, nbytes: int):
        """Absolute byte addresses; lanes that are inactive or out of bounds are parked."""
        g, w = batch.rect.index
        if self.counts_banks:
            self._banks.count(at.pc, address, nbytes, batch.where)
        if address.min() >= 0 and address.max() <= self.nbytes - nbytes:
            if batch.full:
                return address + self._base[g]
            return np.where(batch.mask, address + self._base[g], self._parking[g, w])
        outside = (address + nbytes > self.nbytes) | (address < 0)
        if (outside & batch.mask).any():
            self._report_bounds(batch, at, address, nbytes, outside & batch.mask)
        return np.where(batch.mask & ~outside, address + self._base[g], self._parking[g, w])

    def _report_bounds(self, batch: Batch, at: Instruction, address, nbytes: int, outside):
        group, wave, lane = (int(x) for x in np.argwhere(outside)[0])
        byte = int(np.broadcast_to(address, batch.shape)[group, wave, lane])
        message = f"lane {lane} accesses {nbytes} bytes at {byte} of {self.nbytes}"
        self.sink.add("lds-bounds", message, at, **batch.machine.place(batch, group, wave))

    def _index(self, absolute, nbytes: int):
        """The units that an access covers: `index` into the shadow seen as rows of `row` units.

        Aligned accesses take whole rows, index (groups, waves, 64); others take single units,
        index (groups, waves, 64, units).
        """
        count = max(nbytes >> self._shift, 1)
        if count in (1, 2, 4, 8, 16) and not (absolute & (nbytes - 1)).any():
            return absolute >> (self._shift + count.bit_length() - 1), count
        return (absolute >> self._shift)[..., None] + np.arange(count), 1

    @staticmethod
    def _gather(shadow, index, row: int):
        """Shadow values under an index, (groups, waves, 64, units)."""
        return (
            shadow.take(index) if index.ndim == 4 else shadow.reshape(-1, row).take(index, axis=0)
        )

    @staticmethod
    def _scatter(shadow, index, row: int, stamps):
        """Set shadow values under an index to stamps of shape (groups, waves, 1, 1)."""
        if index.ndim == 4:
            shadow[index] = stamps
        else:
            shadow.reshape(-1, row)[index] = stamps

    def load(self, batch: Batch, at: Instruction, address, nbytes: int):
        """Read LDS; returns the data (as memory.pick does) and the effects of being in flight."""
        absolute = self._resolve(batch, at, address, nbytes)
        effects = ()
        if self._races:
            index, row = self._index(absolute, nbytes)
            marks = self._gather(self._written, index, row)
            self._check_marks(batch, at, marks)
            if marks.min() < 0:
                self._check_initialised(batch, at, marks)
            touch = _Touch(self, batch, at, index, row, is_write=False)
            touch.stamp(batch.rect)
            effects = (touch,)
        return pick(self.words, absolute, nbytes), effects

    def store(self, batch: Batch, at: Instruction, address, nbytes: int, data):
        """Write LDS now; returns the effects of being in flight."""
        absolute = self._resolve(batch, at, address, nbytes)
        if not self._races:
            place(self.words, absolute, nbytes, data)
            return ()
        index, row = self._index(absolute, nbytes)
        touch = _Touch(self, batch, at, index, row, is_write=True)
        if nbytes < 4:  # the rest of the register does not go to memory
            data = data & U32((1 << 8 * nbytes) - 1)

        def changes():
            return (pick(self.words, absolute, nbytes) != data).any(-1, keepdims=True)

        self._check_write(batch, at, index, row, changes)
        touch.stamp(batch.rect)
        place(self.words, absolute, nbytes, data)
        self._check_own(batch, at, touch, changes)
        return (touch,)

    def update(self, batch: Batch, at: Instruction, address, nbytes: int, operation, data):
        """Atomic read-modify-write, lane after lane; returns the old values and the effects.

        Atomics do not race with each other. They are looked at as reads: a plain write by
        another wave in the same epoch is found.
        """
        old, effects = self.load(batch, at, address, nbytes)
        active = np.broadcast_to(batch.mask, batch.shape)
        absolute = self._resolve(batch, at, address, nbytes)[active]
        old = old.copy()
        old[active] = atomically(self.words, absolute, nbytes, operation, data[active])
        return old, effects

    def start_dma(self, batch: Batch, at: Instruction, address, nbytes: int, data):
        """Begin a write that lands when the wave's s_waitcnt completes it, the latest moment that
        is legal, or with `lands_at_once` now, the earliest; returns its effects."""
        absolute = self._resolve(batch, at, address, nbytes)
        index, row = self._index(absolute, nbytes)
        dma = _Dma(self, batch, at, index, row, absolute, nbytes, data)
        if self._races:
            self._check_write(batch, at, index, row)
        if self.lands_at_once:
            dma.complete(batch)
            return ()
        if self._races:
            dma.stamp_in_flight()
            self._check_own(batch, at, dma)
        return (dma,)

    def stamps(self, rect: Rect, at: Instruction):
        """Stamps of an access now, (groups, waves, 1, 1)."""
        g, w = rect.index
        return (self._stamp[g] | (self._wave[:, w] << _WAVE_SHIFT) | at.pc)[..., None]

    def _check_marks(self, batch: Batch, at: Instruction, marks, changes: Changes = None):
        """Find writes of other waves in this epoch, or still in flight, under an access.

        `changes` says where equal data does not excuse a finished write.
        """
        epoch = self._stamp[batch.rect.g0 : batch.rect.g1, ..., None]
        if marks.max() < epoch.min():
            return
        wave = self._wave[:, batch.rect.w0 : batch.rect.w1, :, None]
        writer = (marks >> _WAVE_SHIFT) & _WAVE_MASK
        bad = (marks >= epoch) & (writer != wave) & batch.mask[..., None]
        if changes and bad.any():
            bad &= changes()
        bad |= (marks >= _IN_FLIGHT) & batch.mask[..., None]
        if bad.any():
            self._report_race(batch, at, bad, marks, "write")

    def _check_write(self, batch: Batch, at: Instruction, index, row: int, changes: Changes = None):
        """Find accesses of other waves in this epoch under a write; writing equal data is none."""
        self._check_marks(batch, at, self._gather(self._written, index, row), changes)
        rect = batch.rect
        epoch = self._stamp[rect.g0 : rect.g1, ..., None]
        wave = self._wave[:, rect.w0 : rect.w1, :, None]
        recent = np.any(self._last_read[rect.g0 : rect.g1] >= epoch[..., 0, 0], axis=0)
        for reader, shadow in enumerate(self._read.reshape(self.waves, -1)):
            if not recent[reader] or (rect.w0, rect.w1) == (reader, reader + 1):
                continue
            reads = self._gather(shadow, index, row)
            bad = (reads >= epoch) & (wave != reader) & batch.mask[..., None]
            if bad.any() and changes:
                bad &= changes()
            if bad.any():
                self._report_race(batch, at, bad, reads, "read")

    def _check_own(self, batch: Batch, at: Instruction, touch: _Touch, changes: Changes = None):
        """Find two waves of the batch writing to one place: one stamp has replaced the other.

        `changes` says where the data that stayed is not this wave's own.
        """
        if batch.rect.w1 - batch.rect.w0 == 1:
            return
        seen = self._gather(self._written, touch.index, touch.row) & (_IN_FLIGHT - 1)
        bad = (seen != self.stamps(batch.rect, at)) & batch.mask[..., None]
        if changes and bad.any():
            bad &= changes()
        if bad.any():
            self._report_race(batch, at, bad, seen, "write")

    def _check_initialised(self, batch: Batch, at: Instruction, marks):
        bad = ((marks < 0) & batch.mask[..., None]).any(-1)
        if bad.any() and self.sink.wants("lds-uninit"):
            batch.machine.taint.add(batch, at, bad)

    def _report_race(self, batch: Batch, at: Instruction, bad, marks, other_kind: str):
        group, wave, lane, unit = (int(x) for x in np.argwhere(bad)[0])
        mark = int(marks[group, wave, lane, unit])
        other = self.code[mark & _PC_MASK]
        sitting = batch.machine.dealt[batch.rect.g0 + group]
        other_wave = int(sitting[mark >> _WAVE_SHIFT & _WAVE_MASK])
        flight = mark >= _IN_FLIGHT
        state = (
            "a DMA write still in flight of" if flight else f"a {other_kind} in the same epoch by"
        )
        message = f"lane {lane} conflicts with {state} wave {other_wave}"
        self.sink.add("lds-race", message, at, other, **batch.machine.place(batch, group, wave))


class _Touch:
    """One LDS access of a batch in flight; until it completes, no barrier orders it."""

    def __init__(self, lds: Lds, batch: Batch, at: Instruction, index, row: int, is_write: bool):
        self.lds, self.rect, self.at = lds, batch.rect, at
        self.index, self.row, self.is_write = index, row, is_write

    def stamp(self, rect: Rect, flags: int = 0):
        """Mark the access as made in the present epoch of the waves of `rect`."""
        lds, index = self.lds, self.index[rect.within(self.rect)]
        stamps = lds.stamps(rect, self.at) | flags
        if self.is_write:
            lds._scatter(lds._written, index, self.row, stamps)
            return
        g, w = rect.index
        lds._last_read[g, w] = lds._stamp[g, :, 0]
        wave = lds._wave[:, w]
        wave = wave[..., None] if index.ndim == 4 else wave
        lds._scatter(lds._read, index + wave * (lds._units // self.row), self.row, stamps)

    def complete(self, batch: Batch):
        """Nothing to do: the stamp has the epoch in which the access ended."""

    def outlive_barrier(self, batch: Batch):
        """The access may still happen after the barrier, so it belongs to the new epoch too."""
        rect = self.rect.intersect(batch.rect)
        if rect:
            self.stamp(rect)


class _Dma(_Touch):
    """A write to LDS in flight: data lands, and the place becomes readable, on completion."""

    def __init__(self, lds: Lds, batch: Batch, at, index, row: int, absolute, nbytes: int, data):
        super().__init__(lds, batch, at, index, row, is_write=True)
        self.absolute, self.nbytes, self.data = absolute, nbytes, data

    def stamp_in_flight(self):
        """Mark the place as being written: later than everything."""
        self.stamp(self.rect, _IN_FLIGHT)

    def complete(self, batch: Batch):
        """Land the data of the waves that waited."""
        rect = self.rect.intersect(batch.rect)
        if not rect:
            return
        inside = rect.within(self.rect)
        place(self.lds.words, self.absolute[inside], self.nbytes, self.data[inside])
        if self.lds._races:
            self.stamp(rect)

    def outlive_barrier(self, batch: Batch):
        """Still in flight: the stamp says so already."""
