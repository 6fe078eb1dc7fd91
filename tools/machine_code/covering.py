"""Rows of feature values in which each possible pair of values is met."""

import itertools
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Row = dict[str, Any]
Factors = Mapping[str, tuple]
# Two values, each with its factor.
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def cover(
    factors: Factors, possible: Callable[[Row], bool], seeds: Iterable[Row] = ()
) -> list[Row]:
    """A greedy pairwise cover of `factors`, the same in every run.

    possible: whether a row, or a part of one, is a problem at all. seeds: what the first rows have.
    """
    rng, begins = random.Random(0), list(seeds)
    rows: list[Row] = []
    missing = possible_pairs(factors, possible)
    while missing or begins:
        begin: Row = begins.pop(0) if begins else dict(min(missing, key=str))
        draws = [_grow(rng, dict(begin), missing, factors, possible) for _ in range(20)]
        best = max(draws, key=lambda row: len(pairs(row, factors) & missing))
        missing -= pairs(best, factors)
        rows.append(best)
    return rows


def possible_pairs(factors: Factors, possible: Callable[[Row], bool]) -> set[Pair]:
    """Each two values of different factors that one problem can have."""
    return {
        ((a, x), (b, y))
        for a, b in itertools.combinations(factors, 2)
        for x, y in itertools.product(factors[a], factors[b])
        if possible({a: x, b: y})
    }


def pairs(row: Row, factors: Factors) -> set[Pair]:
    """Each two values of a row."""
    chosen = [(name, row[name]) for name in factors if name in row]
    return set(itertools.combinations(chosen, 2))


def _grow(
    rng: random.Random,
    row: Row,
    missing: set[Pair],
    factors: Factors,
    possible: Callable[[Row], bool],
) -> Row:
    for name in rng.sample(list(factors), len(factors)):
        if name not in row:
            choices = [c for c in factors[name] if possible({**row, name: c})]
            rng.shuffle(choices)
            row[name] = max(choices, key=lambda c: len(pairs({**row, name: c}, factors) & missing))
    return row


def deal(rows: Iterable[Row], targets: tuple[str, ...]) -> dict[str, list[Row]]:
    """Rows by target: each goes to the one that has met fewest of its feature values, of these to
    the one with fewest rows."""
    dealt: dict[str, list[Row]] = {target: [] for target in targets}
    met: dict[str, set] = {target: set() for target in targets}
    for row in rows:
        target = min(targets, key=lambda t: (len(met[t] & row.items()), len(dealt[t])))
        dealt[target].append(row)
        met[target] |= row.items()
    return dealt


def each_value(rows: Iterable[Row]) -> list[Row]:
    """A few of the rows, in their order, which together have every value that one of them has."""
    rows = list(rows)
    missing: set[tuple[str, Any]] = set().union(*(row.items() for row in rows))
    chosen: set[int] = set()
    while missing:
        best = max(range(len(rows)), key=lambda i: len(missing & rows[i].items()))
        missing -= rows[best].items()
        chosen.add(best)
    return [row for index, row in enumerate(rows) if index in chosen]
