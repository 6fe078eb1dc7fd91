"""Grids of which a part runs by default, and the rest where long grids are asked for."""

import random
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any

import pytest

from machine_code.covering import each_value


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
    first = list(first)
    return _in_turns(first, others, [number % each == 0 for number in range(len(first))])


# Fields of a case whose numbers are as good as each other, but for 0.
SIZES = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "seed")
SIZES += ("rel_bias", "block_mask", "page_size")


def covering(cases: Iterable[Any], *others: Collection[Any]) -> list:
    """The same of cases, dataclasses, of which as few come by default as are enough to have every
    value of a field that one of all has."""
    cases = list(cases)
    rows = [
        {name: x == 0 if name in SIZES else x for name, x in vars(case).items()} for case in cases
    ]
    chosen = set(map(id, each_value(rows)))
    return _in_turns(cases, others, [id(row) in chosen for row in rows])


def _in_turns(first: Sequence[Any], others: Sequence[Collection[Any]], chosen: list[bool]) -> list:
    """Parameters of the whole product, with the values of `first` that run by default."""
    found = []
    for number, (value, is_chosen) in enumerate(zip(first, chosen, strict=True)):
        combinations: list[tuple[tuple, bool]] = [((value,), is_chosen)]
        turn = number
        for axis in others:
            place_of_turn = turn % len(axis)
            turn = turn // len(axis) + number
            combinations = [
                ((*values, x), by_default and place == place_of_turn)
                for values, by_default in combinations
                for place, x in enumerate(axis)
            ]
        found += [
            pytest.param(*values, marks=[] if by_default else [pytest.mark.slow])
            for values, by_default in combinations
        ]
    return found
