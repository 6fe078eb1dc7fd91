"""Fits core/planning/splits.py's costs to half of a record of `python -m heedful.bench.splits`.

    PYTHONPATH=src python tools/fit_splits.py [RECORD]

Prints the costs that follow the times best, and the regret of those in core/planning/splits.py: how
much longer than the best of all counts the chosen one takes.
"""

import csv
import math
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.splits import COSTS, Costs, Grid, fewest, grid_of

RECORD = Path(__file__).parents[1] / "tests" / "recordings" / "splits.csv"
UNITS = by_name("H200").units
SIZES = ("batch", "queries", "keys", "heads", "heads_k", "dim")
TILES = ("block_m", "block_n", "pack")
# Counts that took more than so many times the best are not followed: none is ever chosen.
FAR = 3.0


class Recorded(NamedTuple):
    """A call, rows and keys of its tiles and rows of a position, and microseconds by count of
    splits."""

    problem: AttentionProblem
    tiles: tuple[int, int, int]
    times: dict[int, float]

    def grid(self) -> Grid:
        return grid_of(self.problem, *self.tiles)

    def regret(self, count: int) -> float:
        return self.times[count] / min(self.times.values()) - 1


def read(path: Path = RECORD) -> list[Recorded]:
    """Shapes of a record in its order."""
    found: dict[tuple[int, ...], dict[int, float]] = {}
    lines = (line for line in path.read_text().splitlines() if not line.startswith("#"))
    for row in csv.DictReader(lines):
        shape = tuple(int(row[name]) for name in (*SIZES, "causal", *TILES))
        found.setdefault(shape, {})[int(row["splits"])] = float(row["us"])
    return [_recorded(*shape, times=times) for shape, times in found.items()]


def _recorded(*shape: int, times: dict[int, float]) -> Recorded:
    batch, queries, keys, heads, heads_k, dim, causal, block_m, block_n, pack = shape
    problem = AttentionProblem.dense(batch, queries, keys, heads, heads_k, dim, causal=causal == 1)
    return Recorded(problem, (block_m, block_n, pack), times)


def halves(recorded: list[Recorded]) -> tuple[list[Recorded], list[Recorded]]:
    """What is fitted, and what is held out."""
    return recorded[::2], recorded[1::2]


def error(costs: Costs, recorded: Iterable[Recorded]) -> float:
    """Mean square of the logarithm of predicted over recorded times."""

    def of(one: Recorded) -> float:
        near = FAR * min(one.times.values())
        kept = {n: us for n, us in one.times.items() if us < near}
        grid = one.grid()
        told = (grid.time(n, UNITS, costs) / us for n, us in kept.items())
        return statistics.fmean(math.log(ratio) ** 2 for ratio in told)

    return statistics.fmean(map(of, recorded))


def fitted(recorded: list[Recorded], costs: Costs = COSTS, least_step: float = 0.005) -> Costs:
    """The costs with the least error: each in turn is moved by ever smaller steps."""
    best, step = error(costs, recorded), 0.2
    while step > least_step:
        before = best
        for name in Costs._fields:
            for factor in (1 + step, 1 / (1 + step)):
                moved = costs._replace(**{name: getattr(costs, name) * factor})
                found = error(moved, recorded)
                if found < best:
                    costs, best = moved, found
        if best > before * 0.999:
            step /= 2
    return costs


def regrets(recorded: Iterable[Recorded], costs: Costs = COSTS) -> list[float]:
    """Of the chosen counts, the least first."""
    return sorted(one.regret(fewest(one.grid(), UNITS, costs)) for one in recorded)


def main() -> None:
    fit, held_out = halves(read(*map(Path, sys.argv[1:2])))
    found = fitted(fit)
    for costs in (COSTS, found):
        print(" ".join(f"{name}={cost:.3g}" for name, cost in costs._asdict().items()))
        for name, half in (("fitted", fit), ("held out", held_out)):
            of = regrets(half, costs)
            shares = (f"{of[math.ceil(len(of) * p) - 1]:.3f} of {p:.0%}" for p in (0.5, 0.9, 0.95))
            print(
                f"{name}: error {error(costs, half):.5f}, regret", *shares, f"{of[-1]:.3f} of all"
            )


if __name__ == "__main__":
    main()
