"""Which batch of waves runs next, and which waves may share a batch.

The hardware promises nothing about the speed of one wave against another between barriers. So a
kernel must be right under every schedule, and each class here is one way to pick among the allowed
interleavings.

A schedule speaks of the places of a workgroup, 0 to waves - 1, in which waves sit. Most have wave i
at place i. Others run several copies of the launch side by side, each with memory of its own and
its waves dealt to other places: one turn of a place then moves other waves in every copy, at the
cost of one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heedful.emulator.machine.state import Batch


class Schedule:
    """Lockstep: waves that are equally far move together; those furthest behind go first.

    The fastest schedule, since a whole workgroup executes an instruction in one call.
    """

    name = "lockstep"

    def rounds(self, waves: int) -> list[Schedule]:
        """The schedules to run one after the other for workgroups of so many waves."""
        return [self]

    def copies(self, waves: int) -> int:
        """How many copies of the launch run side by side."""
        return 1

    def copy_name(self, copy: int) -> str:
        """The name of a copy's order of the waves."""
        return self.name

    def deal(self, copy: int, workgroup: Sequence[int], waves: int) -> Sequence[int]:
        """The wave at each place of a workgroup."""
        return range(waves)

    def group_of(self, place: int) -> int:
        """Places of different groups never share a batch."""
        return 0

    def pick(self, ready: list[Batch]) -> Batch:
        """The batch to run next."""
        return min(ready, key=lambda b: b.pc)

    def quantum(self, length: int) -> int:
        """How many of the `length` instructions left of a block to run before picking again."""
        return length


class RoundRobin(Schedule):
    """One wave after the other, each until it meets a barrier."""

    name = "round-robin"

    def group_of(self, place: int) -> int:
        return place

    def pick(self, ready: list[Batch]) -> Batch:
        return min(ready, key=lambda b: (b.rect.w0, b.rect.g0))


class Random(Schedule):
    """A random wave for a random number of instructions, reproducible by seed."""

    def __init__(self, seed: int = 0, longest: int = 200):
        self.name = f"random:{seed}"
        self._random, self._longest = random.Random(seed), longest

    def group_of(self, place: int) -> int:
        return place

    def pick(self, ready: list[Batch]) -> Batch:
        return self._random.choice(ready)

    def quantum(self, length: int) -> int:
        return min(length, self._random.randint(1, self._longest))


class Dealt(Random):
    """Random schedules of several seeds at once: places take turns at random, and each copy and
    workgroup has its waves in another order.

    Workgroups with fewer orders than there are seeds take several rounds, each with other turns.
    """

    def __init__(self, seeds: Sequence[int]):
        super().__init__(seeds[0])
        self.seeds = seeds
        self.name = f"random:{seeds[0]}-{seeds[-1]}"
        self._place = self._left = 0

    def pick(self, ready: list[Batch]) -> Batch:
        """Picks the waves with the lowest pc in the place whose turn it is, so that they meet
        again."""
        here = [b for b in ready if b.rect.w0 == self._place]
        if self._left <= 0 or not here:
            self._place = self._random.choice(sorted({b.rect.w0 for b in ready}))
            self._left = self._random.randint(1, self._longest)
            here = [b for b in ready if b.rect.w0 == self._place]
        return min(here, key=lambda b: b.pc)

    def quantum(self, length: int) -> int:
        length = min(length, self._left)
        self._left -= length
        return length

    def rounds(self, waves: int) -> list[Schedule]:
        size = math.factorial(min(waves, 8))
        parts = (self.seeds[i : i + size] for i in range(0, len(self.seeds), size))
        return [Dealt(part) for part in parts]

    def copies(self, waves: int) -> int:
        return len(self.seeds)

    def copy_name(self, copy: int) -> str:
        return f"{self.seeds[copy]} of {self.name}"

    def deal(self, copy: int, workgroup: Sequence[int], waves: int) -> Sequence[int]:
        draw = random.Random(f"{self.seeds[0]} {workgroup}")
        names = draw.sample(range(waves), waves)
        start = draw.randrange(math.factorial(min(waves, 8)))
        return [names[place] for place in _order(waves, start + copy)]


@lru_cache(maxsize=4096)
def _order(length: int, number: int) -> tuple[int, ...]:
    """The number-th order of `length` things, in a cycle in which one exchange of neighbours leads
    from each to the next (Johnson 1963; Trotter 1962): copies side by side then part least."""
    if length <= 1:
        return tuple(range(length))
    others, at = divmod(number % math.factorial(length), length)
    rest = _order(length - 1, others)
    at = at if others % 2 else length - 1 - at
    return (*rest[:at], length - 1, *rest[at:])


class Delay(Schedule):
    """Adversarial: these waves move only when no other can, as late as barriers allow."""

    def __init__(self, waves: Iterable[int]):
        self.waves = frozenset(waves)
        self.name = "delay:" + ",".join(map(str, sorted(self.waves)))

    def group_of(self, place: int) -> int:
        return int(place in self.waves)

    def pick(self, ready: list[Batch]) -> Batch:
        return min(ready, key=lambda b: (b.rect.w0 in self.waves, b.pc))


class DelayEach(Schedule):
    """Adversarial: one wave is as late as barriers allow; another one in each copy."""

    name = "delay:each"

    def copies(self, waves: int) -> int:
        return waves

    def copy_name(self, copy: int) -> str:
        return f"delay:{copy}"

    def deal(self, copy: int, workgroup: Sequence[int], waves: int) -> Sequence[int]:
        return [copy, *(wave for wave in range(waves) if wave != copy)]

    def group_of(self, place: int) -> int:
        return min(place, 1)

    def pick(self, ready: list[Batch]) -> Batch:
        return min(ready, key=lambda b: (b.rect.w0 == 0, b.pc))


class DelayHalves(Schedule):
    """Adversarial: one half of the waves is as late as barriers allow, the other one in a copy."""

    name = "delay:halves"

    def __init__(self, half: int = 0):
        self._half = half

    def rounds(self, waves: int) -> list[Schedule]:
        return [DelayHalves(waves // 2)]

    def copies(self, waves: int) -> int:
        return 2

    def copy_name(self, copy: int) -> str:
        return f"the {('lower', 'upper')[copy]} half of {self.name}"

    def deal(self, copy: int, workgroup: Sequence[int], waves: int) -> Sequence[int]:
        return [(place + copy * self._half) % waves for place in range(waves)]

    def group_of(self, place: int) -> int:
        return int(place >= self._half)

    def pick(self, ready: list[Batch]) -> Batch:
        return min(ready, key=lambda b: (b.rect.w0 < self._half, b.pc))


def parse_schedule(text: str | Schedule) -> Schedule:
    """A schedule from its name: lockstep, round-robin, random:SEED, random:FIRST-LAST,
    delay:WAVES, delay:each or delay:halves."""
    if isinstance(text, Schedule):
        return text
    name, _, rest = text.partition(":")
    if text == "lockstep":
        return Schedule()
    if text == "round-robin":
        return RoundRobin()
    try:
        if name == "random" and "-" in rest:
            return Dealt(_range(rest))
        if name == "random":
            return Random(int(rest or 0))
        if name == "delay" and rest in ("each", "halves"):
            return DelayEach() if rest == "each" else DelayHalves()
        if name == "delay" and rest:
            return Delay(wave for part in rest.split(",") for wave in _range(part))
    except ValueError:
        pass  # what follows says what is wanted
    raise ValueError(
        "schedule must be lockstep, round-robin, random:SEED, random:FIRST-LAST, delay:WAVES,"
        f" delay:each or delay:halves, got {text!r}"
    )


def _range(text: str) -> range:
    """3 or 3-7, inclusive."""
    first, _, last = text.partition("-")
    numbers = range(int(first), int(last or first) + 1)
    if not numbers:
        raise ValueError(text)
    return numbers
