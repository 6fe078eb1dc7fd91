"""Remakes the tables of other people's code objects from a checkout of ROCm/aiter.

    python -m objects PATH_TO_AITER [--objdump FILE] [--only TEXT] [--folder measurements/emulator]

Every row of rows.py runs under several orders of the waves. Each finding gets its class from
classes.py; one without a class is open.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import numpy as np

from heedful.emulator import Finding, emulate, load_object
from objects.classes import Classed, classify
from objects.problems import Problem
from objects.rows import ROWS, Row

SCHEDULES = ("lockstep", "round-robin", "random:0", "delay:halves")
# Each with loads to LDS that land as late as is legal, and at once.
ORDERS = [(name, early) for early in (False, True) for name in SCHEDULES]
_HEAD = """# title: {title}
# date: {day}
# device: none: the emulator
# versions: ROCm/aiter's objects by their git blobs
# method: {method}
"""
_OBJECTS = (
    "Kernels of ROCm/aiter (hsa/CHIP) on small problems against float64. Error: relative rms of "
    "the worst output under lockstep, beside its bound: a unit of roundoff of the narrowest format "
    "(two where that truncates), once per rounding. Right: orders of the waves whose outputs stay "
    "within it, of lockstep, round-robin, random:0 and delay:halves, each with loads to LDS that "
    "land late and at once. Findings: of all orders, other than wait states. "
    "None of these objects is in this repository: python -m objects (in tools) remakes the table."
)
_FINDINGS = (
    "Findings in these kernels by class. Ours: our rule is stricter than what runs. Timing: the "
    "kernel relies on timing. Harmless: the same bytes either way. Open: not decided. The pair is "
    "the first of its kind, with its distance in bytes from the kernel's start."
)


def blob(data: bytes) -> str:
    """The hash that git gives a file of these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def shuffle(problem: Problem, path: Path, objdump: str | None):
    """Bring dQ of the a16 backward from the order of its sums to that of a matrix."""
    total, kind, wanted, bound = problem.outputs["dq"]
    dq = np.full(wanted.shape, 0x7FC0, np.uint16)
    batch, heads, rows, _ = wanted.shape
    code = load_object(path, objdump=objdump)
    strides = [x.strides[i] for x in (total, dq) for i in (1, 0, 2)]
    slots = [total, dq, *strides, rows, wanted.shape[-1], None, None]
    arguments = {f"@{16 * i}": value for i, value in enumerate(slots)}
    emulate(code, (-(-rows // 64), heads, batch), arguments, strict=False)
    problem.outputs["dq"] = (dq, kind, wanted, bound)


def run(row: Row, root: Path, objdump: str | None) -> tuple[list[str], list[Finding]]:
    """The row's line of the table, and its findings."""
    folder = root / "hsa" / row.chip
    path = folder / row.file
    code = load_object(path, objdump=objdump)
    right, worst, findings = 0, ("", 0.0, 1.0), {}
    for schedule, early in ORDERS:
        problem = row.build(row.chip)
        options = {"threads": problem.threads, "schedule": schedule, "early_loads": early}
        report = emulate(code, problem.grid, problem.arguments(), **options)
        for step in problem.after:
            step()
        if row.after:
            shuffle(problem, folder / row.after, objdump)
        errors = problem.errors()
        right += all(error <= bound for error, bound in errors.values())
        if (schedule, early) == ORDERS[0]:
            name = max(errors, key=lambda n: errors[n][0] / errors[n][1])
            worst = (name, *errors[name])
        for finding in report.findings:
            findings.setdefault((finding.kind, finding.pc, finding.other), finding)
    kinds = Counter(f.kind for f in findings.values() if not _is_advice(f))
    found = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    line = [row.chip, row.file, row.problem, f"{worst[0]} {worst[1]:.1e} of {worst[2]:.1e}"]
    return [*line, f"{right} of {len(ORDERS)}", found, blob(path.read_bytes())], list(
        findings.values()
    )


def _is_advice(finding: Finding) -> bool:
    return finding.kind == "wait-states"


def _write(path: Path, title: str, method: str, head: Sequence[str], lines: Sequence[Sequence]):
    with path.open("w", newline="") as file:
        file.write(_HEAD.format(title=title, day=date.today(), method=method))
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([head, *lines])


def main() -> int:
    """Run the rows and write both tables; 1 if an object was wrong under lockstep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--objdump")
    parser.add_argument("--only", default="", help="rows whose chip and file contain this")
    parser.add_argument("--folder", type=Path, help="where to write; without it nothing is")
    options = parser.parse_args()
    results = []
    for row in ROWS:
        if options.only in f"{row.chip}/{row.file}":
            line, findings = run(row, options.path, options.objdump)
            results.append((row, line, findings))
            print(*line, sep=" | ", flush=True)
    if options.folder:
        write(options.folder, results)
    for c in merged([c for row, _, found in results for c in classify(row, found)]):
        print(*c.line(), sep=" | ")
    return int(any(line[4].startswith("0") for _, line, _ in results))


def write(folder: Path, results: Sequence[tuple[Row, list[str], list[Finding]]]):
    """Both tables, from rows, their lines and their findings."""
    head = ["chip", "object", "problem", "error", "right", "findings", "blob"]
    lines = [line for _, line, _ in results]
    _write(folder / "040-objects.csv", "Shipped code objects", _OBJECTS, head, lines)
    head = ["class", "finding", "objects", "count", "a pair"]
    classed = merged([c for row, _, found in results for c in classify(row, found)])
    lines = [c.line() for c in classed]
    _write(folder / "042-findings.csv", "Findings in these objects", _FINDINGS, head, lines)


def merged(classed: Sequence[Classed]) -> list[Classed]:
    """One line a class and reason, over all objects."""
    by_key: dict[tuple[str, str], Classed] = {}
    for c in classed:
        known = by_key.get((c.kind, c.what))
        by_key[c.kind, c.what] = known.plus(c) if known else c
    return sorted(by_key.values(), key=lambda c: (c.kind, -c.count))


if __name__ == "__main__":
    sys.exit(main())
