"""Mutation test of the checkers: single defects put into compiled kernels are caught.

A mutant is caught by a finding or by a wrong result. One that survives must be equivalent on the
launch: pipelined loops contain tiles that are fetched ahead and dropped, and waits and barriers
that only repeat what others have ensured.
"""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache

import pytest

from emulated.helpers.compiled import Launch, names
from emulated.helpers.trace import recorded
from heedful.emulator import decode
from heedful.emulator.program.asm import Instruction
from heedful.emulator.program.dataflow import is_dma
from heedful.emulator.program.decoder import Code
from support.problems.grids import in_turns

SCHEDULES = ("lockstep", "delay:each", "random:0-3")
LONG = pytest.mark.slow
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
    options = {"stop_at_first": True, "max_instructions": 100_000}
    outcome = launch.run(code.replaced(pc, text), SCHEDULES, **options)
    return not outcome.report.clean or not outcome.error <= 2 * right.error


def equivalent(name: str, pc: int, text: str) -> bool:
    """The mutant does on this launch what the kernel does: the same bits under every schedule, and,
    where it waits less, every access to LDS is ordered by a second, different analysis."""
    launch, code, right = baseline(name)
    mutant = code.replaced(pc, text)
    waits = code.program.code[pc].mnemonic in ("s_barrier", "s_waitcnt")
    for schedule in (*SCHEDULES, "round-robin", "delay:1,2", "random:4-9"):
        with recorded() if waits else nullcontext() as trace:
            outcome = launch.run(mutant, schedule)
        if not outcome.same_bits(right) or not outcome.report.clean:
            return False
        if trace is not None and trace.conflicts():
            return False
    return True


@pytest.mark.parametrize(
    "name", [*names()[:1], *(pytest.param(n, marks=LONG) for n in names()[1:])]
)
def test_the_second_opinion_finds_races_and_none_in_the_right_kernels(name):
    launch, code, right = baseline(name)
    with recorded() as trace:
        launch.run(code)
    assert not trace.conflicts()
    barriers = list(mutants(code, "barrier dropped", right.report.executed))
    found = 0
    for pc, text in barriers:
        with recorded() as trace:
            report = launch.run(code.replaced(pc, text)).report
        assert bool(trace.conflicts()) == ("lds-race" in report.kinds())
        found += not report.clean
    assert found


def missed(name: str, kind: str, at_most: int) -> list[str]:
    """Mutants of a kind, `at_most` of them spread over the code, that nothing tells apart."""
    _, code, right = baseline(name)
    every = list(mutants(code, kind, right.report.executed))
    tried = every[:: max(1, -(-len(every) // at_most))]
    survivors = [m for m in tried if not caught(name, *m)]
    return [code.program.code[pc].where() for pc, t in survivors if not equivalent(name, pc, t)]


@pytest.mark.parametrize(
    "kind, name",
    in_turns(KINDS, names()[:2], each=2),
    ids=str,
)
def test_some_mutants_are_caught_or_equivalent(name, kind):
    assert baseline(name)[2].report.clean
    assert not missed(name, kind, at_most=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", names())
def test_all_mutants_are_caught_or_equivalent(name, kind):
    assert not missed(name, kind, at_most=1000)
