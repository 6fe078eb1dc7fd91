"""What a covering array is: its rows, and what a row launches on a target."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from heedful.core.base.arrays import ArraySpec
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.launch.program import buffers
from heedful.launch.record import Entry
from machine_code.covering import Factors, Row, cover

DEVICES = {
    "sm_80": "A100",
    "sm_86": "RTX 3090",
    "sm_89": "RTX 4090",
    "sm_90": "H200",
    "sm_100": "B200",
    "sm_120": "RTX 5090",
    "gfx942": "MI300X",
    "gfx950": "MI355X",
}
PORTABLE_TARGETS = ("sm_90", "gfx942", "gfx950")
MASKS = {
    "full": MaskSpec(),
    "causal": MaskSpec.of(True),
    "window": MaskSpec(9, 4),
    "left": MaskSpec(40, -1),
    "first": MaskSpec(9, -1, 3),
    "causal-first": MaskSpec.of(True, (40, 0, 3)),
}
FLAGS = (False, True)


@dataclass(frozen=True)
class Launched:
    """What one row launches: the programs of a problem, or one of a KV cache.

    entry: the problem with its arrays; of its programs the last `last` launches, all if 0.
    """

    backend: str
    entries: tuple[Entry, ...] = ()
    last: int = 0
    cache: str = ""
    arrays: dict[str, ArraySpec] | None = None
    options: dict[str, Any] | None = None


@dataclass(frozen=True)
class Array:
    """A covering array: its rows, and what a row launches on a target."""

    targets: tuple[str, ...]
    factors: Factors
    possible: Callable[[Row], bool]
    launched: Callable[[Row, str], Launched]
    seeds: tuple[Row, ...] = ()

    @cached_property
    def rows(self) -> list[Row]:
        return cover(self.factors, self.possible, self.seeds)


def always(row: Row) -> bool:
    return True


def excluded(*pairs: dict[str, tuple]) -> Callable[[Row], bool]:
    """Whether a row has no combination of values, one of each factor, that is listed."""

    def possible(row: Row) -> bool:
        return not any(
            all(name in row and row[name] in values for name, values in pair.items())
            for pair in pairs
        )

    return possible


def directions(problem: AttentionProblem, aligned: bool = True) -> tuple[Entry, ...]:
    """The problem's programs, their arrays dense."""
    found = []
    for direction in ("forward", "backward")[: 1 + problem.needs_grad]:
        arrays = getattr(buffers, direction)(problem)
        if direction == "backward":
            arrays["dlse"] = arrays["lse"]
        arrays = {name: spec._replace(aligned=aligned) for name, spec in arrays.items()}
        found.append(Entry(problem, direction, arrays))
    return tuple(found)
