"""Branches, barriers, waits, and instructions that change nothing that is modelled."""

import numpy as np

from heedful.emulator.floats import U64
from heedful.emulator.program.asm import EXEC, VCC, Instruction
from heedful.emulator.semantics.table import Context, Run, semantics

# The result of a control instruction, for the scheduler; a branch returns its flags instead.
BARRIER, END = "barrier", "end"


@semantics(
    "s_nop",
    "s_setprio",
    "s_sleep",
    "s_sethalt",
    "s_icache_inv",
    "s_dcache_wb",
    "s_dcache_inv",
    "s_ttracedata",
    "s_incperflevel",
    "s_decperflevel",
    "s_inst_prefetch",
    "v_nop",
)
def _nothing(instruction: Instruction, ctx: Context) -> Run:
    """No effect on registers or memory."""
    return lambda g: None


@semantics("buffer_wbl2")
def _release(instruction: Instruction, ctx: Context) -> Run:
    """Write dirty lines back; with sc1 other workgroups may see them once the wave has waited."""
    if "sc1" not in instruction.text.split():
        return lambda g: None

    def run(g):
        races = g.machine.memory.races
        if races:
            g.issue_vm(instruction, races.release(g))

    return run


@semantics("buffer_inv")
def _acquire(instruction: Instruction, ctx: Context) -> Run:
    """Forget cached lines; with sc1 other workgroups' writes are seen from here on."""
    if "sc1" not in instruction.text.split():
        return lambda g: None

    def run(g):
        g.machine.acquired[g.rect.g0 : g.rect.g1] = True

    return run


@semantics("s_waitcnt")
def _waitcnt(instruction: Instruction, ctx: Context) -> Run:
    """Wait until at most so many operations of each counter are outstanding."""
    vm, lgkm = instruction.mods.get("vmcnt"), instruction.mods.get("lgkmcnt")
    return lambda g: g.out.wait(g, vm, lgkm)


@semantics("s_barrier")
def _barrier(instruction: Instruction, ctx: Context) -> Run:
    """Meet the other waves of the workgroup."""
    return lambda g: BARRIER


@semantics("s_endpgm")
def _end(instruction: Instruction, ctx: Context) -> Run:
    """The wave is done."""
    return lambda g: END


@semantics("s_memtime", "s_memrealtime")
def _time(instruction: Instruction, ctx: Context) -> Run:
    """A clock: instructions executed so far."""
    target = instruction.operands[0].slot

    def run(g):
        g.s64[target][...] = U64(g.machine.report.instructions)
        g.issue_smem(instruction)

    return run


_CONDITIONS = {
    "s_branch": lambda g: np.ones(g.shape[:2], bool),
    "s_cbranch_scc0": lambda g: ~g.scc,
    "s_cbranch_scc1": lambda g: g.scc.copy(),
    "s_cbranch_vccz": lambda g: g.s64[VCC] == 0,
    "s_cbranch_vccnz": lambda g: g.s64[VCC] != 0,
    "s_cbranch_execz": lambda g: g.s64[EXEC] == 0,
    "s_cbranch_execnz": lambda g: g.s64[EXEC] != 0,
}


@semantics(*_CONDITIONS)
def _branch(instruction: Instruction, ctx: Context) -> Run:
    """Return which waves (groups, waves) jump."""
    return _CONDITIONS[instruction.mnemonic]
