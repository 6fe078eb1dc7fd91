"""Which registers an instruction reads and writes, implicit ones included, from its text alone."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from heedful.emulator.program.asm import (
    EXEC,
    KEPT_LINES,
    M0,
    MODE,
    SCC,
    VCC,
    Instruction,
    Operand,
    parse_instruction,
)

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
    r"|s_(addk_i32|mulk_i32|cmovk?_\w+)|s_bitset[01]_b(32|64)|s_atomic_\w+"
)
_READS_SCC = re.compile(r"s_(cselect_\w+|addc_u32|subb_u32|cbranch_scc[01]|cmov\w*)")
# Register pairs, of which one half of the result needs only one half of the sources.
_BITWISE = re.compile(r"s_(and|or|xor|nand|nor|xnor|andn2|orn2|not|wqm)_b64|[sv]_mov_b64")
_PACKED = re.compile(r"v_pk_(mul|add|fma)_f32")
_SHIFT = re.compile(r"v_(lshl|lshr|ashr)rev_[bi]64|s_(lshl|lshr|ashr)_[bi]64")
_LOW_FROM_LOW = re.compile(r"v_mad_(u64_u32|i64_i32)|v_lshl_add_u64")
_KEEPS_SCC = re.compile(
    r"s_(mov\w*|cmov\w*|cselect_\w+|mul_i32|mul_hi_\w+|bfm_\w+|pack_\w+|sext_\w+|ff[01]_\w+|flbit_\w+|brev_\w+"
    r"|getpc_b64|setpc_b64|swappc_b64|load_\w+|buffer_load_\w+|mulk_i32|bitset\w+|getreg_b32|memtime|memrealtime)"
    r"|s_(waitcnt|barrier|endpgm|nop|sleep|setprio|branch|cbranch\w*|setreg\w*|icache_inv|dcache_\w+)"
    r"|s_(buffer_)?(store|atomic)_\w+"
)


@dataclass(frozen=True, slots=True)
class Flow:
    """Slots that an instruction reads and writes, `ready` those that must not be in flight; and the
    first two as bit sets."""

    reads: frozenset[int]
    writes: frozenset[int]
    ready: frozenset[int]
    read_bits: int
    write_bits: int


def bits(slots: Iterable[int]) -> int:
    """Slots as a bit set."""
    total = 0
    for slot in slots:
        total |= 1 << slot
    return total


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
    if operand.count == 2 and _PACKED.fullmatch(name):
        return {operand.slot + _chosen(mods, number, half) for half in (0, 1)}
    if operand.count == 2 and name == "v_pk_mov_b32":
        return {operand.slot + _chosen(mods, number, 0)}
    return operand.slots


def _chosen(mods: dict, number: int, half: int) -> int:
    """Which register of source `number` one half of a packed instruction reads."""
    selects = mods.get("op_sel_hi", [1, 1, 1]) if half else mods.get("op_sel", [0, 0, 0])
    return selects[number]


def halves(instruction: Instruction) -> dict[int, set[int]] | None:
    """The sources of each half of a 64-bit result, where these are not all sources.

    The compiler leaves the high half of a 64-bit addend undefined when it wants the low 32 bits of
    the sum alone, and packs float32 pairs of which one half counts.
    """
    name, mods, operands = instruction.base, instruction.mods, instruction.operands
    if not operands or len(operands[0].slots) != 2:
        return None
    low, high = operands[0].slots
    sources = list(operands[_destinations(instruction) :])
    registers = [(i, op.slots) for i, op in enumerate(sources) if op.kind == "reg"]
    lows, highs = {slots[0] for _, slots in registers}, {slots[-1] for _, slots in registers}
    if _BITWISE.fullmatch(name):
        return {low: lows, high: highs}
    if _LOW_FROM_LOW.fullmatch(name):
        return {low: lows, high: lows | highs}
    if _SHIFT.fullmatch(name):
        return _shifted(name, low, high, sources)
    if _PACKED.fullmatch(name) or name == "v_pk_mov_b32":
        moves = name == "v_pk_mov_b32"  # its halves come from one source each
        parts: dict[int, set[int]] = {low: set(), high: set()}
        for half, to in enumerate((low, high)):
            for i, slots in registers:
                if not moves or i == half:
                    parts[to].add(slots[_chosen(mods, i, half and not moves) % len(slots)])
        return parts
    return None


def _shifted(name: str, low: int, high: int, sources: list[Operand]) -> dict[int, set[int]]:
    """`halves` of a shift: bits move one way, and past a whole half if the amount says so."""
    value, amount = reversed(sources) if name.startswith("v_") else sources
    by = set(amount.slots)
    first, second = ({s} for s in value.slots) if value.kind == "reg" else (set(), set())
    whole = amount.kind == "const" and amount.bits(32) & 63 >= 32
    if "lshl" in name:
        return {low: by if whole else by | first, high: by | first | (set() if whole else second)}
    return {low: by | second | (set() if whole else first), high: by | second}


def flow(instruction: Instruction) -> Flow:
    """Reads and writes of one instruction.

    A load may be issued onto a register for which an earlier load of the same counter is still in
    flight (they return in order), so its destination is not part of `ready`.
    """
    return _flow(instruction.text)


@lru_cache(maxsize=KEPT_LINES)
def _flow(text: str) -> Flow:
    instruction = parse_instruction(text)
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
    sets = (frozenset(reads), frozenset(writes), frozenset(ready))
    return Flow(*sets, bits(reads), bits(writes))
