"""Ratios of two sides, and what they say."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Draws of a bootstrap, and the share of medians that an interval holds.
DRAWS, COVERED = 2000, 0.95


@dataclass(frozen=True)
class Figure:
    """A case of both sides. ratio: time of the new side over the base's, the median over rounds;
    low, high: an interval of that median. equal: whether results are the same bit for bit."""

    table: str
    name: str
    base_us: float
    new_us: float
    ratio: float
    low: float
    high: float
    rounds: int
    equal: bool | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def is_slower(self, percent: float) -> bool:
        """Whether it takes so much longer and more, beyond the spread."""
        return self.low > 1 + percent / 100


def figure(
    table: str, name: str, times: Sequence[tuple[float, float]], equal: bool | None = None
) -> Figure:
    """Of (base, new), round by round."""
    ratios = [new / base for base, new in times]
    low, high = interval(ratios)
    base_us, new_us = (statistics.median(side) for side in zip(*times, strict=True))
    ratio = statistics.median(ratios)
    return Figure(table, name, base_us, new_us, ratio, low, high, len(times), equal)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Of the median, by bootstrap; the same for the same values."""
    drawn = random.Random(0)
    medians = sorted(statistics.median(drawn.choices(values, k=len(values))) for _ in range(DRAWS))
    cut = round(DRAWS * (1 - COVERED) / 2)
    return medians[cut], medians[-1 - cut]


@dataclass(frozen=True)
class Mean:
    """The geometric mean of a table's ratios, with an interval from those of its cases."""

    table: str
    ratio: float
    low: float
    high: float
    worst: Figure

    def is_slower(self, percent: float) -> bool:
        return self.low > 1 + percent / 100


def means(figures: Sequence[Figure]) -> list[Mean]:
    """By table."""
    tables: dict[str, list[Figure]] = {}
    for each in figures:
        tables.setdefault(each.table, []).append(each)
    return [_mean(table, own) for table, own in tables.items()]


def _mean(table: str, own: Sequence[Figure]) -> Mean:
    """Errors of cases are taken for independent: half widths of the intervals add as squares."""
    ratio = statistics.geometric_mean([each.ratio for each in own])
    half = sum(((each.high - each.low) / 2) ** 2 for each in own) ** 0.5 / len(own)
    return Mean(table, ratio, ratio - half, ratio + half, max(own, key=lambda f: f.ratio))


def line(each: Figure) -> str:
    percent = f"{(each.ratio - 1) * 100:+6.2f} % [{(each.low - 1) * 100:+.2f}, "
    percent += f"{(each.high - 1) * 100:+.2f}]"
    bits = {True: "", False: "  other bits", None: ""}[each.equal]
    return f"{each.base_us:11.2f}{each.new_us:11.2f}  {percent:26s} {each.name}{bits}"


HEAD = f"{'base us':>11s}{'new us':>11s}  {'new over base':26s} case"


def summary(figures: Sequence[Figure]) -> list[str]:
    """A line a table: its worst case and its mean."""
    return [
        f"{each.table}: worst {(each.worst.ratio - 1) * 100:+.2f} % ({each.worst.name});"
        f" geometric mean {(each.ratio - 1) * 100:+.2f} %"
        f" [{(each.low - 1) * 100:+.2f}, {(each.high - 1) * 100:+.2f}]"
        for each in means(figures)
    ]


def verdict(figures: Sequence[Figure], within: float, each: float) -> list[str]:
    """What is slower than asked, beyond the spread: tables by their mean, cases alone."""
    found = [
        f"{mean.table}: its mean is more than {within:g} % slower"
        for mean in means(figures)
        if mean.is_slower(within)
    ]
    found += [f"{f.name}: more than {each:g} % slower" for f in figures if f.is_slower(each)]
    return found
