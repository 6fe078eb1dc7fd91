"""The kernels whose speeds ROCm/aiter publishes: objects, problems of one workgroup, rows.

`op_tests/cpp/mha/README.md` has TFLOP/s by shape, with head dim 128, bfloat16 and lengths of
queries and keys that are the same. Its commands say which conversion to bfloat16 each kernel has:
the forward's default is 1 (rtna), the backward's line sets 2 (rtz).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from heedful.emulator import emulate, load_object
from heedful.emulator.clock.trace import Recorder, Trace
from objects.problems import Problem, backward, forward

CHIPS = {"gfx942": "MI300X", "gfx950": "MI355X"}
_FWD = {"gfx942": "fmha_v3_fwd/MI300/fwd_hd128_bf16{}_rtna.co", "gfx950": "fwd_hd128_bf16{}.co"}
_HEADS = 8  # of the problems that are recorded: causal ones take another path for fewer


@dataclass(frozen=True)
class Timed:
    """One object: its chip, which column publishes it, whether causal, its file below hsa/CHIP."""

    chip: str
    column: str
    causal: bool
    file: str

    @property
    def tile(self) -> int:
        """Rows of queries (forward) or keys (backward) of a workgroup."""
        return 192 if self.column != "fwd" and self.chip == "gfx942" else 256

    @property
    def label(self) -> str:
        """Chip, column and mask in words."""
        return f"{self.chip} {self.column} {'causal' if self.causal else 'full'}"

    def problem(self, length: int) -> Problem:
        """A problem whose first workgroups run as in a launch of that length."""
        other = length if self.causal else self.tile
        if self.column == "fwd":
            lengths = {"lengths_q": [other], "lengths_k": [length]}
            build = partial(forward, self.chip, heads_k=_HEADS, **lengths)
        else:
            lengths = {"sq": length, "sk": other, "atomic": int(self.column[1:])}
            build = partial(backward, self.chip, heads_k=_HEADS, **lengths)
        return build(heads=_HEADS, causal=self.causal, tile=self.tile, reference=False)

    def record(self, root: Path, length: int, objdump: str | None) -> Trace:
        """The first workgroup of a launch of that length."""
        code = load_object(root / "hsa" / self.chip / self.file, objdump=objdump)
        problem, recorder = self.problem(length), Recorder([(0, 0, 0)])
        options = {"threads": problem.threads, "checks": (), "recorder": recorder}
        report = emulate(code, problem.grid, problem.arguments(), **options)
        return recorder.trace(report)

    def workgroups(self, batch: int, heads: int, length: int) -> int:
        """Of a launch; a causal one takes two tiles, the first with the last."""
        tiles = -(-length // self.tile)
        return (-(-tiles // 2) if self.causal else tiles) * heads * batch

    def flops(self, batch: int, heads: int, length: int) -> float:
        """As the publisher counts them."""
        products = 4 if self.column == "fwd" else 10
        return products * batch * heads * length**2 * 128 / (2 if self.causal else 1)

    def other_bytes(self, batch: int, heads: int, length: int) -> float:
        """That the kernels before and after move: out and dout are read; dq is brought from
        float32 to bfloat16, or from one order to another."""
        if self.column == "fwd":
            return 0.0
        after = 6 if self.column == "a32" else 4 if self.chip == "gfx950" else 0
        return (4 + after) * batch * heads * length * 128

    def own_bytes(self, batch: int, heads: int, heads_k: int, length: int) -> float:
        """That the kernel must move once."""
        tensors = 2 * heads + 2 * heads_k if self.column == "fwd" else 3 * heads + 4 * heads_k
        return 2 * tensors * batch * length * 128


def _kernels() -> Iterator[Timed]:
    for chip in CHIPS:
        for causal in (False, True):
            mask = "_causal" if causal else ""
            forward_file = _FWD[chip].format(mask)
            yield Timed(chip, "fwd", causal, forward_file.removeprefix("fmha_v3_fwd/"))
            for column in ("a16", "a32"):
                end = "psskddv" if chip == "gfx950" else "rtz"
                end = "rtz_psskddv" if chip == "gfx942" and column == "a32" else end
                yield Timed(chip, column, causal, f"bwd_hd128_bf16{mask}_{column}_{end}.co")


def _placed(kernel: Timed) -> Timed:
    folder = "fmha_v3_fwd" if kernel.column == "fwd" else "fmha_v3_bwd"
    return Timed(kernel.chip, kernel.column, kernel.causal, f"{folder}/{kernel.file}")


KERNELS: Sequence[Timed] = [_placed(kernel) for kernel in _kernels()]


@dataclass(frozen=True)
class Published:
    """One figure: the shape and TFLOP/s."""

    batch: int
    heads: int
    heads_k: int
    length: int
    tflops: float


def published(root: Path, kernel: Timed, shortest: int) -> list[Published]:
    """The rows of one kernel, of lengths from `shortest`."""
    text = (root / "op_tests/cpp/mha/README.md").read_text()
    place = 7 + 2 * ("fwd", "a16", "a32").index(kernel.column) + list(CHIPS).index(kernel.chip)
    rows = []
    for line in re.findall(r"^\|(\s*\d.*)\|\s*$", text, re.M):
        cells = [cell.strip() for cell in line.split("|")]
        batch, heads, heads_k, length = map(int, cells[:4])
        if int(cells[6]) == kernel.causal and length >= shortest:
            rows.append(Published(batch, heads, heads_k, length, float(cells[place])))
    return rows
