"""Memory operations in flight for one batch of waves, and which of them each s_waitcnt completes.

Vector memory operations return in the order of issue, as do LDS operations; scalar loads return in
any order, so only lgkmcnt(0) completes them. Loads write their registers at issue here; what is
tracked is that nobody may look yet. Data that travels to LDS without a register (DMA) does land
late, at the latest legal time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from heedful.emulator.machine.state import Batch
    from heedful.emulator.program.asm import Instruction


class Effect(Protocol):
    """The effect of an operation in flight on LDS; it covers a rectangle of waves."""

    def complete(self, batch: Batch):
        """The waves of `batch` have waited for the operation."""
        ...

    def outlive_barrier(self, batch: Batch):
        """The waves of `batch` have passed a barrier without waiting for the operation."""
        ...


@dataclass(slots=True)
class Entry:
    """One operation in flight: its registers and its effects on LDS."""

    instruction: Instruction
    slots: frozenset[int]
    effects: tuple[Effect, ...] = field(default=())


class Outstanding:
    """The three queues of one batch; all its waves have executed the same way, so they share."""

    __slots__ = ("vm", "lds", "smem", "slots", "_key")

    def __init__(self):
        self.vm: list[Entry] = []
        self.lds: list[Entry] = []
        self.smem: list[Entry] = []
        self.slots: set[int] = set()
        self._key: tuple | None = None

    def clone(self) -> Outstanding:
        """An equal state that changes on its own."""
        other = Outstanding()
        other.vm, other.lds, other.smem = list(self.vm), list(self.lds), list(self.smem)
        other.slots = set(self.slots)
        return other

    def key(self) -> tuple:
        """Batches may merge if and only if their keys are equal."""
        if self._key is None:
            queues = (self.vm, self.lds, self.smem)
            self._key = tuple(tuple([e.instruction.pc for e in queue]) for queue in queues)
        return self._key

    def absorb(self, other: Outstanding):
        """Merge with a state of the same key: an operation now covers the waves of both."""
        for mine, theirs in ((self.vm, other.vm), (self.lds, other.lds)):
            for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                extra = tuple(e for e in b.effects if all(e is not x for x in a.effects))
                if extra:
                    mine[i] = Entry(a.instruction, a.slots, a.effects + extra)

    def issue(self, queue: list[Entry], entry: Entry):
        """Add an operation to one of the queues."""
        self._key = None
        queue.append(entry)
        self.slots |= entry.slots

    def wait(self, batch: Batch, vm: int | None, lgkm: int | None):
        """Complete what an s_waitcnt with these counters guarantees complete."""
        self._key = None
        if vm is not None:
            self._retire(batch, self.vm, vm)
        if lgkm is not None:
            # With scalar loads about, n outstanding may be any n: LDS operations beyond the last
            # n are done, a scalar load is only known to be done at zero.
            self._retire(batch, self.lds, lgkm)
            if lgkm == 0:
                self.smem.clear()
        self.slots.clear()
        for queue in (self.vm, self.lds, self.smem):
            for entry in queue:
                self.slots |= entry.slots

    @staticmethod
    def _retire(batch: Batch, queue: list[Entry], keep: int):
        done = len(queue) - keep
        if done <= 0:
            return
        for entry in queue[:done]:
            for effect in entry.effects:
                effect.complete(batch)
        del queue[:done]

    def barrier(self, batch: Batch):
        """The batch passed a barrier with these operations still in flight."""
        for queue in (self.vm, self.lds):
            for entry in queue:
                for effect in entry.effects:
                    effect.outlive_barrier(batch)

    def culprit(self, slots: frozenset[int]) -> Instruction | None:
        """The newest operation in flight that writes one of these slots."""
        for queue in (self.vm, self.lds, self.smem):
            for entry in reversed(queue):
                if entry.slots & slots:
                    return entry.instruction
        return None
