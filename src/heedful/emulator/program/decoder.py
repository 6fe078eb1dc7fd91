"""From a Program to executable basic blocks: closures, the registers each needs, and what each
block needs defined.
"""

from __future__ import annotations

import copy
import re
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property

from heedful.emulator.checks.waitstates import Violation, violations, violations_after_change
from heedful.emulator.program.asm import (
    EXEC,
    SGPR,
    AsmError,
    Instruction,
    Program,
    parse_instruction,
)
from heedful.emulator.program.dataflow import Flow, bits, flow, is_load
from heedful.emulator.semantics import Context, Run, Unsupported, build

_NARROW = re.compile(r"(?:global|buffer|flat)_(?:load|store)(?:_lds)?_(?:([us]?byte)|[us]?short)")
_TERMINATORS = ("s_branch", "s_cbranch", "s_barrier", "s_endpgm", "s_setpc", "s_swappc")


@dataclass(slots=True)
class Step:
    """One instruction ready to run; only `control` ones answer the scheduler."""

    instruction: Instruction
    run: Run
    ready: frozenset[int]
    control: bool


@dataclass(slots=True)
class Block:
    """Instructions [start, stop) that run without a branch in or out.

    Attributes:
        steps: shared by all blocks with this end; those of this one begin at number `first`.
        needs: bit set of the slots read before the block writes them. defines: those it writes.
    """

    start: int
    stop: int
    steps: list[Step]
    first: int
    needs: int
    defines: int

    def taken(self, count: int) -> list[Step]:
        """The first `count` steps."""
        if self.first == 0 and count == len(self.steps):
            return self.steps
        return self.steps[self.first : self.first + count]


class Code:
    """A decoded program.

    Attributes:
        blocks: by the pc of their first instruction. flows: reads and writes by pc.
        loads: slots that a memory operation writes when it returns, by pc.
    """

    def __init__(self, program: Program):
        self.program = program
        self.context = Context(program)
        self.flows = [flow(i) for i in program.code]
        empty: frozenset[int] = frozenset()
        self.loads = [
            f.writes if is_load(i) else empty for i, f in zip(program.code, self.flows, strict=True)
        ]
        self.leaders = self._leaders()
        self._blocks: dict[int, Block] = {}
        self._steps: dict[int, Step] = {}

    def replaced(self, pc: int, text: str) -> Code:
        """The same program with another instruction at `pc`, which must not be a branch.

        Everything else is shared, so that a mutant costs no decoding.
        """
        old = self.program.code[pc]
        code = list(self.program.code)
        code[pc] = parse_instruction(text, pc, old.line, old.source)
        other = copy.copy(self)
        other.program = replace(self.program, code=code)
        other.__dict__["violations"] = violations_after_change(other.program, pc, self.violations)
        other.flows, other.loads = list(self.flows), list(self.loads)
        other.flows[pc] = flow(code[pc])
        other.loads[pc] = other.flows[pc].writes if is_load(code[pc]) else frozenset()
        other._blocks = {}
        other._steps = {k: v for k, v in self._steps.items() if k != pc}
        return other

    def _leaders(self) -> list[int]:
        """Where blocks begin. Most labels only mark lines for debuggers: they cut nothing."""
        code, leaders = self.program.code, {0}
        for instruction in code:
            if instruction.mnemonic.startswith(_TERMINATORS):
                leaders.add(instruction.pc + 1)
                for operand in instruction.operands[-1:]:
                    leaders.add(self.program.labels.get(operand.text, 0))
        return sorted(pc for pc in leaders if pc < len(code))

    def block(self, pc: int) -> Block:
        """The block that starts at `pc`, which may lie inside a longer one."""
        if pc not in self._blocks:
            self._decode(pc)
        return self._blocks[pc]

    def _decode(self, start: int):
        """Decode from `start` to the next leader, and with it every block that begins there."""
        code = self.program.code
        if start >= len(code):
            raise AsmError(f"kernel {self.program.name} runs past its last instruction")
        after = bisect_right(self.leaders, start)
        stop = self.leaders[after] if after < len(self.leaders) else len(code)
        steps = [self._step(pc) for pc in range(start, stop)]
        needs = defines = 0
        for pc in range(stop - 1, start - 1, -1):
            reads, writes = self.flows[pc].read_bits, self.flows[pc].write_bits
            needs = reads | (needs & ~writes)
            defines |= writes
            self._blocks[pc] = Block(pc, stop, steps, pc - start, needs, defines)

    def _step(self, pc: int) -> Step:
        if pc not in self._steps:
            self._steps[pc] = self._build(pc)
        return self._steps[pc]

    def _build(self, pc: int) -> Step:
        instruction, flows = self.program.code[pc], self.flows[pc]
        try:
            run = build(instruction, self.context)
        except (Unsupported, AsmError):
            raise
        except Exception as error:
            raise AsmError(f"cannot decode {instruction.where()}: {error}") from error
        if _changes_exec(instruction, flows):
            run = _then_refresh(run)
        control = instruction.mnemonic.startswith(_TERMINATORS)
        return Step(instruction, run, flows.ready, control)

    def lds_unit(self) -> int:
        """The narrowest LDS access in bytes (1, 2 or 4), which is the unit of race detection."""
        unit = 4
        for instruction in self.program.code:
            name = instruction.mnemonic
            if name.startswith(("ds_read", "ds_write")):
                if name.split("_", 2)[2].startswith(("b8", "u8", "i8")):
                    return 1
                if name.split("_", 2)[2].startswith(("b16", "u16", "i16")):
                    unit = 2
        return unit

    def global_unit(self) -> int:
        """The narrowest global access in bytes (1, 2 or 4)."""
        unit = 4
        for instruction in self.program.code:
            if match := _NARROW.match(instruction.base):
                unit = min(unit, 1 if match[1] else 2)
        return unit

    @cached_property
    def violations(self) -> list[Violation]:
        """Pairs of instructions with too few wait states between them."""
        return violations(self.program)


def _changes_exec(instruction: Instruction, flows: Flow) -> bool:
    return EXEC in flows.writes or EXEC + 1 in flows.writes


def _then_refresh(run: Run) -> Run:
    def both(g):
        run(g)
        g.refresh_exec()

    return both


def initially_defined(program: Program) -> int:
    """Bit set of the slots that hold something when a wave starts."""
    fixed = program.directives
    count = fixed.get("user_sgpr_count", 0) + 4  # user data, then workgroup ids
    slots = {0, EXEC, EXEC + 1, 1000, 1001, *range(SGPR, SGPR + count)}
    slots |= {SGPR + 102, SGPR + 103, SGPR + 104, SGPR + 105}
    return bits(slots)
