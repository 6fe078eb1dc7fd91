"""Predicts the library's own kernels on MI300X and MI355X, beside what is published for others.

    python -m objects.own [--folder measurements/emulator]

Kernels are compiled here and one workgroup of each launch is run; the figures of ROCm/aiter's
kernels are those of the table that `objects.clock` made.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path

from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.validation.predicted import Predicted, predicted
from objects.timed import CHIPS
from objects.writing import write_table

HEADS, HEADS_K, LENGTH = 64, 8, 4096
_ROWS = Path(__file__).parents[2] / "measurements" / "emulator" / "052-clock-rows.csv"
_METHOD = (
    f"Full forwards in bfloat16, batch 1, {HEADS} query and {HEADS_K} key heads, length {LENGTH}, "
    "log-sum-exp included: TFLOP/s that the clock predicts at the clock of its power, and between "
    "the lowest clock and the highest; how busy MFMA and VALU are. One workgroup runs. Beside it "
    "ROCm/aiter's kernel of head dim 128 at that shape, as the clock predicts it and as it is "
    "published. Remade by python -m objects.own (in tools)."
)
_OTHERS = (
    "Calls of the default (portable) kernels: microseconds that the clock predicts at the clock of "
    "its power, and at the highest clock and the lowest; TFLOP/s; the launches with their shares. "
    "One workgroup of each launch runs. Shapes: batch x queries x keys, query/key heads, head dim. "
    "The fp8 decode has xFormers' cache: e4m3 with a scale for each 32 values and a shift. Beside "
    "it the TFLOP/s that are published for others' kernels at that shape: ROCm/aiter's 16-bit "
    "atomics, and the best of its D64 split-K forwards on an MI300X. Remade by python -m "
    "objects.own (in tools)."
)
_UNITS = ("mfma", "valu", "lds")
# Of the split-K forward, D64 in bfloat16: batch, queries, keys, heads, and published for gfx942.
_SPLIT = [(1, 40000, 40000, 2, "412"), (1, 128, 65535, 16, "174"), (1, 32768, 32768, 8, "443")]
_SPLIT += [(8, 8192, 8192, 16, "")]


def forward(arch: str, backend: str, dim: int) -> Predicted:
    """The one launch of a forward."""
    shape = (1, LENGTH, LENGTH, HEADS, HEADS_K, dim)
    problem = AttentionProblem.dense(*shape, return_lse=True, num_splits=1)
    return predicted(plan(problem, by_name(CHIPS[arch]), backend=backend), "forward")


def peer(arch: str, column: str) -> list[str]:
    """A kernel of aiter's: what was predicted, and what it publishes."""
    lines = [line for line in _ROWS.read_text().splitlines() if not line.startswith("#")]
    shape = ["1", str(HEADS), str(HEADS_K), str(LENGTH)]
    for row in csv.DictReader(lines):
        same = [row[n] for n in ("batch", "heads", "kv heads", "length")] == shape
        if same and row["object"] == f"{arch} {column} full":
            return [row["predicted"], row["published"]]
    raise ValueError(f"{_ROWS.name} has no {column} of {arch} at {shape}")


def line(arch: str, backend: str, dim: int) -> list[str]:
    """A row of the table of forwards."""
    told = forward(arch, backend, dim)
    ((_, launch),) = told.launches
    flops = 4 * HEADS * LENGTH**2 * dim / 1e12
    busy = [f"{100 * launch.timing.busy[u] / launch.timing.clocks:.0f} %" for u in _UNITS]
    speeds = [f"{flops / s:.0f}" for s in (told.seconds, told.high, told.low)]
    other = peer(arch, "fwd") if dim == 128 else ["", ""]
    return [arch, backend, str(dim), *speeds, *busy, str(launch.resident), *other]


def calls(arch: str) -> Iterator[tuple[str, AttentionProblem, str, float, str]]:
    """Name, problem, direction, floating-point operations, what is published."""
    shape = (1, LENGTH, LENGTH, HEADS, HEADS_K, 128)
    trained = AttentionProblem.dense(*shape, needs_grad=True)
    flops = 10 * HEADS * LENGTH**2 * 128
    yield f"backward {_words(shape)}", trained, "backward", flops, peer(arch, "a16")[1]
    for batch, queries, keys, heads, known in _SPLIT:
        shape = (batch, queries, keys, heads, heads, 64)
        flops = 4 * batch * heads * queries * keys * 64
        name = f"forward {_words(shape)}"
        known = known if arch == "gfx942" else ""
        yield name, AttentionProblem.dense(*shape), "forward", flops, known
    shape = (8, 1, 8192, 8, 1, 128)
    problem = AttentionProblem.dense(*shape)
    flops = 4 * 8 * 8 * 8192 * 128
    yield f"decode {_words(shape)}", problem, "forward", flops, ""
    cache = AttentionProblem.dense(*shape, kv_dtype="float8_e4m3fn", kv_group=32, kv_shift=True)
    yield f"decode {_words(shape)}, fp8 cache", cache, "forward", flops, ""


def _words(shape: tuple[int, ...]) -> str:
    batch, queries, keys, heads, heads_k, dim = shape
    return f"{batch} x {queries} x {keys}, {heads}/{heads_k}, {dim}"


def others(arch: str) -> Iterator[list[str]]:
    """The rows of the other table."""
    for name, problem, direction, flops, known in calls(arch):
        told = predicted(plan(problem, by_name(CHIPS[arch])), direction)
        times = [f"{1e6 * s:.1f}" for s in (told.seconds, told.low, told.high)]
        shares = ", ".join(f"{n} {100 * p.seconds / told.seconds:.0f} %" for n, p in told.launches)
        yield [arch, name, *times, f"{flops / told.seconds / 1e12:.0f}", shares, known]


def main() -> int:
    """Print the rows, and write them if a folder is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    lines, rest = [], []
    for arch in CHIPS:
        for backend in ("cdna", "portable"):
            for dim in (64, 128):
                lines.append(line(arch, backend, dim))
                print(*lines[-1], sep=" | ", flush=True)
        for row in others(arch):
            rest.append(row)
            print(*row, sep=" | ", flush=True)
    head = ["chip", "kernel", "head dim", "predicted", "low", "high", "MFMA", "VALU", "LDS"]
    head += ["workgroups a unit", "aiter predicted", "aiter published"]
    if options.folder:
        write_table(options.folder / "054-own.csv", "Own forwards", _METHOD, head, lines)
        head = ["chip", "call", "us", "at the highest clock", "at the lowest", "TFLOP/s"]
        head += ["launches", "published"]
        path = options.folder / "056-own-others.csv"
        write_table(path, "Own backward, decodes and split keys", _OTHERS, head, rest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
