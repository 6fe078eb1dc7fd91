"""Predicts the library's own forwards on MI300X and MI355X, beside ROCm/aiter's at the same shape.

    python -m objects.own [--folder measurements/emulator]

Kernels are compiled here and one workgroup of each is run; aiter's figures are those of the table
that `objects.clock` made.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import torch

from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.emulator import At, predict_time
from heedful.emulator.clock.grid import Prediction
from heedful.launch import compiler
from heedful.launch.program.programs import program
from heedful.launch.spec import Pointer, Scalar
from heedful.torch.base.arrays import array_spec
from objects.timed import CHIPS
from objects.writing import write_table

HEADS, HEADS_K, LENGTH = 64, 8, 4096
_ROWS = Path(__file__).parents[2] / "measurements" / "emulator" / "052-clock-rows.csv"
_METHOD = (
    f"Full forwards in bfloat16, batch 1, {HEADS} query and {HEADS_K} key heads, length {LENGTH}, "
    "log-sum-exp included: TFLOP/s that the clock predicts at its fitted clock, and between the "
    "lowest clock and the highest; how busy MFMA and VALU are. One workgroup runs. Beside it "
    "ROCm/aiter's kernel of head dim 128 at that shape, as the clock predicts it and as it is "
    "published. Remade by python -m objects.own (in tools)."
)


def forward(arch: str, backend: str, dim: int) -> Prediction:
    """The one launch of a forward."""
    q, out = (torch.randn(1, LENGTH, HEADS, dim).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, LENGTH, HEADS_K, dim).bfloat16() for _ in range(2))
    kinds = ("bfloat16",) * 3
    sizes = (1, HEADS, HEADS_K, LENGTH, LENGTH, dim, dim)
    problem = AttentionProblem(*sizes, *kinds, scale=dim**-0.5, return_lse=True, num_splits=1)
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": torch.zeros(problem.lse_shape)}
    chosen = plan(problem, by_name(CHIPS[arch]), backend=backend)
    made = program(chosen, "forward", {name: array_spec(t) for name, t in tensors.items()})
    (call,) = made.calls
    artifact = compiler.artifact(call, arch)
    octets = {name: t.reshape(-1).view(torch.uint8).numpy() for name, t in tensors.items()}
    args = []
    for parameter in artifact.parameters:
        match call.arguments.get(parameter.name):
            case Pointer(buffer=name):
                args.append(At(octets[name], 0))
            case Scalar(value=value):
                args.append(float(value) if parameter.type == "fp32" else int(value))
            case _:
                args.append(None)
    moved = sum(t.nbytes for t in octets.values())
    return predict_time(artifact, call.grid, args, checks=(), memory_bytes=moved)[0]


def peer(arch: str) -> list[str]:
    """What was predicted for aiter's forward, and what it publishes."""
    lines = [line for line in _ROWS.read_text().splitlines() if not line.startswith("#")]
    shape = ["1", str(HEADS), str(HEADS_K), str(LENGTH)]
    for row in csv.DictReader(lines):
        same = [row[n] for n in ("batch", "heads", "kv heads", "length")] == shape
        if same and row["object"] == f"{arch} fwd full":
            return [row["predicted"], row["published"]]
    raise ValueError(f"{_ROWS.name} has no full forward of {arch} at {shape}")


def line(arch: str, backend: str, dim: int) -> list[str]:
    """A row of the table."""
    prediction = forward(arch, backend, dim)
    flops = 4 * HEADS * LENGTH**2 * dim / 1e12
    fastest, slowest = prediction.range
    busy = [f"{100 * prediction.timing.busy[u] / prediction.timing.clocks:.0f} %" for u in _UNITS]
    speeds = [f"{flops / s:.0f}" for s in (prediction.seconds, slowest, fastest)]
    other = peer(arch) if dim == 128 else ["", ""]
    return [arch, backend, str(dim), *speeds, *busy, str(prediction.resident), *other]


_UNITS = ("mfma", "valu", "lds")


def main() -> int:
    """Print the rows, and write them if a folder is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    lines = []
    for arch in CHIPS:
        for backend in ("cdna", "portable"):
            for dim in (64, 128):
                lines.append(line(arch, backend, dim))
                print(*lines[-1], sep=" | ", flush=True)
    head = ["chip", "kernel", "head dim", "predicted", "low", "high", "MFMA", "VALU", "LDS"]
    head += ["workgroups a unit", "aiter predicted", "aiter published"]
    if options.folder:
        write_table(options.folder / "054-own.csv", "Own forwards", _METHOD, head, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
