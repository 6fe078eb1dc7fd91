"""Which batch of waves runs next, and which waves may share a batch.

The hardware promises nothing about the speed of one wave against another between barriers. So a
kernel must be right under every schedule, and each class here is one way to pick among the allowed
interleavings.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heedful.emulator.state import Batch


class Schedule:
    """Lockstep: waves that are at the same place move together; those furthest behind go first.

    The fastest schedule, since a whole workgroup executes an instruction in one call.
    """

    name = "lockstep"

    def group_of(self, wave: int) -> int:
        """Waves of different groups never share a batch."""
        return 0

    def pick(self, ready: list[Batch]) -> Batch:
        """The batch to run next."""
        return min(ready, key=lambda b: b.pc)

    def quantum(self) -> int | None:
        """Instructions to run before picking again; None: to the end of the block."""
        return None


class RoundRobin(Schedule):
    """One wave after the other, each until it meets a barrier."""

    name = "round-robin"

    def group_of(self, wave: int) -> int:
        return wave

    def pick(self, ready: list[Batch]) -> Batch:
        return min(ready, key=lambda b: (b.rect.w0, b.rect.g0))


class Random(Schedule):
    """A random wave for a random number of instructions, reproducible by seed."""

    def __init__(self, seed: int = 0, longest: int = 200):
        self.name = f"random:{seed}"
        self._random, self._longest = random.Random(seed), longest

    def group_of(self, wave: int) -> int:
        return wave

    def pick(self, ready: list[Batch]) -> Batch:
        return self._random.choice(ready)

    def quantum(self) -> int | None:
        return self._random.randint(1, self._longest)


class Delay(Schedule):
    """Adversarial: these waves move only when no other can, as late as barriers allow."""

    def __init__(self, waves: Iterable[int]):
        self.waves = frozenset(waves)
        self.name = "delay:" + ",".join(map(str, sorted(self.waves)))

    def group_of(self, wave: int) -> int:
        return int(wave in self.waves)

    def pick(self, ready: list[Batch]) -> Batch:
        return min(ready, key=lambda b: (b.rect.w0 in self.waves, b.pc))


def parse_schedule(text: str | Schedule) -> Schedule:
    """A schedule from its name: lockstep, round-robin, random:SEED or delay:WAVE,WAVE-WAVE."""
    if isinstance(text, Schedule):
        return text
    name, _, rest = text.partition(":")
    if name == "lockstep":
        return Schedule()
    if name == "round-robin":
        return RoundRobin()
    if name == "random":
        return Random(int(rest or 0))
    if name == "delay" and rest:
        waves: set[int] = set()
        for part in rest.split(","):
            first, _, last = part.partition("-")
            waves |= set(range(int(first), int(last or first) + 1))
        return Delay(waves)
    raise ValueError(
        f"schedule must be lockstep, round-robin, random:SEED or delay:WAVES, got {text!r}"
    )
