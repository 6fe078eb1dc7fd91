"""Mutation test of the checkers: single defects put into compiled kernels are caught.

A mutant is caught by a finding or by a wrong result. One that survives must be provably the same
program: what its instruction waited for is waited for again before anybody looks.
"""

import re
from collections.abc import Iterator
from functools import cache

import pytest

from emulated.compiled import Launch, names
from heedful.emulator import decode
from heedful.emulator.asm import Instruction
from heedful.emulator.dataflow import is_dma
from heedful.emulator.decoder import Code

SCHEDULES = ("lockstep", "delay:0", "random:7")
KINDS = (
    "barrier dropped",
    "waitcnt dropped",
    "vmcnt loosened",
    "lgkmcnt loosened",
    "LDS read shifted",
    "LDS write shifted",
    "DMA dropped",
    "MFMA dropped",
)


def mutants(code: Code, kind: str, executed) -> Iterator[tuple[int, str]]:
    """(pc, new text) of every mutant of a kind whose instruction was executed."""
    for instruction in code.program.code:
        if not executed[instruction.pc]:
            continue
        text = _mutate(instruction, kind)
        if text is not None:
            yield instruction.pc, text


def _mutate(instruction: Instruction, kind: str) -> str | None:
    name, text = instruction.mnemonic, instruction.text
    dropped = {
        "barrier dropped": name == "s_barrier",
        "waitcnt dropped": name == "s_waitcnt",
        "DMA dropped": is_dma(instruction),
        "MFMA dropped": name.startswith("v_mfma"),
    }
    if dropped.get(kind):
        return "s_nop 0"
    for counter in ("vmcnt", "lgkmcnt"):
        if kind == f"{counter} loosened" and name == "s_waitcnt" and counter in text:
            count = instruction.mods[counter]
            return text.replace(f"{counter}({count})", f"{counter}({count + 1})")
    for way in ("read", "write"):
        if kind == f"LDS {way} shifted" and name.startswith(f"ds_{way}"):
            return _shift(text)
    return None


def _shift(text: str) -> str:
    if match := re.search(r"offset(\d?):(\d+)", text):
        step = 16 if not match[1] else 1
        return text.replace(match[0], f"offset{match[1]}:{int(match[2]) + step}", 1)
    return text + (" offset1:2" if re.search(r"read2|write2", text) else " offset:16")


@cache
def baseline(name: str):
    launch = Launch(name)
    code = decode(launch.artifact.text)
    return launch, code, launch.run(code)


def caught(name: str, pc: int, text: str) -> bool:
    """A finding under some schedule, or an error twice that of the right kernel."""
    launch, code, right = baseline(name)
    mutant = code.replaced(pc, text)
    for schedule in SCHEDULES:
        options = {"stop_at_first": True, "max_instructions": 100_000}
        outcome = launch.run(mutant, schedule, **options)
        if not outcome.report.clean or not outcome.error <= 2 * right.error:
            return True
    return False


def equivalent(name: str, pc: int) -> bool:
    """Nothing looks at what a wait completes before the next wait at least as strict.

    A barrier is superfluous if no LDS access lies between it and another one.
    """
    _, code, _ = baseline(name)
    instruction = code.program.code[pc]
    if instruction.mnemonic == "s_barrier":
        return _idle_until_barrier(code, pc, 1) or _idle_until_barrier(code, pc, -1)
    if instruction.mnemonic != "s_waitcnt":
        return False
    open_counters = set(instruction.mods) - {"expcnt"}
    for later in code.program.code[pc + 1 :]:
        if later.mnemonic == "s_waitcnt":
            open_counters -= {
                c for c in open_counters if later.mods.get(c, 99) <= instruction.mods[c]
            }
            if not open_counters:
                return True
        elif _looks(later, open_counters):
            return False
    return True


def _idle_until_barrier(code: Code, pc: int, step: int) -> bool:
    while 0 < pc < len(code.program.code) - 1:
        pc += step
        name = code.program.code[pc].mnemonic
        if name == "s_barrier":
            return True
        if name.startswith(("ds_", "s_cbranch", "s_branch")) or is_dma(code.program.code[pc]):
            return False
    return False


def _looks(instruction: Instruction, counters: set[str]) -> bool:
    """Might depend on a completed operation: any vector work, memory access or control flow."""
    return not instruction.mnemonic.startswith(("s_nop", "s_setprio"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", names())
def test_mutants_are_caught_or_provably_equivalent(name, kind):
    _, code, right = baseline(name)
    assert right.report.clean
    every = list(mutants(code, kind, right.report.executed))
    survivors = [m for m in every[:: max(1, len(every) // 12)] if not caught(name, *m)]
    unexplained = [code.program.code[pc].where() for pc, _ in survivors if not equivalent(name, pc)]
    assert not unexplained, unexplained
