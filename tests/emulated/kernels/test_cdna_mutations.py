"""Mutation test of the checkers on the CDNA kernels: single defects put into them are caught.

As test_mutations, whose mutants and second opinion these are; every row of the tile is used, so
that no wave's work goes unseen.
"""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch

from emulated.helpers.backend import device_of, memory_of
from emulated.helpers.trace import recorded
from emulated.kernels.test_mutations import KINDS, mutants
from heedful.core.planning.plan import plan
from heedful.emulator import decode, emulate
from heedful.emulator.program.decoder import Code
from heedful.launch import compiler
from heedful.launch.program.programs import program
from heedful.launch.spec import Pointer, Scalar
from heedful.torch.base.arrays import array_spec
from support.problems.budget import Error, oracle_results
from support.problems.cases import Case, build

# Four turns of the hot loop, so that every buffer is used again, and the rest with a mask.
_CASE = Case(
    batch=1,
    seqlen_q=256,
    seqlen_k=595,
    heads_q=1,
    heads_k=1,
    head_dim=64,
    dtype="bfloat16",
    causal=True,
    backward=False,
    num_splits=1,
)
_WIDE = replace(_CASE, seqlen_k=403, head_dim=128, dtype="float16", causal=False)
# Tiles of 128 keys.
_EIGHT_BIT = replace(_CASE, seqlen_k=979)
KERNELS = {
    "gfx942-bfloat16": ("gfx942", _CASE),
    "gfx942-float16-128": ("gfx942", _WIDE),
    "gfx942-e4m3": ("gfx942", replace(_EIGHT_BIT, dtype="float8_e4m3fnuz")),
    "gfx950-bfloat16": ("gfx950", _CASE),
    "gfx950-float16-128": ("gfx950", _WIDE),
    "gfx950-e4m3": ("gfx950", replace(_EIGHT_BIT, dtype="float8_e4m3fn")),
}
SCHEDULES = ("lockstep", "delay:0-3", "random:7")
MORE_SCHEDULES = ("round-robin", "delay:4-7", "delay:1,6", "random:8")
LIMIT = 20_000


class Outcome:
    """What a run gave: its report, output bits, and how wrong it is beside the right kernel."""

    def __init__(self, report, out: torch.Tensor, lse: torch.Tensor, truth):
        self.report = report
        self.bits = out.view(torch.int16).numpy().tobytes() + lse.numpy().tobytes()
        self.out = Error.between(out.double().numpy(), truth.out)
        self.lse = Error.between(lse.double().numpy(), truth.lse)

    def as_right_as(self, other: "Outcome") -> bool:
        """Both results err at most twice as much."""
        pairs = ((self.out, other.out), (self.lse, other.lse))
        return all(mine.within(Error(2 * its.largest, 2 * its.rms)) for mine, its in pairs)


class Launch:
    """A kernel with fixed inputs, to be run again and again, as it is or mutated."""

    def __init__(self, name: str):
        arch, case = KERNELS[name]
        built = build(case)
        self.problem = replace(built.problem, return_lse=True)
        self.inputs = {n: t for n, t in built.x._asdict().items() if t is not None}
        self.truth = oracle_results(built)
        buffers = {n: array_spec(t) for n, t in (self.inputs | self.outputs()).items()}
        made = program(plan(self.problem, device_of(arch), backend="cdna"), "forward", buffers)
        (self.call,) = made.calls
        self.artifact = compiler.artifact(self.call, arch)
        self.code = decode(self.artifact.text)
        self.right = self.run(self.code)

    def outputs(self) -> dict[str, torch.Tensor]:
        """out and lse, poisoned."""
        out = torch.full(self.truth.out.shape, torch.nan)
        return {
            "out": out.to(getattr(torch, self.problem.out_dtype)),
            "lse": torch.full(self.truth.lse.shape, torch.nan),
        }

    def run(self, code: Code, schedules=("lockstep",), **options) -> Outcome:
        """Execute `code` in place of the kernel's own."""
        outputs = self.outputs()
        arrays, args = self.inputs | outputs, []
        for parameter in self.artifact.parameters:
            match self.call.arguments.get(parameter.name):
                case Pointer(buffer=buffer):
                    args.append(memory_of(arrays[buffer]))
                case Scalar(value=value):
                    args.append(float(value) if parameter.type == "fp32" else int(value))
                case _:
                    args.append(None)
        report = emulate(
            code,
            self.call.grid,
            args,
            lds_bytes=self.artifact.shared_bytes,
            threads=64 * self.artifact.num_warps,
            schedule=schedules,
            **options,
        )
        return Outcome(report, outputs["out"], outputs["lse"], self.truth)

    def caught(self, pc: int, text: str) -> bool:
        """A finding, other bits under some schedule among them, or a wrong result."""
        mutant = self.code.replaced(pc, text)
        outcome = self.run(mutant, SCHEDULES, stop_at_first=True, max_instructions=LIMIT)
        return not (outcome.report.clean and outcome.as_right_as(self.right))

    def equivalent(self, pc: int, text: str) -> bool:
        """The mutant does on this launch what the kernel does: the same bits under every schedule,
        and, where it waits less, every access to LDS is ordered by a second analysis."""
        mutant = self.code.replaced(pc, text)
        waits = self.code.program.code[pc].mnemonic in ("s_barrier", "s_waitcnt")
        for schedule in (*SCHEDULES, *MORE_SCHEDULES):
            with recorded() as trace:
                outcome = self.run(mutant, (schedule,))
            if outcome.bits != self.right.bits or (waits and trace.conflicts()):
                return False
        return True


@cache
def launch(name: str) -> Launch:
    """A kernel by name, compiled and run once as it is."""
    return Launch(name)


def score(name: str, kind: str, at_most: int) -> tuple[Counter, list[str]]:
    """How many mutants of a kind, `at_most` of them spread over the code, were caught or are
    equivalent, and where those lie that nothing tells apart."""
    kernel, tally, missed = launch(name), Counter(), []
    every = list(mutants(kernel.code, kind, kernel.right.report.executed))
    step = max(1, -(-len(every) // at_most))
    for pc, text in every[step // 2 :: step]:
        if kernel.caught(pc, text):
            tally["caught"] += 1
        elif kernel.equivalent(pc, text):
            tally["equivalent"] += 1
        else:
            tally["missed"] += 1
            missed.append(kernel.code.program.code[pc].where())
    return tally, missed


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_itself_is_clean_and_right(name):
    kernel = launch(name)
    outcome = kernel.run(kernel.code, (*SCHEDULES, *MORE_SCHEDULES))
    assert outcome.report.clean, outcome.report.summary()
    assert outcome.bits == kernel.right.bits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gfx942-e4m3", "gfx950-bfloat16"])
def test_some_mutants_are_caught_or_equivalent(name, kind):
    assert not score(name, kind, at_most=1)[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", KERNELS)
def test_all_mutants_are_caught_or_equivalent(name, kind):
    assert not score(name, kind, at_most=10_000)[1]
