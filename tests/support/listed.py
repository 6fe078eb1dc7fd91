"""Kernels of a list of problems, found where they are asked for: all are 20,000 plans."""

from collections.abc import Iterable, Iterator
from dataclasses import fields

from heedful.core.base.device import DeviceSpec
from heedful.core.call.problem import AttentionProblem
from heedful.launch import prebuild
from heedful.launch.record import Entry

_FACTS = [field.name for field in fields(AttentionProblem)]


def _facts(entry: Entry) -> tuple:
    return (entry.direction, *(getattr(entry.problem, name) for name in _FACTS))


class Listed:
    """The kernels that the entries need, by device."""

    def __init__(self, entries: Iterable[Entry]):
        self.entries = [(_facts(entry), entry) for entry in entries]
        self.planned: set[tuple[str, int]] = set()
        self.found: dict[str, set[str]] = {}

    def lacks(self, needed: Iterable[Entry], device: DeviceSpec) -> list[str]:
        """Functions of kernels that other entries need and these do not."""
        found = self.found.setdefault(device.name, set())
        wrong = []
        for entry in needed:
            kernels = prebuild.kernels([entry], [device])[0]
            rest = kernels.keys() - found
            candidates = self._alike(entry, device) if rest else iter(())
            while rest and (candidate := next(candidates, None)):
                found.update(prebuild.kernels([candidate], [device])[0])
                rest -= found
            wrong += [kernels[key][0].kernel.function for key in rest]
        return wrong

    def _alike(self, entry: Entry, device: DeviceSpec) -> Iterator[Entry]:
        """Entries that were not planned yet, those first that differ in least of a problem."""
        facts = _facts(entry)
        differing = [
            (sum(a != b for a, b in zip(facts, others, strict=True)), number)
            for number, (others, _) in enumerate(self.entries)
            if (device.name, number) not in self.planned
        ]
        for _, number in sorted(differing):
            self.planned.add((device.name, number))
            yield self.entries[number][1]
