"""Follows undefined values, from LDS or registers that nothing has written, until one matters.

Software pipelines read a buffer before the branch that decides whether the data counts, and
compilers copy register pairs of which only one half is defined, so the read alone is no defect. It
becomes one when the value reaches memory, an address, a branch or exec. Lanes are followed one by
one; a value is forgotten where a select discards it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from heedful.emulator.program.asm import EXEC, SCC, SGPR, VCC, Instruction, slot_name
from heedful.emulator.program.dataflow import halves
from heedful.emulator.semantics.matrix import spread_lanes

if TYPE_CHECKING:
    from heedful.emulator.machine.state import Batch, Rect
    from heedful.emulator.machine.workgroups import Machine
    from heedful.emulator.program.dataflow import Flow

# Scratch is not among them: spills save what may never be defined.
_SINK = re.compile(r"s_cbranch_\w+|(global|buffer|flat|s)_\w*(load|store|atomic)\w*|ds_\w+")
_CROSSES_LANES = re.compile(r"v_(readlane|readfirstlane|writelane|permlane\w*|swap)_b32|ds_\w+")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an undefined value came from: the kind of finding, in words, and an LDS read if any."""

    kind: str
    words: str
    instruction: Instruction | None


class Taint:
    """Lanes of registers whose value is undefined, and where each came from."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.lanes: dict[int, np.ndarray] = {}
        self.origin: dict[int, Origin] = {}

    def reset(self):
        """Forget everything."""
        self.lanes.clear()
        self.origin.clear()

    def add(self, batch: Batch, at: Instruction, lanes):
        """An LDS read of `batch` gave undefined values in `lanes` (groups, waves, 64)."""
        origin = Origin("lds-uninit", "a value from LDS that nothing has written", at)
        for slot in self.machine.code.loads[at.pc]:
            self._whole(slot)[batch.rect.index] |= lanes
            self.origin[slot] = origin

    def add_register(self, rect: Rect, slot: int):
        """The waves of `rect` are about to read a register that they never wrote."""
        self._whole(slot)[rect.index] = True
        words = f"a value from {slot_name(slot)}, which nothing has written"
        self.origin[slot] = Origin("register-uninit", words, None)

    def _whole(self, slot: int) -> np.ndarray:
        if slot not in self.lanes:
            registers = self.machine.registers
            self.lanes[slot] = np.zeros((registers.groups, registers.waves, 64), bool)
        return self.lanes[slot]

    def before(self, batch: Batch, at: Instruction, flows: Flow):
        """The taint that the next instruction gives its results: None, or lanes and origin."""
        if self.lanes.keys().isdisjoint(flows.reads):
            return None
        rect = batch.rect.index
        found = {s: self.lanes[s][rect] for s in flows.reads if s in self.lanes}
        found = {s: lanes for s, lanes in found.items() if lanes.any()}
        if not found:
            return None
        origin = self.origin[next(iter(found))]
        reached = self._reached(batch, at, found)
        if not reached.any():
            return None
        if _SINK.fullmatch(at.base) or EXEC in flows.writes:
            self._report(batch, at, origin, reached)
            return None
        if parts := halves(at):
            return self._by_halves(batch, parts, found, reached, flows), origin
        return reached, origin

    def _by_halves(self, batch: Batch, parts: dict[int, set[int]], found, reached, flows: Flow):
        """Lanes of each result of an instruction whose halves depend on different registers."""
        lanes = dict.fromkeys(flows.writes - parts.keys(), reached)
        for slot, sources in parts.items():
            marked = [found[s] for s in sources if s in found]
            lanes[slot] = np.any(marked, axis=0) if marked else np.zeros(batch.shape, bool)
        return lanes

    def _report(self, batch: Batch, at: Instruction, origin: Origin, reached):
        active = reached & batch.mask
        if at.mnemonic.startswith("s_") or active.any():
            group, wave, lane = (int(x) for x in np.argwhere(reached)[0])
            message = f"lane {lane} uses {origin.words}"
            place = self.machine.place(batch, group, wave)
            self.machine.sink.add(origin.kind, message, at, origin.instruction, **place)

    def _reached(self, batch: Batch, at: Instruction, found: dict[int, np.ndarray]):
        """Lanes of the result that depend on undefined lanes of the sources."""
        name = at.base

        def of(operand):
            parts = [found[s] for s in operand.slots if s in found]
            return np.any(parts, axis=0) if parts else np.zeros(batch.shape, bool)

        if name == "v_cndmask_b32":
            mask = at.operands[3].slot if len(at.operands) > 3 else VCC
            chosen = np.where(batch.lanes(mask), of(at.operands[2]), of(at.operands[1]))
            for half in (mask, mask + 1):
                chosen = chosen | found[half] if half in found else chosen
            return chosen
        if name.startswith("s_cselect"):
            taken = np.where(batch.scc[..., None], of(at.operands[1]), of(at.operands[2]))
            return taken | found[SCC] if SCC in found else taken
        if name.startswith("v_mfma"):
            m = 32 if "32x32" in name else 16
            return spread_lanes(of(at.operands[1]), of(at.operands[2]), of(at.operands[3]), m)
        together = np.any(list(found.values()), axis=0)
        if _CROSSES_LANES.fullmatch(name) or name.startswith("s_") or at.mods.keys() & {"row_shr"}:
            return np.broadcast_to(together.any(-1, keepdims=True), batch.shape)
        return together

    def after(self, batch: Batch, flows: Flow, outcome, mask):
        """Record the results of an instruction that has run under the lanes `mask`."""
        rect = batch.rect.index
        if outcome is None and not any(s in self.lanes for s in flows.writes):
            return
        clean = np.zeros(batch.shape, bool)
        for slot in flows.writes:
            lanes = outcome[0] if outcome else clean
            if isinstance(lanes, dict):
                lanes = lanes.get(slot, clean)
            if slot >= SGPR:
                lanes_here = np.broadcast_to(lanes.any(-1, keepdims=True), batch.shape)
            else:
                lanes_here = np.where(mask, lanes, self._whole(slot)[rect])
            self._whole(slot)[rect] = lanes_here
            if outcome:
                self.origin[slot] = outcome[1]
            elif not self.lanes[slot].any():
                del self.lanes[slot]
