"""Launches that may begin before the one ahead has ended, compiled for sm_90 without a GPU: exactly
these kernels wait for it, before they touch memory."""

import pytest

from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.inspector.nvidia import disassemble, opcode, parse_sass
from heedful.launch import compiler
from heedful.launch.prebuild import compiling
from heedful.launch.program.programs import program
from support.problems.grids import slow_but

DEVICE = by_name("H200")
WAIT, LET_BEGIN = "ACQBULK", "PREEXIT"
MEMORY = ("LDG", "STG", "RED", "ATOM", "UTMALDG", "UTMASTG", "UBLKRED")
PROGRAMS = {
    "backward-d64": ((2, 4096, 4096, 8, 4, 64), "backward"),
    "backward-d256": ((2, 4096, 4096, 8, 4, 256), "backward"),
    "splits": ((1, 128, 65536, 8, 2, 128), "forward"),
}


def calls_of(shape, direction):
    grad = direction == "backward"
    problem = AttentionProblem.dense(*shape, needs_grad=grad, return_lse=True)
    return program(plan(problem, DEVICE, compiling(), "hopper"), direction).calls


@pytest.mark.parametrize("name", slow_but({"backward-d256"}, PROGRAMS))
def test_a_kernel_that_may_begin_early_waits_before_it_touches_memory(name):
    calls = calls_of(*PROGRAMS[name])
    assert any(call.programmatic for call in calls)
    for call in calls:
        made = compiler.artifact(call, DEVICE.arch)
        code, _, _ = parse_sass(disassemble(made.code).text)
        names = [opcode(instruction).split(".")[0] for instruction in code]
        assert names.count(WAIT) == call.programmatic, call.kernel.function
        if call.programmatic:
            touched = [at for at, name in enumerate(names) if name in MEMORY]
            assert names.index(WAIT) < min(touched)


def test_the_main_backward_kernel_sets_itself_up_beside_the_prologue():
    prologue, main, _ = calls_of(*PROGRAMS["backward-d64"])
    made = compiler.artifact(prologue, DEVICE.arch)
    code, _, _ = parse_sass(disassemble(made.code).text)
    assert LET_BEGIN in [opcode(instruction).split(".")[0] for instruction in code]
    assert main.programmatic
