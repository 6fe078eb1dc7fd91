"""Holds the clock against published speeds, and fits its constants.

    python -m objects.clock PATH_TO_AITER [--objdump FILE] [--fit] [--folder measurements/emulator]

PATH_TO_AITER holds `hsa` and `op_tests`. With --fit the fitted constants are found anew, to be
written into heedful/emulator/clock/constants.py; then the tables are remade.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from heedful.emulator.clock.constants import CONSTANTS, constant
from heedful.emulator.clock.grid import makespan, replay
from heedful.emulator.clock.trace import Trace
from objects.timed import CHIPS, KERNELS, Published, Timed, published
from objects.writing import write_table

SHORTEST = 4096
# A figure below this part of the median of its object is listed apart.
CONTRADICTS = 0.6
# What the constants are fitted on: clocks on the first two of each chip, atomics on the third.
FIT_CLOCK = ("fwd", "a16")
FIT_ATOMICS = "gfx950 a32 full"
# Lengths that are replayed; a workgroup's time is linear in the length.
LENGTHS = {"fwd": (1024, 2048), "full": (768, 1536), "causal": (1152, 2304)}
_ROWS = (
    "TFLOP/s that ROCm/aiter publishes for each shape with lengths from 4096 (head dim 128, "
    "bfloat16), beside what the clock and the null model predict. A workgroup of each object is "
    "recorded and replayed at two lengths, its time at others is linear, and workgroups are "
    "placed on dies and compute units in launch order. Listed: below 0.6 of the median of its "
    "object, so that the publisher contradicts itself; in no summary. Error: predicted over "
    "published, less 1. Remade by python -m objects.clock (in tools)."
)
_SUMMARY = (
    "Errors by object, of the rows of 052. Role: clock, the object fits its chip's clock; atomics, "
    "it fits the rate of atomics; held out, it fits nothing. The a16 backward was to fit that rate "
    "and cannot: its replay is not bound by atomics, so gfx950's a32 does, and gfx942 has the same "
    "rate, unfitted. Null: the busiest of MFMA, VALU and LDS, times one constant a chip, fitted on "
    "the same objects as the clock."
)
_RATIOS = (
    "Ratios of the speeds of two kernels on one chip at one shape, of the rows of 052, where at "
    "least one of the two is held out. Error: predicted ratio over published ratio, less 1. Order: "
    "pairs that differ by more than 15 % of which the faster is named rightly."
)


@dataclass
class Model:
    """One object's workgroup: its time by length, as a line, and the busiest unit's."""

    kernel: Timed
    traces: Mapping[int, Trace]
    line: tuple[float, float] = (0.0, 0.0)
    busiest: tuple[float, float] = (0.0, 0.0)

    def replay(self):
        """Set the lines anew, with the constants as they are."""
        (n1, first), (n2, second) = (
            (n, replay(trace)[next(iter(trace.streams))]) for n, trace in self.traces.items()
        )
        self.line = _line(n1, first.clocks, n2, second.clocks)
        most = [max(t.busy[u] for u in ("mfma", "valu", "lds")) for t in (first, second)]
        self.busiest = _line(n1, most[0], n2, most[1])

    def clocks(self, row: Published, line: tuple[float, float]) -> float:
        """Of the launch."""
        count = self.kernel.workgroups(row.batch, row.heads, row.length)
        each = line[0] + line[1] * row.length
        return makespan([each] * count, self.kernel.chip, 1)

    def tflops(self, row: Published, clock_hz: float, line: tuple[float, float]) -> float:
        """The speed at some clock."""
        kernel, memory = self.kernel, constant("hbm_bytes", self.kernel.chip)
        own = kernel.own_bytes(row.batch, row.heads, row.heads_k, row.length) / memory
        other = kernel.other_bytes(row.batch, row.heads, row.length) / memory
        seconds = max(self.clocks(row, line) / clock_hz, own) + other
        return kernel.flops(row.batch, row.heads, row.length) / seconds / 1e12

    @property
    def role(self) -> str:
        """What the object is for."""
        if self.kernel.label == FIT_ATOMICS:
            return "atomics"
        fits = self.kernel.column in FIT_CLOCK and not self.kernel.causal
        return "clock" if fits else "held out"


def _line(n1: int, t1: float, n2: int, t2: float) -> tuple[float, float]:
    slope = (t2 - t1) / (n2 - n1)
    return t1 - slope * n1, slope


def record(root: Path, objdump: str | None) -> list[Model]:
    """Record a workgroup of every object at two lengths."""
    models = []
    for kernel in KERNELS:
        kind = "fwd" if kernel.column == "fwd" else "causal" if kernel.causal else "full"
        traces = {n: kernel.record(root, n, objdump) for n in LENGTHS[kind]}
        models.append(Model(kernel, traces))
        print(kernel.label, sum(t.instructions for t in traces.values()), file=sys.stderr)
    return models


def _bias(model: Model, root: Path, clock_hz: float, line: tuple[float, float]) -> float:
    """Median of log(predicted / published)."""
    rows = published(root, model.kernel, SHORTEST)
    return float(np.median([np.log(model.tflops(r, clock_hz, line) / r.tflops) for r in rows]))


def fit_clock(models: Iterable[Model], root: Path, null: bool = False) -> dict[str, float]:
    """By chip the clock at which the biases of the two objects sum to 0; without stalls it is the
    null model's constant."""
    clocks = {}
    for chip in CHIPS:
        own = [m for m in models if m.kernel.chip == chip and m.role == "clock"]
        low, high = 1e8, 1e10
        while high / low > 1.0001:
            middle = (low * high) ** 0.5
            lines = [m.busiest if null else m.line for m in own]
            bias = sum(_bias(m, root, middle, line) for m, line in zip(own, lines, strict=True))
            low, high = (low, middle) if bias > 0 else (middle, high)
        clocks[chip] = low
    return clocks


def fit_atomics(models: Iterable[Model], root: Path) -> float:
    """The rate at which the object that fits it has no bias."""
    (model,) = (m for m in models if m.role == "atomics")
    low, high = 1e11, 2e12
    while high / low > 1.002:
        middle = (low * high) ** 0.5
        _set("atomics", middle, middle)
        model.replay()
        clock_hz = constant("clock", model.kernel.chip)
        low, high = (
            (low, middle) if _bias(model, root, clock_hz, model.line) > 0 else (middle, high)
        )
    return low


def _set(name: str, gfx942: float, gfx950: float):
    CONSTANTS[name] = replace(CONSTANTS[name], gfx942=gfx942, gfx950=gfx950)


def fit(models: Sequence[Model], root: Path):
    """Set and print the fitted constants."""
    _set("atomics", 1e13, 1e13)
    for model in models:
        model.replay()
    clocks = fit_clock(models, root)
    _set("clock", clocks["gfx942"], clocks["gfx950"])
    rate = fit_atomics(models, root)
    _set("atomics", rate, rate)
    print({name: f"{constant('clock', name):.4g}" for name in CHIPS}, f"{rate:.4g}")


@dataclass(frozen=True)
class Result:
    """One published figure beside what was predicted; `listed` apart where it contradicts others of
    its publisher."""

    model: Model
    row: Published
    predicted: float
    null: float
    listed: bool

    @property
    def error(self) -> float:
        """Of the prediction."""
        return self.predicted / self.row.tflops - 1


def predict(models: Sequence[Model], root: Path) -> list[Result]:
    """All rows."""
    nulls = fit_clock(models, root, null=True)
    results = []
    for m in models:
        chip = m.kernel.chip
        rows = published(root, m.kernel, SHORTEST)
        usual = float(np.median([row.tflops for row in rows]))
        for row in rows:
            own = m.tflops(row, constant("clock", chip), m.line)
            null = m.tflops(row, nulls[chip], m.busiest)
            results.append(Result(m, row, own, null, row.tflops < CONTRADICTS * usual))
    return results


def _percent(x: float) -> str:
    return f"{100 * x:+.1f} %"


def _spread(errors: Sequence[float]) -> list[str]:
    """Median error without sign, the share within 15 %, the worst."""
    sizes = np.abs(errors)
    return [
        f"{100 * float(np.median(sizes)):.1f} %",
        f"{100 * float(np.mean(sizes <= 0.15)):.0f} %",
        _percent(max(errors, key=abs)),
    ]


def summaries(results: Sequence[Result]) -> list[list[str]]:
    """By object, then all that was held out by chip and together."""
    lines, results = [], [r for r in results if not r.listed]
    for model in {id(r.model): r.model for r in results}.values():
        own = [r for r in results if r.model is model]
        lines.append([model.kernel.label, model.role, *_pair(own)])
    held = [r for r in results if r.model.role == "held out"]
    for chip in CHIPS:
        lines.append([f"{chip} all", "held out", *_pair([r for r in held if _chip(r) == chip])])
    lines.append(["all", "held out", *_pair(held)])
    return lines


def _chip(result: Result) -> str:
    return result.model.kernel.chip


def _pair(results: Sequence[Result]) -> list[str]:
    signed = float(np.median([r.error for r in results]))
    nulls = [r.null / r.row.tflops - 1 for r in results]
    own = _spread([r.error for r in results])
    return [str(len(results)), _percent(signed), *own, *_spread(nulls)]


def ratios(results: Sequence[Result]) -> list[list[str]]:
    """By pair of objects of a chip."""
    by_shape: dict[tuple, list[Result]] = {}
    for r in (r for r in results if not r.listed):
        key = (_chip(r), r.row.batch, r.row.heads, r.row.heads_k, r.row.length)
        by_shape.setdefault(key, []).append(r)
    pairs: dict[str, list[tuple[float, float, float]]] = {}
    for group in by_shape.values():
        for i, a in enumerate(group):
            for b in group[i + 1 :]:
                if "held out" in (a.model.role, b.model.role):
                    name = f"{a.model.kernel.label} / {b.model.kernel.label[7:]}"
                    entry = a.row.tflops / b.row.tflops, a.predicted / b.predicted, a.null / b.null
                    pairs.setdefault(name, []).append(entry)
    lines = [[name, *_ratio(entries)] for name, entries in sorted(pairs.items())]
    return [*lines, ["all", *_ratio([e for entries in pairs.values() for e in entries])]]


def _ratio(entries: Sequence[tuple[float, float, float]]) -> list[str]:
    errors = [own / true - 1 for true, own, _ in entries]
    nulls = [null / true - 1 for true, _, null in entries]
    apart = [(true, own) for true, own, _ in entries if abs(np.log(true)) > np.log(1.15)]
    right = sum((true > 1) == (own > 1) for true, own in apart)
    return [
        str(len(entries)),
        *(f"{100 * float(np.median(np.abs(e))):.1f} %" for e in (errors, nulls)),
        *(f"{100 * float(np.mean(np.abs(e) <= 0.08)):.0f} %" for e in (errors, nulls)),
        f"{right} of {len(apart)}",
    ]


def write(folder: Path, results: Sequence[Result]):
    """The three tables."""
    head = ["object", "role", "rows", "bias", "median error", "within 15 %", "worst"]
    head += ["null: median", "null: within 15 %", "null: worst"]
    lines = summaries(results)
    write_table(folder / "050-clock.csv", "The clock by object", _SUMMARY, head, lines)
    head = ["pair", "shapes", "median error", "null: median", "within 8 %", "null: within 8 %"]
    lines = ratios(results)
    write_table(folder / "051-ratios.csv", "The clock by pair", _RATIOS, [*head, "order"], lines)
    head = ["object", "role", "batch", "heads", "kv heads", "length", "published", "predicted"]
    lines = [
        [
            r.model.kernel.label,
            "listed" if r.listed else r.model.role,
            r.row.batch,
            r.row.heads,
            r.row.heads_k,
            r.row.length,
        ]
        + [f"{r.row.tflops:.0f}", f"{r.predicted:.0f}", _percent(r.error), f"{r.null:.0f}"]
        for r in results
    ]
    head += ["error", "null"]
    write_table(folder / "052-clock-rows.csv", "The clock by shape", _ROWS, head, lines)


def main() -> int:
    """Record, fit if asked to, predict, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--objdump")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--folder", type=Path, help="where to write; without it nothing is")
    options = parser.parse_args()
    models = record(options.path, options.objdump)
    if options.fit:
        fit(models, options.path)
    for model in models:
        model.replay()
    results = predict(models, options.path)
    for line in [*summaries(results), *ratios(results)]:
        print(*line, sep=" | ")
    if options.folder and not options.fit:
        write(options.folder, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
