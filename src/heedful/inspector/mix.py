"""Counts of instructions by what they keep busy, in issue slots of four cycles.

A wave of 64 lanes occupies its SIMD's vector unit for one slot per instruction, four for
transcendentals and 32-bit integer multiplication; an MFMA occupies the matrix unit for its passes,
beside the vector unit. LDS moves 128 bytes a cycle for the four SIMDs of a compute unit, which is
128 bytes a slot for each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from heedful.emulator.checks.waitstates import Shape
from heedful.emulator.program.asm import Instruction
from heedful.emulator.program.dataflow import flow, is_dma

_QUARTER_RATE = re.compile(
    r"v_(exp|log|rcp|rcp_iflag|rsq|sqrt|sin|cos)_f\d+|v_mul_(lo_u32|hi_[ui]32)|v_mad_[ui]64_[ui]32"
)
_LDS_BYTES_PER_SLOT = 128
_WIDTHS = {"b8": 1, "u8": 1, "i8": 1, "b16": 2, "u16": 2, "i16": 2, "b32": 4, "b64": 8}
_WIDTHS |= {"b96": 12, "b128": 16}
_VMEM = {"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4}
_VMEM |= {"dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


@dataclass(slots=True)
class Mix:
    """The mix of instructions in a stretch of code.

    Attributes:
        mfma_slots, valu_slots, lds_slots: time of each unit, in slots of one wave.
        exp: transcendentals among the vector instructions. lds_bytes, vmem_bytes: moved by a wave.
        drains: full vmcnt(0) waits. spills: scratch accesses. dma: loads straight to LDS.
        transposed: transposing LDS reads. counts: instructions by mnemonic.
    """

    instructions: int = 0
    mfma: int = 0
    mfma_slots: int = 0
    valu: int = 0
    valu_slots: int = 0
    exp: int = 0
    salu: int = 0
    lds: int = 0
    lds_bytes: int = 0
    vmem: int = 0
    vmem_bytes: int = 0
    dma: int = 0
    transposed: int = 0
    waits: int = 0
    drains: int = 0
    barriers: int = 0
    nops: int = 0
    spills: int = 0
    counts: Counter = field(default_factory=Counter)

    @property
    def lds_slots(self) -> float:
        """Slots for which the LDS traffic of this wave keeps its share of LDS busy."""
        return self.lds_bytes / _LDS_BYTES_PER_SLOT

    @property
    def bound(self) -> tuple[str, float]:
        """The busiest unit and its slots, if everything overlapped."""
        units = {"mfma": self.mfma_slots, "valu": self.valu_slots, "lds": self.lds_slots}
        name = max(units, key=lambda unit: units[unit])
        return name, float(units[name])

    @property
    def mfma_ceiling(self) -> float:
        """The share of the matrix unit's peak that perfect overlap would reach."""
        return self.mfma_slots / self.bound[1] if self.mfma_slots else 0.0


def _lds_bytes(instruction: Instruction) -> int:
    name = instruction.base
    match = re.search(r"_(b8|u8|i8|b16|u16|i16|b32|b64|b96|b128)", name)
    pair = 2 if re.search(r"(read|write)2", name) else 1
    return 64 * pair * _WIDTHS[match[1]] if match else 256


def _vmem_bytes(instruction: Instruction) -> int:
    kind = re.search(r"(ubyte|sbyte|byte|ushort|sshort|short|dword(?:x[234])?)", instruction.base)
    return 64 * _VMEM[kind[1]] if kind else 256


def measure(code: Iterable[Instruction], arch: str) -> Mix:
    """Count a stretch of code, each instruction once."""
    mix = Mix()
    for instruction in code:
        mix.instructions += 1
        mix.counts[instruction.mnemonic] += 1
        _add(mix, instruction, arch)
    return mix


def _add(mix: Mix, instruction: Instruction, arch: str):
    name = instruction.base
    if name.startswith("v_mfma"):
        mix.mfma += 1
        mix.mfma_slots += Shape(instruction, flow(instruction), arch).passes
    elif name.startswith("v_"):
        slow = bool(_QUARTER_RATE.fullmatch(name))
        mix.valu += 1
        mix.valu_slots += 4 if slow else 1
        mix.exp += slow and "_f" in name
    elif name.startswith("ds_"):
        mix.lds += 1
        mix.lds_bytes += _lds_bytes(instruction)
        mix.transposed += "_tr_" in name
    elif name.startswith("scratch_"):
        mix.spills += 1
    elif re.match(r"(global|buffer|flat)_(load|store|atomic)", name):
        mix.vmem += 1
        mix.vmem_bytes += _vmem_bytes(instruction)
        if is_dma(instruction):
            mix.dma += 1
            mix.lds_bytes += _vmem_bytes(instruction)
    elif name == "s_waitcnt":
        mix.waits += 1
        mix.drains += instruction.mods.get("vmcnt") == 0
    elif name == "s_barrier":
        mix.barriers += 1
    elif name == "s_nop":
        mix.nops += 1
    else:
        mix.salu += 1
