"""The demands of an instruction on a compute unit: the static half of the clock."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from heedful.emulator.checks.waitstates import shape_of
from heedful.emulator.clock.constants import SLOT, constant
from heedful.emulator.program.asm import KEPT_LINES, Instruction, parse_instruction
from heedful.emulator.program.dataflow import is_dma

# Ports of a SIMD; each takes one instruction a slot. Instructions without one wait for nobody.
VECTOR, SCALAR, LDS, MEMORY, BRANCH = range(5)
PORTS = ("vector", "scalar", "lds", "memory", "branch")

_QUARTER = re.compile(r"v_mul_(lo_u32|hi_[ui]32)|v_mad_[ui]64_[ui]32")
_APART = re.compile(r"v_pk_(mul|add|fma)_f32|v_dot\w+")
_WIDTHS = {"b8": 1, "u8": 1, "i8": 1, "b16": 2, "u16": 2, "i16": 2, "b32": 4, "u32": 4, "i32": 4}
_WIDTHS |= {"f32": 4, "f16": 4, "bf16": 4, "b64": 8, "u64": 8, "f64": 8, "b96": 12, "b128": 16}
_MEMORY_WIDTHS = {"byte": 1, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
_LANES = 64


@dataclass(frozen=True, slots=True)
class Work:
    """The demands of one instruction, for one wave.

    Attributes:
        kind: mfma, valu, salu, lds, memory, atomic, scalar-load, branch, wait, pause, priority,
            barrier or end.
        port: which port of the SIMD takes it, or None.
        slots: for which its unit is busy (an MFMA's passes, a transcendental's repeats), or for
            which a wave pauses.
        hold: slots from issue until VALU instructions may follow an MFMA.
        apart: it may not run beside an MFMA at all.
        array, port_clocks: clocks of LDS and of one of its ports, bank conflicts aside.
        clocks: of the way to memory, or dwords for an atomic.
        to_lds: a load that goes to LDS directly.
        vm, lgkm: counters that s_waitcnt waits for, else -1. priority: s_setprio's.
    """

    kind: str
    port: int | None = None
    slots: int = 1
    hold: int = 0
    apart: bool = False
    array: float = 0
    port_clocks: float = 0
    clocks: float = 0
    to_lds: bool = False
    vm: int = -1
    lgkm: int = -1
    priority: int = 0


def _lds_bytes(instruction: Instruction) -> int:
    """Bytes a lane."""
    name = instruction.base
    parts = [p for p in name.split("_") if p in _WIDTHS]
    if name.startswith("ds_read_b64_tr"):
        return 8
    width = _WIDTHS[parts[0]] if parts else 4
    return 2 * width if "read2" in name or "write2" in name else width


def _lds(instruction: Instruction, arch: str) -> Work:
    """The array serves so many bytes a clock; a port carries addresses and data of two SIMDs in,
    16 lanes of data out."""
    nbytes, ports = _lds_bytes(instruction), constant("lds_ports", arch)
    is_read = instruction.base.startswith("ds_read")
    rate = constant("lds_read_bytes" if is_read else "lds_write_bytes", arch)
    total = _LANES * nbytes
    through = max(total, _LANES * 4) if is_read else total + _LANES * 4
    return Work("lds", LDS, array=total / rate, port_clocks=through / (rate / ports))


def _memory(instruction: Instruction, arch: str) -> Work:
    name = instruction.base
    if "_atomic_" in name:
        wide = 2 if name.endswith(("_x2", "f64")) else 1
        return Work("atomic", MEMORY, clocks=_LANES * wide)
    suffix = name.rsplit("_", 1)[1]
    if "d16" in name:
        nbytes = 1 if "byte" in name else 2
    else:
        nbytes = _MEMORY_WIDTHS.get(suffix.removeprefix("u").removeprefix("s"), 0)
        nbytes = nbytes or _MEMORY_WIDTHS.get(suffix, 4)
    total = _LANES * max(nbytes, 4)
    rate = min(constant("memory_bytes", arch), constant("l2_bytes", arch))
    lands = is_dma(instruction)
    array = total / constant("lds_write_bytes", arch) if lands else 0
    return Work("memory", MEMORY, clocks=total / rate, array=array, to_lds=lands)


def _vector(instruction: Instruction, arch: str) -> Work:
    shape = shape_of(instruction.text, arch)
    if shape.is_mfma and not shape.is_double:
        nbytes = 4 * sum(operand.count for operand in instruction.operands[1:3])
        more = -(-nbytes // int(constant("mfma_hold_bytes", arch)))
        hold = int(constant("mfma_hold", arch)) + more
        return Work("mfma", VECTOR, shape.passes, hold=hold)
    if shape.is_mfma:  # float64 runs on the vector unit (LLVM pull request 83782)
        return Work("valu", VECTOR, shape.passes)
    slots = 1
    if shape.is_transcendental:
        slots = int(constant("trans_slots", arch))
    elif _QUARTER.fullmatch(instruction.base):
        slots = int(constant("quarter_slots", arch))
    return Work("valu", VECTOR, slots, apart=bool(_APART.fullmatch(instruction.base)))


@lru_cache(maxsize=KEPT_LINES)
def work_of(text: str, arch: str) -> Work:
    """The demands of a line of assembly."""
    instruction = parse_instruction(text)
    name = instruction.base
    if name == "s_waitcnt":
        counters = instruction.mods
        return Work("wait", vm=counters.get("vmcnt", -1), lgkm=counters.get("lgkmcnt", -1))
    if name in ("s_nop", "v_nop"):
        count = instruction.operands[0].bits(16) if instruction.operands else 0
        return Work("pause", slots=count + 1)
    if name == "s_sleep":
        return Work("pause", slots=instruction.operands[0].bits(16) * 64 // SLOT + 1)
    if name == "s_setprio":
        return Work("priority", priority=instruction.operands[0].bits(16))
    if name in ("s_barrier", "s_endpgm"):
        return Work(name.removeprefix("s_").removesuffix("pgm"))
    if name.startswith(("s_branch", "s_cbranch", "s_setpc", "s_swappc")):
        return Work("branch", BRANCH, int(constant("branch_slots", arch)))
    if re.match(r"s_(buffer_)?load", name):
        return Work("scalar-load", SCALAR)
    if name.startswith("s_"):
        return Work("salu", SCALAR)
    if name.startswith("ds_"):
        return _lds(instruction, arch)
    if name.startswith("v_"):
        return _vector(instruction, arch)
    if re.match(r"(global|buffer|flat|scratch)_(load|store|atomic)", name):
        return _memory(instruction, arch)
    return Work("salu", SCALAR)  # write-backs and invalidations, whose time is not modelled
