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
from heedful.emulator.clock.grid import activity, clock_of, makespan, replay
from heedful.emulator.clock.trace import Trace
from objects.timed import CHIPS, KERNELS, Published, Timed, published
from objects.writing import write_table

SHORTEST = 4096
# A figure below this part of the median of its object is listed apart.
CONTRADICTS = 0.6
# What the constants are fitted on: clocks and the power of data on the first two of each chip,
# atomics on the third.
FIT_CLOCK = ("fwd", "a16")
FIT_ATOMICS = "gfx950 a32 full"
# The length whose clock counts where atomics are replayed.
USUAL = 8192
# Lengths that are replayed; a workgroup's time is linear in the length.
LENGTHS = {"fwd": (1024, 2048), "full": (768, 1536), "causal": (1152, 2304)}
_ROWS = (
    "TFLOP/s that ROCm/aiter publishes for each shape with lengths from 4096 (head dim 128, "
    "bfloat16), beside what the clock and the null model predict. A workgroup of each object is "
    "recorded and replayed at two lengths, its time at others is linear, and workgroups are "
    "placed on dies and compute units in launch order. Listed: below 0.6 of the median of its "
    "object, so that the publisher contradicts itself; in no summary. Error: predicted over "
    "published, less 1. The clock of a row is that of its power. Remade by python -m objects.clock "
    "(in tools)."
)
_SUMMARY = (
    "Errors by object, of the rows of 052. Role: clock, the object fits its chip's clock at full "
    "power and the power of data, which both chips share; atomics, it fits the rate of atomics; "
    "held out, it fits nothing. The a16 backward was to fit that rate "
    "and cannot: its replay is not bound by atomics, so gfx950's a32 does, and gfx942 has the same "
    "rate, unfitted. Null: the busiest of MFMA, VALU and LDS, times one constant a chip, fitted on "
    "the same objects as the clock."
)
_RATIOS = (
    "Ratios of the speeds of two kernels on one chip at one shape, of the rows of 052, where at "
    "least one of the two is held out. Error: predicted ratio over published ratio, less 1. Order: "
    "pairs that differ by more than 15 % of which the faster is named rightly."
)


Line = tuple[float, float]


@dataclass
class Model:
    """One object's workgroup: its time by length, as a line, and the busiest unit's."""

    kernel: Timed
    traces: Mapping[int, Trace]
    line: Line = (0.0, 0.0)
    busiest: Line = (0.0, 0.0)
    matrix: Line = (0.0, 0.0)
    data: Line = (0.0, 0.0)

    def replay(self):
        """Set the lines anew, with the constants as they are."""
        chip = self.kernel.chip
        clock = constant("clock_full", chip)
        for _ in range(4):
            self._replay(clock)
            clock = clock_of(chip, self.active(USUAL), 1.0)
            if self.kernel.column == "fwd":
                return

    def _replay(self, clock_hz: float):
        (n1, first), (n2, second) = (
            (n, replay(trace, clock_hz=clock_hz)[next(iter(trace.streams))])
            for n, trace in self.traces.items()
        )
        self.line = _line(n1, first.clocks, n2, second.clocks)
        most = [max(t.busy[u] for u in ("mfma", "valu", "lds")) for t in (first, second)]
        self.busiest = _line(n1, most[0], n2, most[1])
        matrix = [t.busy["mfma"] for t in (first, second)]
        self.matrix = _line(n1, matrix[0], n2, matrix[1])
        weight = constant("data_power", self.kernel.chip)
        data = [
            (activity(t, self.kernel.chip) * t.clocks - m) / weight
            for t, m in zip((first, second), matrix, strict=True)
        ]
        self.data = _line(n1, data[0], n2, data[1])

    def active(self, length: int) -> float:
        """Mean activity of a compute unit that has a workgroup."""
        matrix, data, clocks = (_at(x, length) for x in (self.matrix, self.data, self.line))
        return (matrix + constant("data_power", self.kernel.chip) * data) / clocks

    def clocks(self, row: Published, line: Line) -> tuple[float, float]:
        """Clocks of the launch, and the share of compute units and time that is busy."""
        count = self.kernel.workgroups(row.batch, row.heads, row.length)
        each, chip = _at(line, row.length), self.kernel.chip
        clocks = makespan([each] * count, chip, 1)
        return clocks, each * count / clocks / constant("compute_units", chip)

    def tflops(self, row: Published, clock_hz: float | None, line: Line) -> float:
        """The speed at some clock; None: at the clock of its power."""
        kernel, memory = self.kernel, constant("hbm_bytes", self.kernel.chip)
        own = kernel.own_bytes(row.batch, row.heads, row.heads_k, row.length) / memory
        other = kernel.other_bytes(row.batch, row.heads, row.length) / memory
        clocks, used = self.clocks(row, line)
        if clock_hz is None:
            clock_hz = clock_of(kernel.chip, self.active(row.length), used)
        seconds = max(clocks / clock_hz, own) + other
        return kernel.flops(row.batch, row.heads, row.length) / seconds / 1e12

    @property
    def role(self) -> str:
        """What the object is for."""
        if self.kernel.label == FIT_ATOMICS:
            return "atomics"
        fits = self.kernel.column in FIT_CLOCK and not self.kernel.causal
        return "clock" if fits else "held out"


def _line(n1: int, t1: float, n2: int, t2: float) -> Line:
    slope = (t2 - t1) / (n2 - n1)
    return t1 - slope * n1, slope


def _at(line: Line, length: int) -> float:
    return line[0] + line[1] * length


def record(root: Path, objdump: str | None) -> list[Model]:
    """Record a workgroup of every object at two lengths."""
    models = []
    for kernel in KERNELS:
        kind = "fwd" if kernel.column == "fwd" else "causal" if kernel.causal else "full"
        traces = {n: kernel.record(root, n, objdump) for n in LENGTHS[kind]}
        models.append(Model(kernel, traces))
        print(kernel.label, sum(t.instructions for t in traces.values()), file=sys.stderr)
    return models


def _bias(model: Model, root: Path, clock_hz: float | None, line: Line) -> float:
    """Median of log(predicted / published)."""
    rows = published(root, model.kernel, SHORTEST)
    return float(np.median([np.log(model.tflops(r, clock_hz, line) / r.tflops) for r in rows]))


def fit_null(models: Iterable[Model], root: Path) -> dict[str, float]:
    """By chip the null model's constant: the clock at which the biases of the two objects sum to 0,
    if nothing but the busiest unit takes time."""
    clocks = {}
    for chip in CHIPS:
        own = [m for m in models if m.kernel.chip == chip and m.role == "clock"]
        low, high = 1e8, 1e10
        while high / low > 1.0001:
            middle = (low * high) ** 0.5
            bias = sum(_bias(m, root, middle, m.busiest) for m in own)
            low, high = (low, middle) if bias > 0 else (middle, high)
        clocks[chip] = low
    return clocks


def _fit_full(models: Iterable[Model], root: Path) -> float:
    """Set each chip's clock at full power so that the biases of its two objects sum to 0; returns
    the sum of the squares of all biases."""
    rest = 0.0
    for chip in CHIPS:
        own = [m for m in models if m.kernel.chip == chip and m.role == "clock"]
        low, high = 1e8, 1e10
        while high / low > 1.0001:
            middle = (low * high) ** 0.5
            _set("clock_full", **{chip: middle})
            bias = sum(_bias(m, root, None, m.line) for m in own)
            low, high = (low, middle) if bias > 0 else (middle, high)
        rest += sum(_bias(m, root, None, m.line) ** 2 for m in own)
    return rest


def fit_power(models: Sequence[Model], root: Path):
    """Set the power of data for which the biases of the four objects are least, and the clocks."""
    weights = np.geomspace(0.02, 1.0, 60)
    rests = []
    for weight in (float(w) for w in weights):
        _set("data_power", weight, weight)
        rests.append(_fit_full(models, root))
    best = float(weights[int(np.argmin(rests))])
    _set("data_power", best, best)
    _fit_full(models, root)


def fit_atomics(models: Iterable[Model], root: Path) -> float:
    """The rate at which the object that fits it has no bias."""
    (model,) = (m for m in models if m.role == "atomics")
    low, high = 1e11, 2e12
    while high / low > 1.004:
        middle = (low * high) ** 0.5
        _set("atomics", middle, middle)
        model.replay()
        low, high = (low, middle) if _bias(model, root, None, model.line) > 0 else (middle, high)
    return low


def _set(name: str, gfx942: float | None = None, gfx950: float | None = None):
    given = {"gfx942": gfx942, "gfx950": gfx950}
    known = {chip: value for chip, value in given.items() if value is not None}
    CONSTANTS[name] = replace(CONSTANTS[name], **known)


def fit(models: Sequence[Model], root: Path):
    """Set and print the fitted constants."""
    for _ in range(2):
        for model in (m for m in models if m.role == "clock"):
            model.replay()
        fit_power(models, root)
        rate = fit_atomics(models, root)
        _set("atomics", rate, rate)
    names = ("clock_full", "data_power", "atomics")
    print({n: [f"{constant(n, chip):.4g}" for chip in CHIPS] for n in names})


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
    nulls = fit_null(models, root)
    results = []
    for m in models:
        chip = m.kernel.chip
        rows = published(root, m.kernel, SHORTEST)
        usual = float(np.median([row.tflops for row in rows]))
        for row in rows:
            own = m.tflops(row, None, m.line)
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
