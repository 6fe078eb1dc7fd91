"""LDS instructions: reads, writes, pairs, transposing reads and atomics."""

import numpy as np

from heedful.emulator.floats import I64, U8, U16, U32
from heedful.emulator.program.asm import Instruction
from heedful.emulator.semantics.small import ATOMICS, read_register, write_register
from heedful.emulator.semantics.table import Context, Run, Unsupported, semantics

_READS = {
    "b32": (4, False, ""),
    "b64": (8, False, ""),
    "b96": (12, False, ""),
    "b128": (16, False, ""),
    "u8": (1, False, ""),
    "i8": (1, True, ""),
    "u16": (2, False, ""),
    "i16": (2, True, ""),
    "u8_d16": (1, False, "lo"),
    "u8_d16_hi": (1, False, "hi"),
    "u16_d16": (2, False, "lo"),
    "u16_d16_hi": (2, False, "hi"),
}
_WRITES = {
    "b8": (1, ""),
    "b16": (2, ""),
    "b32": (4, ""),
    "b64": (8, ""),
    "b96": (12, ""),
    "b128": (16, ""),
    "b8_d16_hi": (1, "hi"),
    "b16_d16_hi": (2, "hi"),
}


def _address(g, slot: int, offset: int):
    return g.u[slot].astype(I64) + offset


def _offsets(instruction: Instruction, nbytes: int) -> list[int]:
    """Byte offsets: one, or two in units of the element (64 elements for st64)."""
    mods = instruction.mods
    if not any(x in instruction.base for x in ("read2", "write2")):
        return [mods.get("offset", 0)]
    unit = nbytes * (64 if "st64" in instruction.base else 1)
    return [mods.get("offset0", 0) * unit, mods.get("offset1", 0) * unit]


@semantics(
    *(f"ds_read_{kind}" for kind in _READS),
    *(f"ds_read2{st}_{kind}" for st in ("", "st64") for kind in ("b32", "b64")),
)
def _read(instruction: Instruction, ctx: Context) -> Run:
    """One or two elements per lane."""
    nbytes, signed, half = _READS[instruction.base.split("_", 2)[2]]
    target, address = (op.slot for op in instruction.operands[:2])
    offsets, step = _offsets(instruction, nbytes), max(nbytes // 4, 1)

    def run(g):
        effects = ()
        base = [_address(g, address, offset) for offset in offsets]
        for i, where in enumerate(base):
            data, effect = g.machine.lds.load(g, instruction, where, nbytes)
            write_register(g, target + i * step, data, nbytes, signed, half)
            effects += effect
        g.issue_lds(instruction, effects)

    return run


@semantics(
    *(f"ds_write_{kind}" for kind in _WRITES),
    *(f"ds_write2{st}_{kind}" for st in ("", "st64") for kind in ("b32", "b64")),
)
def _write(instruction: Instruction, ctx: Context) -> Run:
    """One or two elements per lane."""
    nbytes, half = _WRITES[instruction.base.split("_", 2)[2]]
    address, *sources = (ctx.slot(op) for op in instruction.operands)
    offsets = _offsets(instruction, nbytes)

    def run(g):
        effects = ()
        for source, offset in zip(sources, offsets, strict=True):
            data = read_register(g, source, nbytes, half)
            where = _address(g, address, offset)
            effects += g.machine.lds.store(g, instruction, where, nbytes, data)
        g.issue_lds(instruction, effects)

    return run


def transpose_pattern(bits: int):
    """Source lane and element, each (lanes, elements), of a 64-bit transposing read.

    Sixteen lanes fetch a block of 16 x (64 / bits) elements by rows and receive it by columns.
    """
    count = 64 // bits
    lane, element = np.arange(64)[:, None], np.arange(count)[None, :]
    source = (lane & ~15) + element * (16 // count) + (lane & 15) // count
    return source, np.broadcast_to(lane % count, source.shape)


@semantics("ds_read_b64_tr_b16", "ds_read_b64_tr_b8")
def _read_transposed(instruction: Instruction, ctx: Context) -> Run:
    """CDNA4: read 8 bytes per lane and transpose in groups of 16 lanes."""
    if ctx.arch != "gfx950":
        raise Unsupported(instruction, "needs gfx950")
    bits = int(instruction.base.rpartition("_b")[2])
    kind = {16: U16, 8: U8}[bits]
    lane, element = transpose_pattern(bits)
    target, address = (op.slot for op in instruction.operands[:2])
    offset = instruction.mods.get("offset", 0)

    def run(g):
        data, effects = g.machine.lds.load(g, instruction, _address(g, address, offset), 8)
        elements = np.ascontiguousarray(data).view(kind)
        moved = np.ascontiguousarray(elements[..., lane, element]).view(U32)
        write_register(g, target, moved, 8, False, "")
        g.issue_lds(instruction, effects)

    return run


_ATOMIC_NAMES = {
    "add_u32": "add",
    "sub_u32": "sub",
    "min_i32": "smin",
    "max_i32": "smax",
    "min_u32": "umin",
    "max_u32": "umax",
    "and_b32": "and",
    "or_b32": "or",
    "xor_b32": "xor",
    "add_f32": "add_f32",
    "min_f32": "min_f32",
    "max_f32": "max_f32",
    "pk_add_f16": "pk_add_f16",
    "pk_add_bf16": "pk_add_bf16",
    "add_u64": "add_x2",
    "add_f64": "add_f64",
}


def _atomic_name(base: str) -> str:
    return base.removeprefix("ds_").replace("_rtn", "")


@semantics(
    *(f"ds_{name}" for name in _ATOMIC_NAMES),
    *(f"ds_{n.rpartition('_')[0]}_rtn_{n.rpartition('_')[2]}" for n in _ATOMIC_NAMES),
)
def _atomic(instruction: Instruction, ctx: Context) -> Run:
    """Read-modify-write in LDS, lane after lane."""
    operation, _, count = ATOMICS[_ATOMIC_NAMES[_atomic_name(instruction.base)]]
    returns = "_rtn_" in instruction.base
    operands = instruction.operands[1:] if returns else instruction.operands
    address, source = (ctx.slot(op) for op in operands[:2])
    target, offset = instruction.operands[0].slot, instruction.mods.get("offset", 0)
    nbytes = 4 * count

    def run(g):
        data = read_register(g, source, nbytes)
        where = _address(g, address, offset)
        old, effects = g.machine.lds.update(g, instruction, where, nbytes, operation, data)
        if returns:
            write_register(g, target, old, nbytes, False, "")
        g.issue_lds(instruction, effects)

    return run
