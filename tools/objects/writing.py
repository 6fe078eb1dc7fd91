"""Tables that carry the mark of the clock that made them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from heedful.emulator.clock import fingerprint

_HEAD = """# title: {title}
# date: {day}
# device: none: the emulator's clock {mark}; published: MI300X and MI355X
# versions: {versions}
# method: {method}
"""


_AITER = "ROCm/aiter's objects and op_tests/cpp/mha/README.md"


def write_table(
    path: Path,
    title: str,
    method: str,
    head: Sequence[str],
    lines: Sequence[Sequence],
    versions: str = _AITER,
):
    """A CSV file of measurements/."""
    with path.open("w", newline="") as file:
        mark = fingerprint()
        facts = {"title": title, "method": method, "versions": versions, "mark": mark}
        file.write(_HEAD.format(day=date.today(), **facts))
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([head, *lines])
