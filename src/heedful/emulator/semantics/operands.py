"""How vector instructions fetch operands and store results: banks, modifiers, DPP and SDWA.

A bank says how a 32-bit register is seen: "u" uint32, "i" int32, "f" float32, "h" float16 (one
half), "w" uint16 and "x" int16 (one half), and for register pairs "U" uint64, "I" int64, "F"
float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from heedful.emulator.floats import F16, F32, F64, I16, I32, I64, U16, U32, U64, flush
from heedful.emulator.program.asm import Instruction, Operand
from heedful.emulator.semantics.table import Context, Run, Unsupported

if TYPE_CHECKING:
    from heedful.emulator.machine.state import Batch

Get = Callable[["Batch"], Any]
Put = Callable[["Batch", Any], None]

_LANE = np.arange(64)
_PARTS = {"DWORD": (0, 32), "WORD_0": (0, 16), "WORD_1": (16, 16)} | {
    f"BYTE_{i}": (8 * i, 8) for i in range(4)
}
_HALF_TYPES = {"h": F16, "w": U16, "x": I16}
_WIDE_TYPES = {"U": U64, "I": I64, "F": F64}


def dpp_pattern(instruction: Instruction):
    """Source lane of each lane and whether it exists, for gfx9's DPP; None without DPP."""
    mods, every = instruction.mods, np.ones(64, bool)
    row, place = _LANE & ~15, _LANE & 15
    if "quad_perm" in mods:
        return (_LANE & ~3) | np.array(mods["quad_perm"])[_LANE & 3], every
    if "row_shr" in mods:
        return row | (place - mods["row_shr"]) & 15, place >= mods["row_shr"]
    if "row_shl" in mods:
        return row | (place + mods["row_shl"]) & 15, place + mods["row_shl"] < 16
    if "row_ror" in mods:
        return row | (place - mods["row_ror"]) & 15, every
    if "row_newbcast" in mods:
        return row | mods["row_newbcast"], every
    if "row_mirror" in mods:
        return row | 15 - place, every
    if "row_half_mirror" in mods:
        return (_LANE & ~7) | 7 - (_LANE & 7), every
    if "row_bcast" in mods:  # the last lane of each row (15) or of each half (31) to the next
        step = mods["row_bcast"] + 1
        return np.maximum(_LANE // step * step - 1, 0), step <= _LANE
    if "wave_shr" in mods:
        return np.maximum(_LANE - 1, 0), _LANE >= 1
    if "wave_shl" in mods:
        return np.minimum(_LANE + 1, 63), _LANE < 63
    if "wave_ror" in mods:
        return (_LANE - 1) & 63, every
    if "wave_rol" in mods:
        return (_LANE + 1) & 63, every
    return None


def dpp_writes(instruction: Instruction):
    """Lanes that row_mask and bank_mask let a DPP instruction write."""
    rows, banks = instruction.mods.get("row_mask", 15), instruction.mods.get("bank_mask", 15)
    return ((rows >> (_LANE >> 4)) & (banks >> ((_LANE >> 2) & 3)) & 1).astype(bool)


def _raw(instruction: Instruction, position: int, ctx: Context) -> Get:
    """The uint32 value of a source operand, DPP and SDWA selections applied."""
    operand = instruction.operands[position]
    slot = ctx.slot(operand)
    number = position - _destinations(instruction)
    if number == 0 and (pattern := dpp_pattern(instruction)):
        lane, exists = pattern
        bound = exists.all() or "bound_ctrl" in instruction.mods
        if not bound:  # the lane is not written at all: see `destination`
            return lambda g: g.u[slot][..., lane]
        return lambda g: np.where(exists & g.mask[..., lane], g.u[slot][..., lane], U32(0))
    select = instruction.mods.get(f"src{number}_sel", "DWORD")
    if select != "DWORD":
        shift, width = _PARTS[select]
        mask, sign = U32((1 << width) - 1), U32(1 << (width - 1))
        if operand.signed:
            return lambda g: (((g.u[slot] >> U32(shift)) & mask) ^ sign) - sign
        return lambda g: (g.u[slot] >> U32(shift)) & mask
    return lambda g: g.u[slot]


def _destinations(instruction: Instruction) -> int:
    """How many leading operands are results, for numbering the sources."""
    name = instruction.base
    return 2 if "_co_u32" in name or "div_scale" in name or name.startswith("v_mad_u64") else 1


def _modified(get: Get, operand: Operand, flushes: bool) -> Get:
    """Apply |x|, -x and input flushing to a float operand."""
    if flushes:
        inner = get
        get = lambda g: flush(inner(g))  # noqa: E731 - a wrapper per modifier, most often none
    if operand.abs and operand.neg:
        return lambda g: -np.abs(get(g))
    if operand.abs:
        return lambda g: np.abs(get(g))
    if operand.neg:
        return lambda g: np.negative(get(g))
    return get


def is_plain(instruction: Instruction, position: int) -> bool:
    """The operand is a register or constant without any modifier."""
    operand, mods = instruction.operands[position], instruction.mods
    modified = operand.neg or operand.abs or dpp_pattern(instruction) is not None
    return not (modified or "op_sel" in mods or any(k.endswith("_sel") for k in mods))


def source(instruction: Instruction, position: int, ctx: Context, bank: str) -> Get:
    """A function that fetches operand `position` as `bank` says."""
    operand = instruction.operands[position]
    if bank in _WIDE_TYPES:
        return _wide_source(operand, ctx, bank)
    if bank in _HALF_TYPES:
        return _half_source(instruction, position, ctx, bank)
    if bank == "f" and is_plain(instruction, position):
        slot = ctx.slot(operand)
        return _modified(lambda g: g.f[slot], operand, ctx.flushes)
    raw = _raw(instruction, position, ctx)
    if bank == "u":
        return raw
    if bank == "i":
        return lambda g: raw(g).view(I32)
    return _modified(lambda g: raw(g).view(F32), operand, ctx.flushes)


def _half_source(instruction: Instruction, position: int, ctx: Context, bank: str) -> Get:
    operand, kind = instruction.operands[position], _HALF_TYPES[bank]
    if operand.kind == "const":
        value = U16(operand.bits(16)).view(kind)
        return _modified(lambda g: value, operand, False)
    raw = _raw(instruction, position, ctx)
    high = instruction.mods.get("op_sel", [0] * 8)[position - 1]
    shift = U32(16 if high else 0)
    return _modified(lambda g: (raw(g) >> shift).astype(U16).view(kind), operand, False)


def _wide_source(operand: Operand, ctx: Context, bank: str) -> Get:
    kind = _WIDE_TYPES[bank]
    if operand.kind == "const":
        value = U64(operand.bits(64)).view(kind)
        return _modified(lambda g: value, operand, False)
    slot = operand.slot
    if operand.is_scalar:
        return _modified(lambda g: g.s64[slot][..., None].view(kind), operand, False)

    def pair(g: Batch):
        wide = g.u[slot + 1].astype(U64)
        wide <<= U64(32)
        wide |= g.u[slot]
        return wide.view(kind)

    return _modified(pair, operand, False)


def _output(instruction: Instruction, ctx: Context) -> Callable | None:
    """Output modifier, clamp and flushing of a float32 result, or None."""
    factor = F32(instruction.mods.get("mul", 1)) / F32(instruction.mods.get("div", 1))
    clamp = "clamp" in instruction.mods
    if factor == 1 and not clamp and not ctx.flushes:
        return None

    def finish(value):
        value = value * factor
        if clamp:
            value = np.fmin(np.fmax(value, F32(0)), F32(1))
        return flush(value) if ctx.flushes else value

    return finish


def destination(instruction: Instruction, ctx: Context, bank: str, position: int = 0) -> Put:
    """A function that stores a result of type `bank` to operand `position`."""
    slot = instruction.operands[position].slot
    if bank in _WIDE_TYPES:
        return _wide_destination(slot)
    if bank in _HALF_TYPES:
        return _half_destination(instruction, slot)
    if "dst_sel" in instruction.mods and instruction.mods["dst_sel"] != "DWORD":
        return _sdwa_destination(instruction, slot)
    if bank == "f":
        finish = _output(instruction, ctx)
        if finish:
            return _masked(instruction, lambda g: g.f[slot], finish)
        return _masked(instruction, lambda g: g.f[slot])
    if "clamp" in instruction.mods:
        raise Unsupported(instruction, "integer clamp")
    if bank == "i":
        return _masked(instruction, lambda g: g.u[slot], lambda x: x.view(U32))
    return _masked(instruction, lambda g: g.u[slot])


def _masked(instruction: Instruction, target: Get, finish: Callable | None = None) -> Put:
    """Store under exec, and under what DPP lets through."""
    pattern = dpp_pattern(instruction)
    lanes = None
    if pattern is not None:
        lanes = dpp_writes(instruction)
        if "bound_ctrl" not in instruction.mods:
            lanes = lanes & pattern[1]
    if lanes is not None and not lanes.all():
        return lambda g, x: np.copyto(target(g), finish(x) if finish else x, where=g.mask & lanes)
    if finish:
        return lambda g, x: np.copyto(target(g), finish(x), where=g.where)
    return lambda g, x: np.copyto(target(g), x, where=g.where)


def _wide_destination(slot: int) -> Put:
    def put(g: Batch, value):
        bits = np.broadcast_to(value, g.shape).view(U64)
        np.copyto(g.u[slot], bits, where=g.where, casting="unsafe")
        np.copyto(g.u[slot + 1], bits >> U64(32), where=g.where, casting="unsafe")

    return put


def _half_destination(instruction: Instruction, slot: int) -> Put:
    """16-bit results clear the other half, unless op_sel sends them to the high one."""
    high = len(select := instruction.mods.get("op_sel", [0])) > 1 and select[-1]
    clamp = "clamp" in instruction.mods

    def put(g: Batch, value):
        if clamp:
            value = np.fmin(np.fmax(value, F16(0)), F16(1))
        bits = value.view(U16).astype(U32)
        if high:
            bits = (bits << U32(16)) | (g.u[slot] & U32(0xFFFF))
        np.copyto(g.u[slot], bits, where=g.where)

    return put


def _sdwa_destination(instruction: Instruction, slot: int) -> Put:
    shift, width = _PARTS[instruction.mods["dst_sel"]]
    mask = (1 << width) - 1
    rest = instruction.mods.get("dst_unused", "UNUSED_PAD")
    if rest == "UNUSED_SEXT":
        raise Unsupported(instruction, "sign extension of an SDWA result")

    def put(g: Batch, value):
        bits = (np.asarray(value).view(U32) & U32(mask)) << U32(shift)
        if rest == "UNUSED_PRESERVE":
            bits = bits | (g.u[slot] & U32(~(mask << shift) & 0xFFFFFFFF))
        np.copyto(g.u[slot], bits, where=g.where)

    return put


def vector_op(instruction: Instruction, ctx: Context, function, banks: str, out: str) -> Run:
    """Execute `function` on the sources (operand 1 onward, typed by `banks`) into operand 0.

    A ufunc on plain operands of one bank writes straight into the register.
    """
    count = len(banks)
    plain = all(is_plain(instruction, i + 1) for i in range(count))
    simple = plain and set(banks) == {out} and isinstance(function, np.ufunc)
    modified = set(instruction.mods) & {"clamp", "mul", "div", "dst_sel"}
    if simple and out in "uf" and not modified and not (out == "f" and ctx.flushes):
        return _direct(instruction, ctx, function, count, out)
    get = [source(instruction, i + 1, ctx, bank) for i, bank in enumerate(banks)]
    put = destination(instruction, ctx, out)
    if count == 1:
        (a,) = get
        return lambda g: put(g, function(a(g)))
    if count == 2:
        a, b = get
        return lambda g: put(g, function(a(g), b(g)))
    return lambda g: put(g, function(*[fetch(g) for fetch in get]))


def _direct(instruction: Instruction, ctx: Context, ufunc, count: int, bank: str) -> Run:
    slots = [ctx.slot(op) for op in instruction.operands[: count + 1]]
    if count == 1:
        d, a = slots
        if bank == "f":
            return lambda g: ufunc(g.f[a], out=g.f[d], where=g.where)
        return lambda g: ufunc(g.u[a], out=g.u[d], where=g.where)
    if count == 2:
        d, a, b = slots
        if bank == "f":

            def run_float(g: Batch):
                regs = g.f
                ufunc(regs[a], regs[b], out=regs[d], where=g.where)

            return run_float

        def run_bits(g: Batch):
            regs = g.u
            ufunc(regs[a], regs[b], out=regs[d], where=g.where)

        return run_bits
    raise AssertionError("ufuncs of three operands do not occur")
