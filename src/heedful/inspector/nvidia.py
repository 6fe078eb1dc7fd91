"""The same for Hopper: a cubin disassembled by the tools that come inside the Triton wheel.

Cycles are those of one of the four sub-cores of an SM, which issues one warp-instruction a cycle
and computes 32 float lanes, 16 integer lanes or 4 special functions; the tensor cores of the SM do
2048 multiply-adds of 16-bit floats a cycle (989 TFLOP/s on 132 SMs at 1.83 GHz, NVIDIA H100 white
paper; Nsight Compute counts the same), and twice as many of 8-bit ones.

How long a warp waits after an instruction before its next, where the assembler knows, is in the
instruction itself (control information, Jia et al., https://arxiv.org/abs/1804.06826).
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

_LINE = re.compile(
    r"^\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);?\s*/\* 0x[0-9a-f]+ \*/$"
)
# The upper half of an instruction, on a line of its own.
_UPPER_HALF = re.compile(r"^\s*/\* 0x([0-9a-f]+) \*/$")
_LABEL = re.compile(r"^(\.L_\w+):")
_BRANCH = re.compile(r"BRA(?:\.\w+)*\s+.*\((\.L_\w+)\)")
_WGMMA = re.compile(r"[HQI]GMMA\.64x(\d+)x(\d+)")
# By the depth of an instruction, which is 32 bytes.
_MULTIPLY_ADDS_PER_CYCLE = {8: 1024, 16: 2048, 32: 4096}
_FLOAT = {"FADD", "FMUL", "FFMA", "FMNMX", "FSEL", "FSETP", "FADD2", "FFMA2", "FMUL2"}
_SHARED = {"LDS", "STS", "LDSM", "STSM", "ATOMS"}
_GLOBAL = {"LDG", "STG", "LDGSTS", "RED", "ATOMG", "UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP"}


@dataclass(slots=True)
class Sass:
    """Counts of a stretch of code, and cycles of the units that it keeps busy. issue_cycles: what
    one warp takes by what the assembler wrote; waits for memory, products and units that other
    warps use come on top. predicated: of `floats`, those that a predicate may turn off and that are
    issued all the same."""

    instructions: int = 0
    issue_cycles: int = 0
    wgmma: int = 0
    tensor_cycles: float = 0.0
    floats: int = 0
    predicated: int = 0
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
class Instruction:
    """An instruction with its predicate, and the cycles until this warp's next."""

    text: str
    cycles: int


@dataclass(frozen=True, slots=True)
class NvidiaInspection:
    """The findings in one cubin; `loop` is the innermost loop with the most WGMMA, if any."""

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


def parse_sass(text: str) -> tuple[list[Instruction], dict[str, int], list[tuple[int, str]]]:
    """Instructions, positions of labels, branches as (position, label)."""
    code: list[Instruction] = []
    labels, branches, pending = {}, [], ""
    for line in text.splitlines():
        if match := _LABEL.match(line):
            labels[match[1]] = len(code)
        elif match := _LINE.match(line):
            if branch := _BRANCH.search(line):
                branches.append((len(code), branch[1]))
            pending = "".join(part or "" for part in match.groups()).strip()
        elif pending and (match := _UPPER_HALF.match(line)):
            code.append(Instruction(pending, max(int(match[1], 16) >> 41 & 15, 1)))
            pending = ""
    return code, labels, branches


def encodings(text: str) -> list[str]:
    """The words of the machine code in a listing, in order."""
    return re.findall(r"/\* (0x[0-9a-f]+) \*/$", text, re.M)


def opcode(instruction: Instruction) -> str:
    """An instruction's operation, with its modifiers and without operands: LDG.E.128."""
    return _parts(instruction.text)[1].split()[0]


def _parts(text: str) -> tuple[str, str]:
    """An instruction's predicate, if any, and the rest."""
    if not text.startswith("@"):
        return "", text
    predicate, _, rest = text.partition(" ")
    return predicate, rest.lstrip()


def measure(code: Sequence[Instruction]) -> Sass:
    """Count a stretch of code, each instruction once."""
    sass = Sass()
    for each in code:
        predicate, instruction = _parts(each.text)
        name = opcode(each).split(".")[0]
        sass.instructions += 1
        sass.issue_cycles += each.cycles
        sass.counts[name] += 1
        if match := _WGMMA.match(instruction):
            columns, depth = int(match[1]), int(match[2])
            sass.wgmma += 1
            sass.tensor_cycles += 64 * columns * depth / _MULTIPLY_ADDS_PER_CYCLE[depth]
        sass.floats += name in _FLOAT
        sass.predicated += name in _FLOAT and bool(predicate)
        sass.mufu += name == "MUFU"
        sass.shared += name in _SHARED
        sass.memory += name in _GLOBAL
        sass.tma += name.startswith("UTMA")
        sass.barriers += name in ("BAR", "SYNCS")
        sass.spills += name in ("LDL", "STL")
    return sass


def hot_loop(
    code: list[Instruction], labels: dict[str, int], branches: list[tuple[int, str]]
) -> list[Instruction] | None:
    """The innermost loop with the most products; without any, the longest loop."""
    products = [_WGMMA.match(_parts(each.text)[1]) is not None for each in code]
    closed: dict[int, list[int]] = {}
    for source, to in branches:
        start = labels.get(to, source + 1)
        if start <= source:
            closed.setdefault(start, []).append(source + 1)
    if not any(any(products[a:b]) for a, ends in closed.items() for b in ends):
        return max((code[a:b] for a, ends in closed.items() for b in ends), key=len, default=None)
    # Several branches may go back to one place. The first that closes all of its products is taken:
    # the code after it is for steps that few need.
    loops: dict[tuple[int, int], int] = {}
    for a, ends in closed.items():
        count, b = max((sum(products[a:b]), -b) for b in ends)
        loops[a, -b] = count
    busy = [bounds for bounds, count in loops.items() if count]
    inner = [(a, b) for a, b in busy if not any(a < c and d <= b for c, d in busy)]
    start, end = max(inner, key=lambda bounds: (loops[bounds], bounds[0] - bounds[1]))
    return code[start:end]


@dataclass(frozen=True, slots=True)
class Listing:
    """The first kernel of a cubin, disassembled. usage: REG, STACK, LOCAL and SHARED."""

    name: str
    usage: dict[str, int]
    text: str


@lru_cache(maxsize=4)
def disassemble(cubin: bytes) -> Listing:
    """The output of cuobjdump and nvdisasm for a cubin, which take up to a second. One that reads a
    kernel asks for it several times in a row."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, text = (
            _run("cuobjdump", "-res-usage", file.name),
            _run("nvdisasm", "-c", "-hex", file.name),
        )
    facts = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    name = re.search(r"Function (\S+):", usage)
    return Listing(name[1] if name else "", facts, text)


def inspect_cubin(cubin: bytes, *, shared_bytes: int = 0, label: str = "") -> NvidiaInspection:
    """Inspect the first kernel of a cubin.

    Args:
        shared_bytes: dynamic shared memory of the launch, which the cubin does not say.
    """
    listing = disassemble(cubin)
    code, labels, branches = parse_sass(listing.text)
    loop = hot_loop(code, labels, branches)
    return NvidiaInspection(
        name=listing.name,
        label=label or listing.name,
        registers=listing.usage.get("REG", 0),
        stack_bytes=listing.usage.get("STACK", 0),
        local_bytes=listing.usage.get("LOCAL", 0),
        shared_bytes=shared_bytes or listing.usage.get("SHARED", 0),
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
    names = ("instructions", "issue_cycles", "wgmma", "tensor_cycles", "floats", "predicated")
    others = ("mufu", "mufu_cycles", "shared", "memory", "tma", "barriers", "spills")
    for name in names + others:
        cells = (f"{getattr(i.loop, name):g}" if i.loop else "-" for i in inspections)
        rows.append([name.replace("_", " "), *cells])
    return rows
