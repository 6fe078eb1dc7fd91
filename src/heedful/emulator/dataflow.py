"""Which registers an instruction reads and writes, implicit ones included, from its text alone."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from heedful.emulator.asm import EXEC, M0, MODE, SCC, VCC, Instruction, Operand

_NO_DESTINATION = re.compile(
    r"s_(waitcnt|barrier|endpgm|nop|sleep|setprio|branch|cbranch\w*|cmp\w*|bitcmp\w*|setreg\w*|sethalt"
    r"|icache_inv|dcache_\w+|ttracedata|sched_\w+|trap|setkill|incperflevel|decperflevel|store_\w+)"
    r"|(ds_write|ds_nop|buffer_wbl2|buffer_inv|buffer_wbinv|v_nop)\w*"
    r"|(global|buffer|flat|scratch)_store_\w+|global_load_lds_\w+"
)
_TWO_DESTINATIONS = re.compile(
    r"v_(add|addc|sub|subb|subrev|subbrev)_co_u32|v_div_scale_f(32|64)|v_mad_(u64_u32|i64_i32)"
    r"|v_permlane(16|32)_swap_b32|v_swap_b32"
)
# The destination is also an input in full. (A half that is merely kept does not count: the
# compiler packs two halves one after the other into a register that starts undefined.)
_READS_DESTINATION = re.compile(
    r"v_(fmac|mac|pk_fmac|dot2c|dot4c|dot8c)_\w+|v_permlane(16|32)_swap_b32|v_swap_b32"
    r"|s_(addk_i32|mulk_i32|cmovk?_\w+)|s_bitset[01]_b(32|64)"
)
_READS_SCC = re.compile(r"s_(cselect_\w+|addc_u32|subb_u32|cbranch_scc[01]|cmov\w*)")
_KEEPS_SCC = re.compile(
    r"s_(mov\w*|cmov\w*|cselect_\w+|mul_i32|mul_hi_\w+|bfm_\w+|pack_\w+|sext_\w+|ff[01]_\w+|flbit_\w+|brev_\w+"
    r"|getpc_b64|setpc_b64|swappc_b64|load_\w+|buffer_load_\w+|mulk_i32|bitset\w+|getreg_b32|memtime|memrealtime)"
    r"|s_(waitcnt|barrier|endpgm|nop|sleep|setprio|branch|cbranch\w*|setreg\w*|icache_inv|dcache_\w+)"
)


@dataclass(frozen=True, slots=True)
class Flow:
    """Slots that an instruction reads and writes; `ready` are those that must not be in flight."""

    reads: frozenset[int]
    writes: frozenset[int]
    ready: frozenset[int]


def is_dma(instruction: Instruction) -> bool:
    """A load from global memory that lands in LDS and not in a register."""
    name = instruction.mnemonic
    return "_load_lds_" in name or (name.startswith("buffer_load") and "lds" in instruction.mods)


def is_load(instruction: Instruction) -> bool:
    """A memory instruction whose destination register is written later, when it returns."""
    name = instruction.mnemonic
    if is_dma(instruction):
        return False
    if "_atomic_" in name:
        return "sc0" in instruction.mods or "glc" in instruction.mods
    return bool(
        re.match(r"(global|buffer|flat|scratch)_load|ds_(read|bpermute|permute|swizzle)", name)
        or (name.startswith("ds_") and "_rtn_" in name)
        or re.match(r"s_(buffer_)?load", name)
    )


def _destinations(instruction: Instruction) -> int:
    name = instruction.base
    if _NO_DESTINATION.fullmatch(name) or is_dma(instruction):
        return 0
    if "_atomic_" in name:
        return int(is_load(instruction))
    if name.startswith("ds_") and not is_load(instruction):
        return 0
    return 2 if _TWO_DESTINATIONS.fullmatch(name) else 1


def _implicit_reads(instruction: Instruction) -> set[int]:
    name, found = instruction.base, set()
    if name.startswith("v_") or re.match(r"(global|buffer|flat|scratch|ds)_", name):
        found |= {EXEC, EXEC + 1}
    if name.startswith("v_div_fmas") or "vccz" in name or "vccnz" in name:
        found |= {VCC, VCC + 1}
    if name == "v_cndmask_b32" and len(instruction.operands) == 3:
        found |= {VCC, VCC + 1}
    if "saveexec" in name or "cbranch_exec" in name:
        found |= {EXEC, EXEC + 1}
    if _READS_SCC.fullmatch(name):
        found.add(SCC)
    if is_dma(instruction):
        found.add(M0)
    return found


def _implicit_writes(instruction: Instruction) -> set[int]:
    name, found = instruction.base, set()
    if "saveexec" in name or name.startswith("v_cmpx"):
        found |= {EXEC, EXEC + 1}
    if name.startswith("s_") and not _KEEPS_SCC.fullmatch(name):
        found.add(SCC)
    if name.startswith("s_setreg"):
        found.add(MODE)
    return found


def _read_slots(instruction: Instruction, number: int, operand: Operand) -> Iterable[int]:
    """Slots read of source `number`: packed float32 may use one register of a pair twice."""
    name, mods = instruction.base, instruction.mods
    if operand.count == 2 and re.fullmatch(r"v_pk_(mul|add|fma)_f32", name):
        low = (mods.get("op_sel") or [0, 0, 0])[number]
        high = (mods.get("op_sel_hi") or [1, 1, 1])[number]
        return {operand.slot + low, operand.slot + high}
    if operand.count == 2 and name == "v_pk_mov_b32":
        return {operand.slot + (mods.get("op_sel") or [0, 0])[number]}
    return operand.slots


def flow(instruction: Instruction) -> Flow:
    """Reads and writes of one instruction.

    A load may be issued onto a register for which an earlier load of the same counter is still in
    flight (they return in order), so its destination is not part of `ready`.
    """
    count = _destinations(instruction)
    writes, reads = set(), set()
    for position, operand in enumerate(instruction.operands):
        if position < count:
            writes.update(operand.slots)
        else:
            reads.update(_read_slots(instruction, position - count, operand))
    if count and _READS_DESTINATION.fullmatch(instruction.base):
        reads |= writes
    explicit = reads | (set() if is_load(instruction) else writes)
    reads |= _implicit_reads(instruction)
    writes |= _implicit_writes(instruction)
    ready = explicit | (reads & {VCC, VCC + 1, M0})
    return Flow(frozenset(reads), frozenset(writes), frozenset(ready))
