"""Registers of all waves of a few workgroups, and the views through which a batch of waves
executes.

Every array has the axes (workgroup, wave, lane) last, so a rectangle of waves (a range of
workgroups times a range of waves) is a view, and one NumPy call executes an instruction for the
whole rectangle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from heedful.emulator.floats import F32, U8, U32, U64
from heedful.emulator.machine.outstanding import Entry, Outstanding
from heedful.emulator.program.asm import EXEC, FIRST_CONSTANT, SGPR, Instruction, Operand

if TYPE_CHECKING:
    from heedful.emulator.machine.workgroups import Machine

LANES = 64
ALL_LANES = (1 << 64) - 1
# The value of a register before anything is written to it: a NaN in every format.
POISON = 0xFFFFDEAD


@dataclass(frozen=True, slots=True)
class Rect:
    """Workgroups [g0, g1) times waves [w0, w1)."""

    g0: int
    g1: int
    w0: int
    w1: int

    @property
    def size(self) -> int:
        """How many waves the rectangle holds."""
        return (self.g1 - self.g0) * (self.w1 - self.w0)

    @property
    def index(self) -> tuple[slice, slice]:
        """The slices that select the rectangle."""
        return slice(self.g0, self.g1), slice(self.w0, self.w1)

    def intersect(self, other: Rect) -> Rect | None:
        """The waves in both, or None."""
        g0, g1 = max(self.g0, other.g0), min(self.g1, other.g1)
        w0, w1 = max(self.w0, other.w0), min(self.w1, other.w1)
        return Rect(g0, g1, w0, w1) if g0 < g1 and w0 < w1 else None

    def within(self, outer: Rect) -> tuple[slice, slice]:
        """The slices that select this rectangle out of arrays over `outer`."""
        return (
            slice(self.g0 - outer.g0, self.g1 - outer.g0),
            slice(self.w0 - outer.w0, self.w1 - outer.w0),
        )

    def join(self, other: Rect) -> Rect | None:
        """The union where it is a rectangle, else None."""
        if (self.g0, self.g1) == (other.g0, other.g1):
            if self.w1 == other.w0 or other.w1 == self.w0:
                return Rect(self.g0, self.g1, min(self.w0, other.w0), max(self.w1, other.w1))
        elif (self.w0, self.w1) == (other.w0, other.w1) and (
            self.g1 == other.g0 or other.g1 == self.g0
        ):
            return Rect(min(self.g0, other.g0), max(self.g1, other.g1), self.w0, self.w1)
        return None


def _runs(flags) -> list[tuple[int, int, bool]]:
    """Maximal runs of equal values of a 1-D boolean array, as (start, stop, value)."""
    edges = np.flatnonzero(flags[1:] != flags[:-1]) + 1
    bounds = [0, *edges.tolist(), len(flags)]
    return [(a, b, bool(flags[a])) for a, b in zip(bounds, bounds[1:], strict=False)]


def split(rect: Rect, flags) -> list[tuple[Rect, bool]]:
    """Cut a rectangle into rectangles on which the (workgroup, wave) flags are constant."""
    if (flags == flags[:, :1]).all():
        rows = _runs(flags[:, 0])
        return [(Rect(rect.g0 + a, rect.g0 + b, rect.w0, rect.w1), v) for a, b, v in rows]
    if (flags == flags[:1]).all():
        columns = _runs(flags[0])
        return [(Rect(rect.g0, rect.g1, rect.w0 + a, rect.w0 + b), v) for a, b, v in columns]
    parts = []
    for i in range(rect.g1 - rect.g0):
        row = Rect(rect.g0 + i, rect.g0 + i + 1, rect.w0, rect.w1)
        parts += split(row, flags[i : i + 1])
    return parts


class Constants:
    """The constants of a program; each has a slot after those of the registers."""

    def __init__(self):
        self.u: list = []
        self.f: list = []
        self.s64: list = []
        self._slots: dict[tuple[int, int], int] = {}

    def slot(self, operand: Operand) -> int:
        """The slot of a constant operand, its source modifiers not applied."""
        narrow, wide = operand.bits(32), operand.bits(64)
        key = (narrow, wide)
        if key not in self._slots:
            self._slots[key] = FIRST_CONSTANT + len(self.u)
            self.u.append(U32(narrow))
            self.f.append(U32(narrow).view(F32))
            self.s64.append(U64(wide))
        return self._slots[key]


class Registers:
    """Storage for the registers of `groups` workgroups of `waves` waves each."""

    def __init__(self, groups: int, waves: int, constants: Constants):
        self.groups, self.waves, self.constants = groups, waves, constants
        self.v = np.empty((512, groups, waves, LANES), U32)
        self.s = np.empty((groups, waves, 128), U32)
        self.scc = np.zeros((groups, waves), bool)
        self.mode = np.zeros((groups, waves), U32)
        self._views: dict[Rect, Batch] = {}

    def reset(self):
        """Poison every register and enable all lanes."""
        self.v.fill(POISON)
        self.s.fill(POISON)
        self.s[..., EXEC - SGPR : EXEC - SGPR + 2] = 0xFFFFFFFF
        self.scc.fill(False)
        self.mode.fill(0)

    def batch(self, rect: Rect) -> Batch:
        """The batch of one rectangle; its views stay valid as long as the storage lives."""
        if rect not in self._views:
            self._views[rect] = Batch(self, rect)
        return self._views[rect]


class _Views(dict):
    """One view of the registers by slot, each made when it is first asked for."""

    def __init__(self, vector, scalar: Callable[[int], Any], constants: list):
        super().__init__()
        self._vector, self._scalar, self._constants = vector, scalar, constants

    def __missing__(self, slot: int):
        if slot >= FIRST_CONSTANT:
            view = self._constants[slot - FIRST_CONSTANT]
        else:
            view = self._scalar(slot) if slot >= SGPR else self._vector[slot]
        self[slot] = view
        return view


class Batch:
    """A rectangle of waves at one pc: its register views, indexed by slot, and how far it has come.

    Attributes:
        u, f: (groups, waves, 64) as uint32 and float32; scalar registers have one lane, which
            broadcasts; constants are NumPy scalars.
        s: scalar registers as (groups, waves) uint32. s64: register pairs as uint64.
        b: the 8 bytes of a register pair, from which lane masks unpack.
        vec, vecf: the whole vector file, (512, groups, waves, 64).
        mask: lanes enabled by exec. where: the same, or True if all are; full: whether all are.
        pc: the next instruction. out: memory operations in flight.
        defined: bit sets of the slots written so far, for each part of the rectangle.
        machine: what the batch runs on (memory, LDS, scratch, findings).
    """

    pc: int
    out: Outstanding
    defined: list[tuple[Rect, int]]
    machine: Machine

    def __init__(self, registers: Registers, rect: Rect):
        g, w = rect.index
        constants = registers.constants
        self.rect = rect
        self.shape = (rect.g1 - rect.g0, rect.w1 - rect.w0, LANES)
        self.vec = vec = registers.v[:, g, w]
        self.vecf = vecf = vec.view(F32)
        self.scc = registers.scc[g, w]
        self.mode = registers.mode[g, w]
        scalars = registers.s[g, w]
        pairs = registers.s.view(U64)[g, w]
        octets = registers.s.view(U8)[g, w]

        def lane(slot: int):
            return scalars[..., slot - SGPR : slot - SGPR + 1]

        self.s = _Views(None, lambda slot: scalars[..., slot - SGPR], constants.u)
        self.s64 = _Views(None, lambda slot: pairs[..., slot - SGPR >> 1], constants.s64)
        self.b = _Views(None, lambda slot: octets[..., 4 * (slot - SGPR) :][..., :8], [])
        self.u = _Views(vec, lane, constants.u)
        self.f = _Views(vecf, lambda slot: lane(slot).view(F32), constants.f)
        self.mask = np.ones(self.shape, bool)
        self.where: object = True
        self.full = True

    def refresh_exec(self):
        """Unpack exec into lanes."""
        self.full = bool((self.s64[EXEC] == U64(ALL_LANES)).all())
        self.mask = self.lanes(EXEC)
        self.where = True if self.full else self.mask

    def lanes(self, slot: int):
        """The lane mask that a register pair holds, as bool (groups, waves, 64)."""
        return np.unpackbits(self.b[slot], axis=-1, bitorder="little").view(bool)

    def set_lanes(self, slot: int, flags):
        """Write a lane mask to a register pair; lanes that exec disables become 0."""
        if np.shape(flags) != self.shape:
            flags = np.broadcast_to(flags, self.shape)
        packed = np.packbits(flags, axis=-1, bitorder="little")
        self.s64[slot][...] = packed.view(U64)[..., 0] & self.s64[EXEC]

    def issue_vm(self, instruction: Instruction, effects: tuple = ()):
        """A vector memory operation is in flight."""
        self._issue(self.out.vm, instruction, effects)

    def issue_lds(self, instruction: Instruction, effects: tuple = ()):
        """An LDS operation is in flight."""
        self._issue(self.out.lds, instruction, effects)

    def issue_smem(self, instruction: Instruction):
        """A scalar load is in flight."""
        self._issue(self.out.smem, instruction, ())

    def _issue(self, queue: list, instruction: Instruction, effects: tuple):
        slots = self.machine.code.loads[instruction.pc]
        if not self.out.slots.isdisjoint(slots):
            self._check_overtaking(queue, instruction, slots)
        self.out.issue(queue, Entry(instruction, slots, effects))

    def _check_overtaking(self, queue: list, instruction: Instruction, slots: frozenset[int]):
        """Two loads into one register return in order only if they are of one queue."""
        out = self.out
        for other in (out.vm, out.lds, out.smem):
            if other is queue and other is not out.smem:
                continue
            for entry in other:
                if entry.slots & slots:
                    self.machine.sink.add(
                        "waitcnt",
                        "loads into a register that another kind of load is still writing",
                        instruction,
                        entry.instruction,
                        **self.machine.place(self, 0, 0),
                    )
