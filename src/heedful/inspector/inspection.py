"""Everything about one kernel: resources, the whole code, the hot loop and its segments."""

from __future__ import annotations

from dataclasses import dataclass

from heedful.emulator.program.asm import Instruction, Program, parse
from heedful.inspector.mix import Mix, measure
from heedful.inspector.resources import Resources, resources


@dataclass(frozen=True, slots=True)
class Inspection:
    """The findings in one kernel.

    Attributes:
        whole: the kernel, each instruction once. loop: one turn of the hot loop, or None.
        segments: the hot loop cut at its barriers, in order.
        loop_code: the instructions of the hot loop.
        tiles: key tiles that one turn of the hot loop works off, as the caller says.
    """

    name: str
    label: str
    resources: Resources
    whole: Mix
    loop: Mix | None
    segments: tuple[Mix, ...]
    loop_code: tuple[Instruction, ...]
    tiles: int


def loops(program: Program) -> list[tuple[int, int]]:
    """Ranges [start, stop) that a backward branch closes."""
    made = []
    for instruction in program.code:
        if instruction.mnemonic.startswith(("s_branch", "s_cbranch")):
            target = program.target(instruction)
            if target <= instruction.pc:
                made.append((target, instruction.pc + 1))
    return made


def hot_loop(program: Program) -> tuple[Instruction, ...]:
    """The loop with the most MFMA, the shortest of equals; without MFMA the longest."""

    def weight(bounds: tuple[int, int]) -> tuple[int, int]:
        body = program.code[slice(*bounds)]
        mfma = sum(i.mnemonic.startswith("v_mfma") for i in body)
        return mfma, -len(body) if mfma else len(body)

    candidates = loops(program)
    if not candidates:
        return ()
    return tuple(program.code[slice(*max(candidates, key=weight))])


def _segments(code: tuple[Instruction, ...], arch: str) -> tuple[Mix, ...]:
    parts: list[list[Instruction]] = [[]]
    for instruction in code:
        parts[-1].append(instruction)
        if instruction.mnemonic == "s_barrier":
            parts.append([])
    return tuple(measure(part, arch) for part in parts if part)


def inspect(
    text: str, *, lds_bytes: int = 0, kernel: str | None = None, label: str = "", tiles: int = 1
) -> Inspection:
    """Inspect gfx942 or gfx950 assembly text.

    Args:
        lds_bytes: dynamic LDS of the launch (Triton: `metadata.shared`), which the text lacks.
        kernel: name, where the text has several. label: what to call it in tables.
        tiles: key tiles per turn of the hot loop; tables divide by it.

    Raises:
        AsmError: the text has no such kernel or another target.
    """
    program = parse(text, kernel)
    code = hot_loop(program)
    return Inspection(
        name=program.name,
        label=label or f"{program.name} {program.arch}",
        resources=resources(text, program, lds_bytes),
        whole=measure(program.code, program.arch),
        loop=measure(code, program.arch) if code else None,
        segments=_segments(code, program.arch),
        loop_code=code,
        tiles=tiles,
    )
