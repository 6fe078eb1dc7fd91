"""Grids of which a part runs by default, and the rest where long grids are asked for."""

import random
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any

import pytest


def drawn_rows(axes: Mapping[str, Sequence[Any]], count: int, seed: int) -> list[dict[str, Any]]:
    """So many combinations of values. Each axis has all its values, as often as each other, in an
    order of its own that the seed draws."""
    rng = random.Random(seed)
    columns = []
    for values in axes.values():
        column = [values[i % len(values)] for i in range(count)]
        rng.shuffle(column)
        columns.append(column)
    return [dict(zip(axes, row, strict=True)) for row in zip(*columns, strict=True)]


def slow_but(default: Container[Any], values: Iterable[Any]) -> list:
    """A parameter for each value, a tuple being several, of which all but those of `default` are
    slow."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[] if value in default else [pytest.mark.slow],
        )
        for value in values
    ]


def in_turns(first: Iterable[Any], *others: Collection[Any], each: int = 1) -> list:
    """Parameters of the whole product. By default each value of `first`, or one of so many as
    `each` says, comes once, and meets the others' values in turns; the rest is slow."""
    found = []
    for number, value in enumerate(first):
        combinations: list[tuple[tuple, bool]] = [((value,), number % each == 0)]
        turn = number
        for axis in others:
            chosen = turn % len(axis)
            turn = turn // len(axis) + number
            combinations = [
                ((*values, x), by_default and place == chosen)
                for values, by_default in combinations
                for place, x in enumerate(axis)
            ]
        found += [
            pytest.param(*values, marks=[] if by_default else [pytest.mark.slow])
            for values, by_default in combinations
        ]
    return found
