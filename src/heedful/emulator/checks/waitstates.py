"""Wait states: how far apart two instructions must be where the hardware does not make them wait.

A static check over every path of the program, since the distance does not depend on data. A wait
state is one issued instruction; `s_nop n` counts n + 1. The distances are those of the CDNA3 and
CDNA4 ISA guides ("Manually Inserted Wait States", "Dependency Resolution: Required Independent
Instructions"), read together with what LLVM's hazard recogniser for gfx942 and gfx950 inserts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from heedful.emulator.program.asm import (
    EXEC,
    KEPT_LINES,
    M0,
    SGPR,
    VCC,
    Instruction,
    Program,
    parse_instruction,
)
from heedful.emulator.program.dataflow import Flow, flow, is_dma

_TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rcp_iflag|rsq|sqrt|sin|cos)_f(16|32|64)")
_LANE_ACCESS = re.compile(r"v_(readlane|readfirstlane|writelane)_b32")
_DPP = re.compile(r"(quad_perm|row_\w+|wave_\w+)$")
_MFMA = re.compile(r"v_mfma_(?:scale_)?(f32|i32|f64)_(\d+)x\d+x(\d+)_?(\w+)")
_LONGEST = 20  # no rule reaches further
# Rules that kernels break which AMD ships and which are right on the chips: see docs/emulator.md.
ADVICE = frozenset(
    {
        "m0 read by a load to LDS",
        "scalar from a vector instruction read by a vector instruction",
        "vector result read by a lane swap",
        "vector result read by an MFMA",
        "MFMA result read",
    }
)


@dataclass(frozen=True, slots=True)
class Violation:
    """Two instructions that are closer than they may be."""

    producer: Instruction
    consumer: Instruction
    needed: int
    found: int
    reason: str

    @property
    def is_advice(self) -> bool:
        """The rule is one that shipped kernels break."""
        return self.reason in ADVICE


class Shape:
    """The facts about one instruction that the rules ask for."""

    def __init__(self, instruction: Instruction, flows: Flow, arch: str):
        self.instruction, self.arch = instruction, arch
        self.name = name = instruction.base
        self.is_mfma = name.startswith("v_mfma")
        self.is_vector = name.startswith("v_") and name != "v_nop"
        self.is_lds = name.startswith("ds_")
        self.is_vmem = bool(re.match(r"(global|buffer|flat|scratch)_", name))
        self.is_memory = self.is_lds or self.is_vmem
        self.is_dot = name.startswith("v_dot")
        self.is_transcendental = bool(_TRANSCENDENTAL.fullmatch(name))
        self.is_lane_access = bool(_LANE_ACCESS.fullmatch(name))
        self.is_dpp = any(_DPP.match(k) for k in instruction.mods) or "_dpp" in instruction.mnemonic
        self.is_permlane = name.startswith("v_permlane")
        self.reads, self.writes = flows.reads, flows.writes
        self.states = 1
        if name == "s_nop" and instruction.operands:
            self.states = instruction.operands[0].bits(16) + 1

    @cached_property
    def vector_writes(self) -> frozenset[int]:
        """VGPRs and AGPRs written."""
        return frozenset(s for s in self.writes if s < SGPR)

    @cached_property
    def scalar_writes(self) -> frozenset[int]:
        """SGPRs written, vcc and exec included."""
        return frozenset(s for s in self.writes if SGPR <= s < SGPR + 128)

    @cached_property
    def scalar_reads(self) -> frozenset[int]:
        """SGPRs read; exec counts only where a rule names it."""
        exec_slots = (EXEC, EXEC + 1)
        return frozenset(s for s in self.reads if s >= SGPR and s not in exec_slots)

    @cached_property
    def passes(self) -> int:
        """Passes of an MFMA: four cycles each."""
        match = _MFMA.fullmatch(self.name)
        if not match:
            return 16
        out, m, k, kind = match[1], int(match[2]), int(match[3]), match[4]
        if m == 4:
            return 4 if out == "f64" else 2
        if out == "f64":
            return 16 if self.arch == "gfx950" else 8
        base = 4 if m == 16 else 8
        if kind == "f32":
            return 2 * base
        if kind == "xf32":
            return base
        if kind == "f8f6f4":
            mods = self.instruction.mods
            wide = any(mods.get(key, 0) < 2 for key in ("cbsz", "blgp"))
            return 2 * base if wide else base
        return base if k * m * m >= 4096 else 2 * base

    @cached_property
    def is_double(self) -> bool:
        """A float64 MFMA."""
        return self.name.startswith("v_mfma_f64")

    @cached_property
    def is_single(self) -> bool:
        """A float32 MFMA, which runs on another unit than the narrow formats."""
        return self.is_mfma and self.name.endswith("_f32") and "xf32" not in self.name

    @cached_property
    def narrow(self) -> bool:
        """An MFMA of a format narrower than float32."""
        return self.is_mfma and not self.is_double and not self.is_single

    @cached_property
    def addend(self) -> frozenset[int]:
        """Slots of an MFMA's C."""
        return frozenset(self.instruction.operands[3].slots) if self.is_mfma else frozenset()

    @cached_property
    def factors(self) -> frozenset[int]:
        """Slots of an MFMA's A, B and scales."""
        if not self.is_mfma:
            return frozenset()
        operands = self.instruction.operands
        parts = (*operands[1:3], *operands[4:6])
        return frozenset(s for operand in parts for s in operand.slots)

    @cached_property
    def shifts_result(self) -> bool:
        """The result is moved into another part of its register on the way."""
        mods = self.instruction.mods
        if self.is_mfma or self.name.startswith("v_pk_"):
            return False
        selects = mods.get("op_sel", [0])
        moved = self.is_vector and len(selects) > 1 and selects[-1] == 1
        return moved or mods.get("dst_sel", "DWORD") != "DWORD"

    @cached_property
    def wide_store_data(self) -> frozenset[int]:
        """Data registers of a store of more than 64 bits."""
        if not re.search(r"_store_dwordx[34]$", self.name):
            return frozenset()
        position = 0 if self.name.startswith("buffer") else 1
        return frozenset(self.instruction.operands[position].slots)

    def selects_lane_by(self, slots: frozenset[int]) -> bool:
        """The lane number of a readlane or writelane is one of these registers."""
        if self.name not in ("v_readlane_b32", "v_writelane_b32"):
            return False
        return not slots.isdisjoint(self.instruction.operands[2].slots)


@lru_cache(maxsize=KEPT_LINES)
def shape_of(text: str, arch: str) -> Shape:
    """The shape of a line of assembly; its instruction's pc says nothing."""
    instruction = parse_instruction(text)
    return Shape(instruction, flow(instruction), arch)


def after_mfma(p: Shape, c: Shape, live: frozenset[int]) -> tuple[int, str]:
    """Distance from an MFMA to an instruction that touches its result."""
    n, newer = p.passes, p.arch == "gfx950"
    slow = n + 3 + (n != 2 and newer)  # narrow formats, until anything else may look
    if c.is_mfma:
        if not live.isdisjoint(c.factors):
            if p.is_double:
                return (19 if newer else 11), "MFMA result as input A or B of an MFMA"
            return (slow if p.narrow else n + 2), "MFMA result as input A or B of an MFMA"
        if not live.isdisjoint(c.addend):
            return _mfma_to_addend(p, c), "MFMA result overlapping input C of an MFMA"
        return 0, ""
    if not (c.is_vector or c.is_memory):
        return 0, ""
    if not live.isdisjoint(c.reads):
        if p.is_double:
            vector = 19 if newer else 11
            return (18 if c.is_memory else vector), "float64 MFMA result read"
        return (slow if p.narrow else n + 2), "MFMA result read"
    if not live.isdisjoint(c.writes):
        if p.is_double:
            return 11, "float64 MFMA result overwritten"
        return (slow if p.narrow else n + 2), "MFMA result overwritten"
    return 0, ""


def _mfma_to_addend(p: Shape, c: Shape) -> int:
    """Distance from an MFMA to one that accumulates onto an overlapping block."""
    n, newer = p.passes, p.arch == "gfx950"
    if p.instruction.operands[0].slots == c.instruction.operands[3].slots:
        return 2 if n == 2 else 0  # the same block is forwarded
    if p.is_double:
        return 0 if c.narrow else (17 if newer else 9)
    if p.narrow:
        return n + 1 + (newer if c.narrow else n != 2 and newer)
    return 0 if c.narrow else n


def _after_addend(p: Shape, c: Shape) -> tuple[int, str]:
    """Distance from an MFMA that reads C to a vector write over C. Products of float32 and float64
    have read it by then (LLVM's GCNHazardRecognizer: only XDL instructions do not)."""
    writes = not c.is_mfma and (c.is_vector or c.is_memory)
    if not (p.narrow and writes) or c.writes.isdisjoint(p.addend):
        return 0, ""
    needed = {2: 1, 4: 3, 8: 7}.get(p.passes, 15)
    return needed, "input C of an MFMA overwritten while it is still read"


def _after_vector(p: Shape, c: Shape, live: frozenset[int]) -> tuple[int, str]:
    """Distance from a vector instruction to a use of its VGPR results."""
    reads = not live.isdisjoint(c.reads)
    best = (0, "")
    if reads and c.is_mfma and not p.is_dot:
        best = max(best, (2, "vector result read by an MFMA"))
    if reads and c.is_dpp:
        best = max(best, (2, "vector result read through DPP"))
    if reads and c.is_permlane:
        best = max(best, (2, "vector result read by a lane swap"))
    if reads and c.is_lane_access and c.name != "v_writelane_b32":
        best = max(best, (1, "vector result read by readlane"))
    if reads and c.is_vector and p.is_transcendental and not c.is_transcendental:
        best = max(best, (1, "transcendental result read"))
    if p.shifts_result and c.is_vector and (reads or not live.isdisjoint(c.writes)):
        best = max(best, (1, "result placed by op_sel or dst_sel used"))
    if p.is_dot and c.is_vector and (c.name != p.name) and (reads or live & c.writes):
        best = max(best, (3, "dot product result used"))
    return best


def _after_scalar_result(p: Shape, c: Shape, live: frozenset[int]) -> tuple[int, str]:
    """Distance from a vector instruction to a use of a mask or scalar that it writes."""
    best = (0, "")
    read = not live.isdisjoint(c.scalar_reads)
    if read and c.is_vmem:
        best = max(best, (5, "scalar from a vector instruction read by a memory instruction"))
    if read and c.is_vector:
        best = max(best, (2, "scalar from a vector instruction read by a vector instruction"))
    if c.name.startswith("v_div_fmas") and VCC in live:
        best = max(best, (4, "vcc from a vector instruction read by v_div_fmas"))
    if c.selects_lane_by(live):
        best = max(best, (4, "scalar from a vector instruction as lane number"))
    if EXEC in live:
        if c.is_dpp:
            best = max(best, (5, "exec from a vector instruction before DPP"))
        if c.is_lane_access or c.is_permlane or c.is_mfma:
            best = max(best, (4, "exec from a vector instruction before a lane access or MFMA"))
    return best


def _after_store(p: Shape, c: Shape) -> tuple[int, str]:
    """Distance from a wide store to a vector write over its data."""
    if not c.is_vector or c.writes.isdisjoint(p.wide_store_data):
        return 0, ""
    buffer = p.name.startswith("buffer")
    by_scalar = buffer and p.instruction.operands[3].is_scalar
    return (1 if by_scalar else 2), "data of a wide store overwritten"


class _Search:
    """Walks forward from each producer over all paths and compares distances."""

    def __init__(self, program: Program):
        self.program = program
        self.shapes = [shape_of(i.text, program.arch) for i in program.code]
        self.following = [self._next(i) for i in program.code]

    def _next(self, instruction: Instruction) -> list[tuple[int, int]]:
        """The instructions that may follow, and how many wait states the way there adds.

        LLVM's recogniser looks at a block from its end, so that a conditional branch that is taken
        counts together with the `s_branch` behind it. A jump takes longer than one slot, so that is
        no hazard, and a kernel that LLVM has compiled would not pass a stricter count.
        """
        name, pc, code = instruction.mnemonic, instruction.pc, self.program.code
        if name == "s_endpgm":
            return []
        following = [] if name == "s_branch" else [(pc + 1, 0)]
        if name.startswith(("s_branch", "s_cbranch")):
            paired = name != "s_branch" and pc + 1 < len(code)
            extra = int(paired and code[pc + 1].mnemonic == "s_branch")
            following.append((self.program.target(instruction), extra))
        return [f for f in following if f[0] < len(code)]

    def window(self, p: Shape) -> int:
        """How far the rules of a producer can reach."""
        if p.is_mfma:
            return _LONGEST
        if p.is_vector:
            return 5 if p.scalar_writes else 3 if p.is_dot else 2
        if p.wide_store_data:
            return 2
        return 1 if M0 in p.scalar_writes and p.name.startswith("s_") else 0

    def needed(self, p: Shape, c: Shape, live: frozenset[int]) -> tuple[int, str]:
        """The strictest rule between two instructions; `live` are results not yet replaced."""
        if p.is_mfma:
            return max(after_mfma(p, c, live), _after_addend(p, c))
        if p.is_vector:
            return max(_after_vector(p, c, live), _after_scalar_result(p, c, live))
        if p.wide_store_data:
            return _after_store(p, c)
        if is_dma(c.instruction) and M0 in live:
            return 1, "m0 read by a load to LDS"
        return 0, ""

    def violations(self, producers: Iterable[int]) -> Iterator[Violation]:
        """Every pair that is too close, each once, of these producers (by pc)."""
        for pc in producers:
            p = self.shapes[pc]
            reach = self.window(p)
            live = p.vector_writes | p.scalar_writes
            if reach and (live or p.wide_store_data):
                yield from self._from(pc, p, live, reach)

    def before(self, pc: int) -> set[int]:
        """Instructions from which a rule may reach `pc`, and itself."""
        preceding: dict[int, list[int]] = {}
        for start, following in enumerate(self.following):
            for end, _ in following:
                preceding.setdefault(end, []).append(start)
        found, edge = {pc}, {pc}
        for _ in range(_LONGEST):
            edge = {start for end in edge for start in preceding.get(end, [])} - found
            found |= edge
        return found

    def _from(self, start: int, p: Shape, live: frozenset[int], reach: int) -> Iterator[Violation]:
        seen: dict[int, int] = {}
        reported: set[int] = set()
        todo = [(pc, 0, live) for pc, _ in self.following[start]]
        while todo:
            pc, distance, live = todo.pop()
            if distance >= reach or seen.get(pc, reach) <= distance:
                continue
            seen[pc] = distance
            c = self.shapes[pc]
            needed, reason = self.needed(p, c, live)
            if needed > distance and pc not in reported:
                reported.add(pc)
                pair = self.program.code[start], self.program.code[pc]
                yield Violation(*pair, needed, distance, reason)
            rest = live - c.writes
            if rest or p.addend or p.wide_store_data:
                after = distance + c.states
                todo += [(n, after + extra, rest) for n, extra in self.following[pc]]


def violations(program: Program) -> list[Violation]:
    """All pairs of instructions of a program that are too close on some path."""
    return list(_Search(program).violations(range(len(program.code))))


def violations_after_change(
    program: Program, pc: int, known: Iterable[Violation]
) -> list[Violation]:
    """`violations` of a program that differs at `pc` alone from one whose violations are known."""
    search = _Search(program)
    near = search.before(pc)
    rest = [v for v in known if v.producer.pc not in near]
    return rest + list(search.violations(sorted(near)))
