"""Global memory (one arena with guard gaps between buffers) and per-lane scratch."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from heedful.emulator.floats import I64, U8, U32, U64

if TYPE_CHECKING:
    from heedful.emulator.checks.races import GlobalRaces
    from heedful.emulator.machine.state import Batch
    from heedful.emulator.program.asm import Instruction
    from heedful.emulator.report import Sink

BASE = 0x7000_0000_0000
_GUARD = 4096
# Lanes that access nothing read from here, and write to GlobalMemory.TRASH.
_ZEROS = 0
_LOG2 = {4: 2, 8: 3, 16: 4}


def pick(words, offset, nbytes: int):
    """Read `nbytes` (1, 2 or a multiple of 4) at each byte offset.

    Args:
        words: flat uint32 array. offset: int64 byte offsets, any shape.

    Returns:
        uint32 of shape (*offset.shape, max(nbytes // 4, 1)); 1 and 2 bytes are zero-extended.
    """
    if nbytes >= 4:
        count = nbytes // 4
        if count in (1, 2, 4) and not (offset & (nbytes - 1)).any():
            return words.reshape(-1, count).take(offset >> _LOG2[nbytes], axis=0)
        if not (offset & 3).any():
            return words.take((offset >> 2)[..., None] + np.arange(count))
    octets = words.view(U8).take(offset[..., None] + np.arange(nbytes))
    if nbytes >= 4:
        return np.ascontiguousarray(octets).view(U32)
    wide = octets.astype(U32)
    return wide if nbytes == 1 else wide[..., :1] | (wide[..., 1:] << U32(8))


def place(words, offset, nbytes: int, data):
    """Write what `pick` reads: `data` is uint32 of shape (*offset.shape, max(nbytes // 4, 1))."""
    if nbytes >= 4:
        count = nbytes // 4
        if count in (1, 2, 4) and not (offset & (nbytes - 1)).any():
            words.reshape(-1, count)[offset >> _LOG2[nbytes]] = data
            return
        if not (offset & 3).any():
            words[(offset >> 2)[..., None] + np.arange(count)] = data
            return
    octets = np.ascontiguousarray(data).view(U8)[..., :nbytes]
    words.view(U8)[offset[..., None] + np.arange(nbytes)] = octets


def atomically(words, offset, nbytes: int, operation, data):
    """Read-modify-write at flat byte offsets, one lane after the other; returns the old values.

    Lanes with distinct places go together; each further round takes the lanes that had to wait.
    """
    old = np.zeros((len(offset), nbytes // 4), U32)
    todo = np.arange(len(offset))
    while len(todo):
        _, first = np.unique(offset[todo], return_index=True)
        now = todo[np.sort(first)]
        old[now] = pick(words, offset[now], nbytes)
        place(words, offset[now], nbytes, operation(old[now], data[now]))
        todo = np.setdiff1d(todo, now, assume_unique=True)
    return old


class GlobalMemory:
    """All buffers of a launch, copied in by `begin` and out by `copy_back`.

    The arena exists once per copy of the launch, at the same device addresses; the machine says in
    `arenas`, (groups, 1, 1), where that of each workgroup starts.
    """

    TRASH = 256
    base = BASE

    def __init__(self, sink: Sink):
        self.sink = sink
        self.arrays: list[np.ndarray] = []
        self.names: list[str] = []
        self.starts: list[int] = []
        self._end = _GUARD
        self.words = self._fresh = np.zeros(0, U32)
        self.arenas = np.zeros((1, 1, 1), I64)
        self.races: GlobalRaces | None = None
        self._recent: dict[int, tuple[int, int]] = {}
        self._known: dict[tuple[int, int], int] = {}

    def add(self, array: np.ndarray, name: str) -> int:
        """Register a buffer and return its device address; the same memory is one buffer."""
        place = (array.__array_interface__["data"][0], array.nbytes)
        if array.nbytes and place in self._known:
            return self._known[place]
        self.starts.append(self._end)
        self.arrays.append(array)
        self.names.append(name)
        self._end += -(-array.nbytes // 256) * 256 + _GUARD
        self._known[place] = BASE + self.starts[-1]
        return self._known[place]

    def begin(self, copies: int = 1):
        """Build so many copies of the arena from the buffers as they were at the first call."""
        if not len(self._fresh):
            self._fresh = np.zeros(-(-self._end // 256) * 64, U32)
            octets = self._fresh.view(U8)
            for start, array in zip(self.starts, self.arrays, strict=True):
                flat = np.ascontiguousarray(array).reshape(-1).view(U8)
                octets[start : start + array.nbytes] = flat
        self.words = np.tile(self._fresh, copies)

    def arena(self, copy: int) -> np.ndarray:
        """One copy, as words."""
        return self.words.reshape(-1, len(self._fresh))[copy]

    @property
    def arena_bytes(self) -> int:
        """The size of one copy."""
        return self._fresh.nbytes

    def copy_back(self, skip: Collection[int] = ()):
        """Write the first arena back into the callers' arrays."""
        octets = self.words.view(U8)
        for i, (start, array) in enumerate(zip(self.starts, self.arrays, strict=True)):
            if i not in skip and array.flags.writeable:
                data = octets[start : start + array.nbytes].copy().view(array.dtype)
                array[...] = data.reshape(array.shape)

    def first_difference(self, one, other) -> str:
        """Where two arenas differ within a buffer, in words; empty if they are equal."""
        if np.array_equal(one, other):
            return ""
        for start, array, name in zip(self.starts, self.arrays, self.names, strict=True):
            place = slice(start, start + array.nbytes)
            differs = one.view(U8)[place] != other.view(U8)[place]
            if differs.any():
                return f"byte {int(differs.argmax())} of {name}"
        return ""

    def locate(self, batch: Batch, at: Instruction, address, nbytes: int, active, fallback: int):
        """Arena offsets of addresses; inactive lanes and those in no buffer get `fallback`."""
        offset = (address - U64(BASE)).view(I64)
        low, high = self._recent.get(at.pc, (0, 0))
        outside = ((offset < low) | (offset > high - nbytes)) & active
        if outside.any():
            outside = self._examine(batch, at, offset, nbytes, active)
        if not (active is True and not outside.any()):
            offset = np.where(active & ~outside, offset, fallback)
        if len(self.words) == len(self._fresh):
            return offset
        return offset + self.arenas[batch.rect.g0 : batch.rect.g1]

    def _examine(self, batch: Batch, at: Instruction, offset, nbytes: int, active):
        """Report lanes that hit no buffer, and remember the buffer hit for the next time."""
        starts = np.array(self.starts)
        sizes = np.array([a.nbytes for a in self.arrays])
        index = np.searchsorted(starts, offset, side="right") - 1
        known = np.maximum(index, 0)
        inside = (index >= 0) & (offset + nbytes <= starts[known] + sizes[known])
        outside = np.broadcast_to(~inside & active, batch.shape)
        hit = np.broadcast_to(inside & active, batch.shape)
        if hit.any():
            i = int(known[hit][0])
            self._recent[at.pc] = (self.starts[i], self.starts[i] + self.arrays[i].nbytes)
        if outside.any():
            self._report(batch, at, offset, nbytes, outside)
        return outside

    def _report(self, batch: Batch, at: Instruction, offset, nbytes: int, outside):
        group, wave, lane = (int(x) for x in np.argwhere(outside)[0])
        byte = int(offset[group, wave, lane])
        nearest = min(
            range(len(self.starts)),
            key=lambda i: max(
                self.starts[i] - byte, byte - self.starts[i] - self.arrays[i].nbytes, 0
            ),
        )
        lanes = int(np.count_nonzero(outside[group, wave]))
        message = (
            f"{lanes} lanes access {nbytes} bytes outside every buffer; lane {lane} at byte "
            f"{byte - self.starts[nearest]} of {self.names[nearest]}, "
            f"which has {self.arrays[nearest].nbytes}"
        )
        self.sink.add("global-bounds", message, at, **batch.machine.place(batch, group, wave))

    def live(self, batch: Batch, offset):
        """Lanes, (groups, waves, 64, 1), whose located offset is not where idle lanes go."""
        local = offset - self.arenas[batch.rect.g0 : batch.rect.g1]
        return (local >= _GUARD)[..., None]

    def describe(self, byte: int) -> str:
        """A byte of the arenas in words."""
        byte %= self.arena_bytes
        i = int(np.searchsorted(self.starts, byte, side="right")) - 1
        return f"byte {byte - self.starts[i]} of {self.names[i]}"

    def load(self, batch: Batch, at: Instruction, address, nbytes: int, active):
        """Read from global memory; inactive lanes read 0. Data as `pick` gives it, and effects."""
        offset = self.locate(batch, at, address, nbytes, active, _ZEROS)
        effects = self.races.read(batch, at, offset, nbytes) if self.races else ()
        return pick(self.words, offset, nbytes), effects

    def load_scalar(self, batch: Batch, at: Instruction, address, nbytes: int):
        """Read consecutive dwords at one address (groups, waves, 1) per wave."""
        lanes = np.broadcast_to(address, batch.shape)
        offset = self.locate(batch, at, lanes, nbytes, True, _ZEROS)[..., 0]
        if self.races:
            self.races.read(batch, at, offset[..., None], nbytes)
        return self.words.take((offset >> 2)[..., None] + np.arange(nbytes // 4))

    def store(self, batch: Batch, at: Instruction, address, nbytes: int, active, data):
        """Write to global memory where active; returns the effects."""
        offset = self.locate(batch, at, address, nbytes, active, self.TRASH)
        if not self.races:
            place(self.words, offset, nbytes, data)
            return ()
        if nbytes < 4:  # the rest of the register does not go to memory
            data = data & U32((1 << 8 * nbytes) - 1)
        offset = np.broadcast_to(offset, batch.shape)

        def changes():
            return (pick(self.words, offset, nbytes) != data).any(-1, keepdims=True)

        effects = self.races.write(batch, at, offset, nbytes, changes)
        place(self.words, offset, nbytes, data)
        self.races.settled(batch, at, offset, nbytes, changes)
        return effects

    def update(self, batch: Batch, at: Instruction, address, nbytes: int, active, operation, data):
        """Atomic read-modify-write, lane after lane; returns the old values, 0 where inactive.

        Atomics do not race with each other. They are looked at as reads: a plain write by another
        workgroup is found.
        """
        offset = self.locate(batch, at, address, nbytes, active, self.TRASH)
        offset = np.broadcast_to(offset, batch.shape)
        if self.races:
            self.races.read(batch, at, offset, nbytes)
        lanes = np.broadcast_to(active, batch.shape)
        old = np.zeros((*batch.shape, nbytes // 4), U32)
        old[lanes] = atomically(
            self.words, offset[lanes], nbytes, operation, np.ascontiguousarray(data[lanes])
        )
        return old


class Scratch:
    """Per-lane private memory: one dword array per (workgroup, wave, lane)."""

    def __init__(self, groups: int, waves: int, nbytes: int, sink: Sink):
        self.nbytes, self.sink = nbytes, sink
        self.words = np.zeros((-(-nbytes // 4), groups, waves, 64), U32)

    def rows(self, batch: Batch, at: Instruction, offset, count: int):
        """Row numbers for `count` dwords at a per-lane byte offset, checked against the size."""
        offset = np.asarray(offset)
        if (((offset < 0) | (offset + 4 * count > self.nbytes)) & batch.mask).any():
            message = f"scratch access outside the {self.nbytes} bytes of each lane"
            self.sink.add("global-bounds", message, at, **batch.machine.place(batch, 0, 0))
            offset = np.clip(offset, 0, max(self.nbytes - 4 * count, 0))
        return offset >> 2
