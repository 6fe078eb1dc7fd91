"""Runs the attention forwards of HipKittens and FlyDSL, and holds the clock against the speeds that
HipKittens publishes for an MI355X.

    python -m objects.forwards PATH_TO_HIPKITTENS PATH_TO_AITER --hipcc COMMAND --flydsl FOLDER
        [--objdump FILE] [--folder measurements/emulator]

COMMAND compiles for gfx950 as HipKittens' Makefile does, without bundling (hipcc --genco
--no-gpu-bundle-output --offload-arch=gfx950 ...), and is given -D options, -o OUT and a source. Its
kernels are specialised by length, so that each is compiled, and one head of it run, at every length
that is published. FOLDER has full.s and causal.s, the assembly that FlyDSL's
`build_flash_attn_dualwave_swp_module(4, 128, causal, num_kv_heads=2)` leaves with COMPILE_ONLY=1,
FLYDSL_DUMP_IR=1 and FLYDSL_DEBUG_DUMP_ASM=1.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from heedful.emulator import emulate, load_object
from heedful.emulator.clock.constants import constant
from heedful.emulator.clock.grid import activity, clock_of, makespan, replay
from heedful.emulator.clock.trace import Recorder
from objects.clock import LENGTHS, SHORTEST, Model
from objects.problems import UNITS, Operands, Problem, forward, scores, softmax, unwritten
from objects.timed import KERNELS, Published, Timed
from objects.writing import write_table

CHIP, TILE, LDS = "gfx950", 256, 160000
LARGEST_COMPARED = 512
FLYDSL, MADE = "FlyDSL", (4, 2)
FOLDER = Path("analysis/attn/fwd/benchmark")
# Query and key heads of the published rows, by the name in their files.
HEADS = {"gqa": (64, 8), "mha": (16, 16)}
ORDERS = [(s, e) for e in (False, True) for s in ("lockstep", "round-robin", "delay:halves")]
VERSIONS = "HazyResearch/HipKittens and ROCm/FlyDSL of 2026-11, clang 22.1.8; ROCm/aiter"
_RIGHT = (
    "Forwards for gfx950 in bfloat16: HipKittens' compiled by clang 22 (ROCm's own was not at "
    "hand), those of FlyDSL 0.5 by its own compiler; 1 x 512, 4:2 heads, against float64 as the "
    "table of aiter's objects. Orders of the waves are lockstep, round-robin and delay:halves, "
    "each with loads to LDS that land late and at once. Findings: of all orders, other than wait "
    "states. Remade by python -m objects.forwards (in tools)."
)
_ROWS = (
    "TFLOP/s that HipKittens publishes for an MI355X (analysis/attn, bfloat16) beside what the "
    "frozen clock predicts for its kernels, named after the freeze: they fit nothing. Its figures "
    "contain the host's call, and aiter measured by it is below aiter's own figures; so the ratio "
    "to aiter's kernel on the same machine stands beside it, in which clock and machine cancel. "
    "aiter's own kernels of D192 are those of its pull request 3390, beside its D128 there. "
    "FlyDSL publishes no dense speeds of such lengths. Error: predicted over published, less 1. "
    "Remade by python -m objects.forwards (in tools)."
)


# aiter's kernels of head dims 192 and 128, by mask: batch, query and key heads, length, TFLOP/s in
# its pull request 3390, and there of the kernel of head dim 128.
WIDE = {
    False: [(4, 64, 8, 8192, 1378, 1390), (1, 16, 16, 16384, 1348, 1333)],
    True: [(4, 64, 8, 8192, 1298, 1278), (1, 16, 16, 16384, 1238, 1231)],
}


class Wide(Timed):
    """aiter's kernel of head dims 192 and 128."""

    @property
    def tile(self) -> int:
        """Rows of queries of a workgroup."""
        return 128

    def problem(self, length: int) -> Problem:
        """As for the others."""
        other = length if self.causal else self.tile
        facts = {"heads": 8, "heads_k": 8, "dims": (192, 128), "tile": self.tile}
        return forward(CHIP, [other], [length], causal=self.causal, reference=False, **facts)

    def flops(self, batch: int, heads: int, length: int) -> float:
        """As the publisher counts them."""
        return 2 * (192 + 128) * batch * heads * length**2 / (2 if self.causal else 1)


@dataclass(frozen=True)
class Forward:
    """One of them. library: HipKittens or FlyDSL."""

    library: str
    dim: int
    causal: bool

    @property
    def label(self) -> str:
        """Library, head dim and mask in words."""
        return f"{self.library} D{self.dim} {self.mask}"

    @property
    def mask(self) -> str:
        """In a word."""
        return "causal" if self.causal else "full"

    @property
    def source(self) -> Path:
        """Below HipKittens' checkout, or FlyDSL's folder."""
        if self.library == FLYDSL:
            return Path(f"{self.mask}.s")
        mask = "causal" if self.causal else "non_causal"
        return FOLDER / f"attn_fwd_{mask}{'' if self.dim == 128 else '_d64'}.cpp"

    def problem(self, length: int) -> Problem:
        """One sequence; `arguments` places its tensors."""
        make, (heads, heads_k) = Operands(CHIP).make, MADE
        (q, qf), (k, kf), (v, vf) = (
            make("bf16", 1, length, n, self.dim) for n in (heads, heads_k, heads_k)
        )
        o, lse = unwritten(1, length, heads, self.dim), np.full((1, heads, 1, length), np.nan, "f4")
        wanted = np.zeros(o.shape)
        if length <= LARGEST_COMPARED:
            other = [np.repeat(x[0].swapaxes(0, 1), heads // heads_k, 0) for x in (kf, vf)]
            s = scores(qf[0].swapaxes(0, 1), other[0], self.dim**-0.5, self.causal)
            wanted[0] = (softmax(s)[0] @ other[1]).swapaxes(0, 1)
        outputs = {"o": (o, "bf16", wanted, UNITS["bf16"])}
        return Problem((heads, length // TILE, 1), [q, k, v, o, lse], outputs, 512)

    def arguments(self, problem: Problem) -> dict[str, Any]:
        """By offset. HipKittens takes five tensors, each a pointer and four sizes; FlyDSL twelve,
        of which four count here and only by their pointers, then lengths and strides."""
        q, k, *_ = tensors = problem.slots
        if self.library == FLYDSL:
            length, row, row_k = q.shape[1], q.shape[2] * self.dim, k.shape[2] * self.dim
            numbers = (length, length, row, row_k, self.dim, 0, 0, 0)
            given = {f"@{48 * i}": tensor for i, tensor in enumerate(tensors[:4])}
            return given | {f"@{576 + 4 * i}": np.int32(n) for i, n in enumerate(numbers)}
        given = {}
        for i, tensor in enumerate(tensors):
            given[f"@{48 * i}"] = tensor
            given |= {f"@{48 * i + 8 + 8 * j}": np.int64(n) for j, n in enumerate(tensor.shape)}
        return given


@dataclass(frozen=True)
class Built:
    """Where sources are, and how objects are made of them."""

    root: Path
    flydsl: Path
    hipcc: str
    objdump: str | None

    def code(self, kernel: Forward, length: int) -> Any:
        """A kernel for a length and 4:2 heads."""
        if kernel.library == FLYDSL:
            return (self.flydsl / kernel.source).read_text()
        heads, heads_k = MADE
        facts = {"B": 1, "N": length, "H": heads, "H_KV": heads_k, "D": kernel.dim}
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "kernel.co"
            options = [f"-DATTN_{name}={n}" for name, n in facts.items()]
            command = [*shlex.split(self.hipcc), *options, "-o", made, self.root / kernel.source]
            subprocess.run(command, check=True)
            return load_object(made, objdump=self.objdump)


def right(built: Built, kernel: Forward) -> list[str]:
    """The line of a kernel in the table of results."""
    code, count, worst, kinds = built.code(kernel, LARGEST_COMPARED), 0, (0.0, 1.0), set()
    for schedule, early in ORDERS:
        problem = kernel.problem(LARGEST_COMPARED)
        options = {"schedule": schedule, "early_loads": early, "strict": False, "lds_bytes": LDS}
        report = emulate(code, problem.grid, kernel.arguments(problem), **options)
        error, bound = problem.errors()["o"]
        count += error <= bound
        worst = max(worst, (error, bound))
        kinds |= {f.kind for f in report.findings if f.kind != "wait-states"}
    right_of = f"{count} of {len(ORDERS)}"
    error = f"o {worst[0]:.1e} of {worst[1]:.1e}"
    return [kernel.label, str(kernel.source.name), error, right_of, ", ".join(sorted(kinds))]


@cache
def workgroups(built: Built, kernel: Forward, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Clocks of the workgroup of each tile of queries, and its power: linear in its place where a
    mask cuts it."""
    code, problem = built.code(kernel, length), kernel.problem(length)
    tiles = length // TILE
    places = sorted({0, tiles // 2, tiles - 1}) if kernel.causal else [0]
    recorder = Recorder([(0, y, 0) for y in places])
    options = {"checks": (), "recorder": recorder, "lds_bytes": LDS}
    report = emulate(code, problem.grid, kernel.arguments(problem), **options)
    timings = replay(recorder.trace(report))
    told = [timings[0, y, 0] for y in places]
    clocks = np.interp(range(tiles), places, [t.clocks for t in told])
    active = np.interp(range(tiles), places, [t.clocks * activity(t, CHIP) for t in told])
    return clocks, active


def predicted(built: Built, kernel: Forward, length: int, batch: int, heads: int) -> float:
    """TFLOP/s of a launch, whose grid has heads first, then tiles, then sequences."""
    lengths, active = workgroups(built, kernel, length)
    clocks = makespan(np.tile(np.repeat(lengths, heads), batch).tolist(), CHIP, 1)
    total = float(lengths.sum()) * heads * batch
    used = total / clocks / constant("compute_units", CHIP)
    clock = clock_of(CHIP, float(active.sum() / lengths.sum()), used)
    return flops(kernel, length, batch, heads) / (clocks / clock) / 1e12


def flops(kernel: Forward, length: int, batch: int, heads: int) -> float:
    """As the publisher counts them."""
    return 4 * batch * heads * length**2 * kernel.dim / (2 if kernel.causal else 1)


def published(root: Path, kernel: Forward) -> Iterator[tuple[str, int, int, float, float]]:
    """Heads by name, length, batch, TFLOP/s of the kernel and of aiter on that machine, 0 where
    there is none."""
    if kernel.library == FLYDSL:
        yield from (("gqa", n, 16, 0.0, 0.0) for n in (4096, 8192, 16384))
        return
    for name, (heads, _) in HEADS.items():
        mask = "causal" if kernel.causal else "non_causal"
        dim = "" if kernel.dim == 128 else "d64_"
        for row in json.loads(
            (root / FOLDER / f"mi355x_{dim}{name}_{mask}_fwd.json").read_text()
        ).values():
            done = row["tflops"] * row["avg_time"] * 1e9
            batch = round(done / flops(kernel, row["N"], 1, heads))
            if row["N"] >= SHORTEST:
                yield name, row["N"], batch, row["tflops"], row["tflops_ref"]


def modelled(kernel: Timed, aiter: Path, objdump: str | None) -> Model:
    """The model of one of aiter's forwards."""
    model = Model(kernel, {n: kernel.record(aiter, n, objdump) for n in LENGTHS["fwd"]})
    model.replay()
    return model


def peers(aiter: Path, objdump: str | None) -> dict[bool, Model]:
    """The models of aiter's forwards of head dim 128, by mask."""
    known = [k for k in KERNELS if k.chip == CHIP and k.column == "fwd"]
    return {kernel.causal: modelled(kernel, aiter, objdump) for kernel in known}


def wide(aiter: Path, objdump: str | None, models: dict[bool, Model]) -> Iterator[list[str]]:
    """The rows of head dim 192."""
    for causal, rows in WIDE.items():
        file = f"fmha_v3_fwd/fwd_hd192_hd128_bf16{'_causal' if causal else ''}.co"
        model = modelled(Wide(CHIP, "fwd", causal, file), aiter, objdump)
        for batch, heads, heads_k, length, speed, other in rows:
            row = Published(batch, heads, heads_k, length, speed)
            own = model.tflops(row, None, model.line)
            shape = f"{batch} x {length}, {heads}/{heads_k}"
            label = f"aiter D192 {'causal' if causal else 'full'}"
            yield [label, shape, *compared(speed, own), *related(models[causal], row, own, other)]


def compared(speed: float, own: float) -> list[str]:
    """What is published, what is predicted, the error."""
    return [f"{speed:.0f}", f"{own:.0f}", f"{100 * (own / speed - 1):+.1f} %"]


def related(model: Model, row: Published, own: float, other: float) -> list[str]:
    """The cells of a ratio to aiter's kernel, which was measured beside the row."""
    peer = model.tflops(row, None, model.line)
    ratio, error = row.tflops / other, (own / peer) / (row.tflops / other) - 1
    return [f"{other:.0f}", f"{peer:.0f}", f"{ratio:.3f}", f"{100 * error:+.1f} %"]


def line(built: Built, kernel: Forward, row: tuple, model: Model | None) -> list[str]:
    """One row of the table of speeds."""
    name, length, batch, speed, other = row
    heads, heads_k = HEADS[name]
    own = predicted(built, kernel, length, batch, heads)
    cells = [kernel.label, f"{batch} x {length}, {heads}/{heads_k}"]
    if not speed:
        return [*cells, "", f"{own:.0f}", "", "", "", "", ""]
    cells += compared(speed, own)
    if model is None:
        return [*cells, "", "", "", ""]
    return cells + related(model, Published(batch, heads, heads_k, length, speed), own, other)


def write(folder: Path, results: Sequence[Sequence[str]], rows: Sequence[Sequence[str]]):
    """Both tables."""
    head = ["kernel", "source", "error", "right", "findings"]
    write_table(
        folder / "044-forwards.csv", "Forwards of HipKittens and FlyDSL", _RIGHT, head, results
    )
    head = ["kernel", "shape", "published", "predicted", "error", "aiter there", "aiter predicted"]
    head += ["published ratio", "error of the ratio"]
    path = folder / "058-forwards.csv"
    write_table(path, "The clock and others' forwards", _ROWS, head, rows, VERSIONS)


def main() -> int:
    """Run, predict, print and write; 1 if a kernel was wrong under lockstep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("aiter", type=Path)
    parser.add_argument("--hipcc", required=True)
    parser.add_argument("--flydsl", type=Path, required=True)
    parser.add_argument("--objdump")
    parser.add_argument("--folder", type=Path, help="where to write; without it nothing is")
    options = parser.parse_args()
    built = Built(options.path, options.flydsl, options.hipcc, options.objdump)
    kernels = [Forward("HipKittens", d, causal) for d in (128, 64) for causal in (False, True)]
    kernels += [Forward(FLYDSL, 128, causal) for causal in (False, True)]
    results, rows, models = [], [], peers(options.aiter, options.objdump)
    for kernel in kernels:
        results.append(right(built, kernel))
        print(*results[-1], sep=" | ", flush=True)
        for row in published(options.path, kernel):
            model = models[kernel.causal] if kernel.dim == 128 else None
            rows.append(line(built, kernel, row, model))
            print(*rows[-1], sep=" | ", flush=True)
    for cells in wide(options.aiter, options.objdump, models):
        rows.append(cells)
        print(*cells, sep=" | ", flush=True)
    if options.folder:
        write(options.folder, results, rows)
    return int(any(result[3].startswith("0") for result in results))


if __name__ == "__main__":
    sys.exit(main())
