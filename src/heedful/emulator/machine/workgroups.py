"""Executes a few workgroups together: batches of waves, branches, barriers and the checks made on
the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from heedful.emulator.checks.taint import Taint
from heedful.emulator.clock.trace import Recorder
from heedful.emulator.floats import U32
from heedful.emulator.machine.lds import Lds
from heedful.emulator.machine.memory import GlobalMemory, Scratch
from heedful.emulator.machine.outstanding import Outstanding
from heedful.emulator.machine.schedule import Schedule
from heedful.emulator.machine.state import Batch, Rect, Registers, split
from heedful.emulator.program.asm import slot_name
from heedful.emulator.program.dataflow import is_dma
from heedful.emulator.program.decoder import Code, initially_defined
from heedful.emulator.report import Report, Sink
from heedful.emulator.semantics.control import BARRIER, END


class Machine:
    """A chunk of `groups` workgroups; `run` may be called again for the next chunk.

    Workgroups that are copies of one (see `schedule`) lie next to each other. A wave here means a
    place in which the schedule has put a wave; `place` tells which.

    Attributes:
        memory, lds, scratch: the memories. report, sink: where findings and counts go.
        waiting: batches at a barrier. epoch: barriers passed, by workgroup.
        coordinates: of every workgroup so far; ordinal: where each of the chunk is among them.
        acquired: workgroups of the chunk that have executed an acquire.
    """

    def __init__(
        self,
        code: Code,
        memory: GlobalMemory,
        groups: int,
        waves: int,
        lds_bytes: int,
        sink: Sink,
        schedule: Schedule,
        max_instructions: int,
        recorder: Recorder | None = None,
    ):
        self.code, self.memory, self.sink, self.schedule = code, memory, sink, schedule
        self.report: Report = sink.report
        self.waves, self.max_instructions = waves, max_instructions
        self.recorder = recorder
        self.registers = Registers(groups, waves, code.context.constants)
        program = code.program
        self.lds = Lds(groups, waves, lds_bytes, code.lds_unit(), program.code, sink)
        private = program.directives.get("private_segment_fixed_size", 0)
        self.scratch = Scratch(groups, waves, private, sink)
        self.coordinates: list[tuple[int, int, int]] = []
        self._passes: Counter[tuple[int, int]] = Counter()
        self._defined = initially_defined(program)
        self._check_defined = sink.wants("register-uninit")
        self.taint = Taint(self)

    def run(self, workgroups: Sequence[tuple[int, int, int]], kernarg: int, threads: int):
        """Execute these workgroups from start to end.

        Args:
            workgroups: grid coordinates, each once; no more than the machine has room for.
            kernarg: device address of the argument segment. threads: work-items per workgroup.
        """
        copies = self.schedule.copies(self.waves)
        self.workgroups = [w for w in workgroups for _ in range(copies)]
        count = len(self.workgroups)
        self.copy = np.arange(count) % copies
        self.memory.arenas = self.copy[:, None, None] * self.memory.arena_bytes
        self.ordinal = len(self.coordinates) + np.arange(count) // copies
        self.coordinates += workgroups
        self.acquired = np.zeros(count, bool)
        deal = self.schedule.deal
        self.dealt = np.array(
            [deal(c, w, self.waves) for w in workgroups for c in range(copies)], np.int64
        )
        self.epoch = np.zeros(count, np.int64)
        self._alive = np.full(count, self.waves)
        self._arrived = np.zeros(count, np.int64)
        self.registers.reset()
        self.lds.reset()
        self.taint.reset()
        self._load_initial_registers(kernarg, threads)
        self.ready: list[Batch] = []
        self.waiting: list[Batch] = []
        for rect in self._initial_rects(count):
            batch = self._activate(rect, 0, Outstanding(), [(rect, self._defined)])
            self.ready.append(batch)
        self._executed = 0
        limit = self.max_instructions * count * self.waves
        with np.errstate(all="ignore"):
            while self.ready:
                batch = self.schedule.pick(self.ready)
                self.ready.remove(batch)
                self._advance(batch)
                if self._executed > limit:
                    code = self.code.program.code
                    at = code[min(batch.pc, len(code) - 1)]
                    self.sink.add("limit", f"more than {limit} instructions", at)
                    break
        self.report.barriers += int(self.epoch.sum())

    def count_executed(self):
        """Add to the report how often each instruction was executed."""
        for (start, length), waves in self._passes.items():
            for pc in range(start, start + length):
                self.report.executed[pc] += waves

    def _initial_rects(self, count: int) -> list[Rect]:
        """All waves, cut where the schedule keeps them apart."""
        starts = [0]
        for wave in range(1, self.waves):
            if self.schedule.group_of(wave) != self.schedule.group_of(wave - 1):
                starts.append(wave)
        return [
            Rect(0, count, a, b) for a, b in zip(starts, [*starts[1:], self.waves], strict=True)
        ]

    def _load_initial_registers(self, kernarg: int, threads: int):
        """Kernel arguments' address, workgroup ids, work-item ids and the lanes that exist."""
        fixed, scalars = self.code.program.directives, self.registers.s
        slot = 0
        widths = {"private_segment_buffer": 4, "dispatch_ptr": 2, "queue_ptr": 2}
        widths |= {"kernarg_segment_ptr": 2, "dispatch_id": 2, "flat_scratch_init": 2}
        for name, width in widths.items():
            if fixed.get(f"user_sgpr_{name}"):
                if name == "kernarg_segment_ptr":
                    scalars[..., slot] = kernarg & 0xFFFFFFFF
                    scalars[..., slot + 1] = kernarg >> 32
                slot += width
        self._preload(kernarg, slot)
        slot = fixed.get("user_sgpr_count", slot)
        ids = np.array(self.workgroups, U32)
        for axis, name in enumerate("xyz"):
            if fixed.get(f"system_sgpr_workgroup_id_{name}", int(name == "x")):
                scalars[: len(ids), :, slot] = ids[:, axis, None]
                slot += 1
        item = np.arange(self.waves * 64, dtype=U32).reshape(self.waves, 64)[self.dealt]
        self.registers.v[0, : len(ids)] = item
        alive = np.packbits(item < threads, axis=-1, bitorder="little").view(np.uint64)
        scalars.view(np.uint64)[: len(ids), :, 63] = alive[..., 0]

    def _preload(self, kernarg: int, slot: int):
        """Arguments that the hardware copies to scalar registers before the kernel starts."""
        fixed = self.code.program.directives
        count = fixed.get("user_sgpr_kernarg_preload_length", 0)
        first = fixed.get("user_sgpr_kernarg_preload_offset", 0)
        start = (kernarg - self.memory.base) // 4 + first
        self.registers.s[..., slot : slot + count] = self.memory.words[start : start + count]

    def _activate(self, rect: Rect, pc: int, out: Outstanding, defined) -> Batch:
        """The batch of a rectangle; `defined` may cover more than it."""
        batch = self.registers.batch(rect)
        batch.pc, batch.out, batch.machine = pc, out, self
        parts = [(rect.intersect(part), bits) for part, bits in defined]
        batch.defined = [(part, bits) for part, bits in parts if part]
        if len({bits for _, bits in batch.defined}) == 1:
            batch.defined = [(rect, batch.defined[0][1])]
        batch.refresh_exec()
        return batch

    def place(self, batch: Batch, group: int, wave: int) -> dict:
        """Where in the grid a wave of a batch is, as Finding's fields."""
        g = batch.rect.g0 + group
        return {
            "workgroup": self.workgroups[g],
            "wave": int(self.dealt[g, batch.rect.w0 + wave]),
            "epoch": int(self.epoch[g]),
            "schedule": self.schedule.copy_name(int(self.copy[g])),
        }

    def _advance(self, batch: Batch):
        """Run a batch to the end of its block or quantum, then see where its waves go."""
        block = self.code.block(batch.pc)
        steps = block.taken(self.schedule.quantum(block.stop - block.start))
        self._check_definitions(batch, block)
        outcome = self._execute(batch, steps)
        size = batch.rect.size
        self._executed += len(steps) * size
        self.report.instructions += len(steps) * size
        self._passes[block.start, len(steps)] += size
        if self.recorder:
            self._record(batch.rect, block.start, len(steps))
        batch.pc += len(steps)
        if not steps[-1].control:
            self._resume([batch])
        elif outcome is BARRIER:
            self._arrive(batch)
        elif outcome is END:
            self._finish(batch)
        else:
            self._branch(batch, steps[-1].instruction, outcome)

    def _record(self, rect: Rect, start: int, count: int):
        assert self.recorder
        for g in range(rect.g0, rect.g1):
            for w in range(rect.w0, rect.w1):
                wave = int(self.dealt[g, w])
                self.recorder.passed(self.workgroups[g], wave, start, count)

    def _execute(self, batch: Batch, steps):
        """Execute instructions; returns what the last one says."""
        pending, tainted, outcome = batch.out.slots, self.taint.lanes, None
        for step in steps:
            if pending and not pending.isdisjoint(step.ready):
                self._report_wait(batch, step)
            outcome = self._follow(batch, step) if tainted else step.run(batch)
        return outcome

    def _follow(self, batch: Batch, step):
        """Execute an instruction while undefined values are about."""
        flows = self.code.flows[step.instruction.pc]
        reached = self.taint.before(batch, step.instruction, flows)
        mask = True if step.instruction.base.startswith("v_mfma") else batch.mask
        fresh = self.code.loads[step.instruction.pc]
        if fresh:  # what a load brings is known after it
            self.taint.after(batch, flows, None, mask)
        outcome = step.run(batch)
        if not fresh:
            self.taint.after(batch, flows, reached, mask)
        return outcome

    def _report_wait(self, batch: Batch, step):
        early = step.ready & batch.out.slots
        producer = batch.out.culprit(early)
        names = ", ".join(slot_name(s) for s in sorted(early))
        message = f"{names} still being loaded (missing or loose s_waitcnt)"
        at = step.instruction
        self.sink.add("waitcnt", message, at, producer, **self.place(batch, 0, 0))

    def _check_definitions(self, batch: Batch, block):
        for rect, bits in batch.defined:
            missing = block.needs & ~bits
            while missing and self._check_defined:
                slot = missing.bit_length() - 1
                missing ^= 1 << slot
                self.taint.add_register(rect, slot)
        new = block.defines | block.needs  # what was missing is followed from here on
        batch.defined = [(rect, bits | new) for rect, bits in batch.defined]

    def _branch(self, batch: Batch, instruction, flags):
        """Send the waves whose flag is set to the target, the others on."""
        target = self.code.program.target(instruction)
        if flags.all():
            batch.pc = target
            self._resume([batch])
        elif not flags.any():
            self._resume([batch])
        else:
            parts = []
            for rect, taken in split(batch.rect, flags):
                pc = target if taken else batch.pc
                parts.append(self._activate(rect, pc, batch.out.clone(), batch.defined))
            self._resume(parts)

    def _resume(self, batches: list[Batch]):
        """Make batches ready, merging those that stand at the same place in the same state."""
        for batch in batches:
            self.ready.append(self._merge(batch))

    def _merge(self, batch: Batch) -> Batch:
        for other in self.ready:
            if other.pc != batch.pc or other.out.key() != batch.out.key():
                continue
            rect = other.rect.join(batch.rect)
            groups = {self.schedule.group_of(w) for w in (other.rect.w0, batch.rect.w0)}
            if rect is None or len(groups) > 1:
                continue
            self.ready.remove(other)
            out = other.out
            out.absorb(batch.out)
            merged = self._activate(rect, batch.pc, out, batch.defined + other.defined)
            return self._merge(merged)
        return batch

    def _arrive(self, batch: Batch):
        """A batch meets a barrier."""
        rect = batch.rect
        self._arrived[rect.g0 : rect.g1] += rect.w1 - rect.w0
        self.waiting.append(batch)
        self._release()

    def _finish(self, batch: Batch):
        """The waves of a batch end; a barrier no longer counts them."""
        self._check_in_flight(batch)
        rect = batch.rect
        self._alive[rect.g0 : rect.g1] -= rect.w1 - rect.w0
        self._release()

    def _check_in_flight(self, batch: Batch):
        """A load straight to LDS must have landed before its wave ends: the place may be another
        workgroup's by then."""
        for entry in batch.out.vm:
            if is_dma(entry.instruction):
                message = "a load to LDS is in flight when its wave ends"
                self.sink.add("lds-race", message, entry.instruction, **self.place(batch, 0, 0))

    def _release(self):
        """Let workgroups go on whose living waves have all arrived."""
        open_groups = (self._arrived == self._alive) & (self._arrived > 0)
        if not open_groups.any():
            return
        self._check_divergence(open_groups)
        self._arrived[open_groups] = 0
        self.epoch[open_groups] += 1
        self.lds.pass_barrier(np.flatnonzero(open_groups))
        waiting, self.waiting = self.waiting, []
        for batch in waiting:
            rect = batch.rect
            flags = np.repeat(open_groups[rect.g0 : rect.g1, None], rect.w1 - rect.w0, axis=1)
            for part, opened in split(rect, flags):
                whole = part == rect
                out = batch.out if whole else batch.out.clone()
                piece = batch if whole else self._activate(part, batch.pc, out, batch.defined)
                if opened:
                    piece.out.barrier(piece)
                    self._resume([piece])
                else:
                    self.waiting.append(piece)

    def _check_divergence(self, open_groups):
        """A barrier that some waves of the workgroup will never meet, since they have ended."""
        short = open_groups & (self._alive < self.waves)
        if short.any():
            g = int(np.flatnonzero(short)[0])
            batch = next(b for b in self.waiting if b.rect.g0 <= g < b.rect.g1)
            ended = self.waves - int(self._alive[g])
            message = f"{ended} of {self.waves} waves ended before this barrier"
            at = self.code.program.code[batch.pc - 1]
            self.sink.add("barrier", message, at, **self.place(batch, g - batch.rect.g0, 0))
