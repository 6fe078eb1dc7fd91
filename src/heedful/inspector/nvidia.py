"""The same for Hopper: a cubin disassembled by the tools that come inside the Triton wheel.

Cycles are those of one of the four sub-cores of an SM, which issues one warp-instruction a cycle
and computes 32 float lanes, 16 integer lanes or 4 special functions; the tensor cores of the SM do
1024 multiply-adds of 16-bit floats a cycle for the warpgroup that asked.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);?\s*$")
_LABEL = re.compile(r"^(\.L_\w+):")
_BRANCH = re.compile(r"BRA(?:\.\w+)*\s+.*\((\.L_\w+)\)")
_HGMMA = re.compile(r"HGMMA\.64x(\d+)x(\d+)")
_MULTIPLY_ADDS_PER_CYCLE = {8: 512, 16: 1024, 32: 2048}
_FLOAT = {"FADD", "FMUL", "FFMA", "FMNMX", "FSEL", "FSETP", "FADD2", "FFMA2", "FMUL2"}
_SHARED = {"LDS", "STS", "LDSM", "STSM", "ATOMS"}
_GLOBAL = {"LDG", "STG", "LDGSTS", "RED", "ATOMG", "UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP"}


@dataclass(slots=True)
class Sass:
    """Counts of a stretch of code, and cycles of the units that it keeps busy."""

    instructions: int = 0
    hgmma: int = 0
    tensor_cycles: float = 0.0
    floats: int = 0
    mufu: int = 0
    shared: int = 0
    memory: int = 0
    tma: int = 0
    barriers: int = 0
    spills: int = 0
    counts: Counter = field(default_factory=Counter)

    @property
    def mufu_cycles(self) -> int:
        """Cycles of the special-function unit."""
        return 8 * self.mufu


@dataclass(frozen=True, slots=True)
class NvidiaInspection:
    """What was found in one cubin; `loop` is the loop with the most HGMMA, if any."""

    name: str
    label: str
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    whole: Sass
    loop: Sass | None


def tool(name: str) -> Path:
    """Path of cuobjdump or nvdisasm.

    Raises:
        FileNotFoundError: no Triton is installed, or not with this tool.
    """
    spec = importlib.util.find_spec("triton")
    for folder in spec.submodule_search_locations or [] if spec else []:
        path = Path(folder) / "backends" / "nvidia" / "bin" / name
        if path.exists():
            return path
    raise FileNotFoundError(
        f"{name} comes with the Triton wheel for NVIDIA, which is not installed"
    )


def _run(name: str, *arguments: str) -> str:
    command = [str(tool(name)), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def parse_sass(text: str) -> tuple[list[str], dict[str, int], list[tuple[int, str]]]:
    """Instructions, positions of labels, and branches as (position, label) of a listing."""
    code, labels, branches = [], {}, []
    for line in text.splitlines():
        if match := _LABEL.match(line):
            labels[match[1]] = len(code)
        elif match := _LINE.match(line):
            if branch := _BRANCH.search(line):
                branches.append((len(code), branch[1]))
            code.append((match[1] + match[2]).strip())
    return code, labels, branches


def measure(code: Sequence[str]) -> Sass:
    """Count a stretch of code, each instruction once."""
    sass = Sass()
    for text in code:
        name = text.split()[0].split(".")[0]
        sass.instructions += 1
        sass.counts[name] += 1
        if match := _HGMMA.match(text):
            columns, depth = int(match[1]), int(match[2])
            sass.hgmma += 1
            sass.tensor_cycles += 64 * columns * depth / _MULTIPLY_ADDS_PER_CYCLE[depth]
        sass.floats += name in _FLOAT
        sass.mufu += name == "MUFU"
        sass.shared += name in _SHARED
        sass.memory += name in _GLOBAL
        sass.tma += name.startswith("UTMA")
        sass.barriers += name in ("BAR", "SYNCS")
        sass.spills += name in ("LDL", "STL")
    return sass


def _hot_loop(code: list[str], labels: dict[str, int], branches: list[tuple[int, str]]):
    ranges = [(labels[to], at + 1) for at, to in branches if labels.get(to, at + 1) <= at]

    def weight(bounds: tuple[int, int]) -> tuple[int, int]:
        body = code[slice(*bounds)]
        hgmma = sum(text.startswith("HGMMA") for text in body)
        return hgmma, -len(body) if hgmma else len(body)

    return code[slice(*max(ranges, key=weight))] if ranges else None


def inspect_cubin(cubin: bytes, *, shared_bytes: int = 0, label: str = "") -> NvidiaInspection:
    """Inspect the first kernel of a cubin.

    Args:
        shared_bytes: dynamic shared memory of the launch, which the cubin does not say.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, listing = (
            _run("cuobjdump", "-res-usage", file.name),
            _run("nvdisasm", "-c", file.name),
        )
    facts = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    name = re.search(r"Function (\S+):", usage)
    code, labels, branches = parse_sass(listing)
    loop = _hot_loop(code, labels, branches)
    return NvidiaInspection(
        name=name[1] if name else "",
        label=label or (name[1] if name else ""),
        registers=facts.get("REG", 0),
        stack_bytes=facts.get("STACK", 0),
        local_bytes=facts.get("LOCAL", 0),
        shared_bytes=shared_bytes or facts.get("SHARED", 0),
        whole=measure(code),
        loop=measure(loop) if loop is not None else None,
    )


def nvidia_rows(inspections: Sequence[NvidiaInspection]) -> list[list[str]]:
    """Resources and hot loop, one column per kernel; figures are per turn and warp."""
    rows = [["", *(i.label for i in inspections)]]
    for title, name in (
        ("registers", "registers"),
        ("stack bytes", "stack_bytes"),
        ("local bytes", "local_bytes"),
        ("shared bytes", "shared_bytes"),
    ):
        rows.append([title, *(str(getattr(i, name)) for i in inspections)])
    rows.append(["hot loop, per turn and warp", *("" for _ in inspections)])
    names = ("instructions", "hgmma", "tensor_cycles", "floats", "mufu", "mufu_cycles", "shared")
    for name in (*names, "memory", "tma", "barriers", "spills"):
        cells = (f"{getattr(i.loop, name):g}" if i.loop else "-" for i in inspections)
        rows.append([name.replace("_", " "), *cells])
    return rows
