"""Packed instructions: two float32 in a register pair, or two 16-bit values in one register."""

import numpy as np

from heedful.emulator.floats import F16, F32, F64, I16, U16, U32, bf16_bits, flush, fma32
from heedful.emulator.program.asm import Instruction
from heedful.emulator.semantics.operands import source
from heedful.emulator.semantics.table import Context, Run, Unsupported, semantics


def _selects(instruction: Instruction, count: int):
    """op_sel, op_sel_hi, neg_lo and neg_hi of a packed instruction, padded to `count` sources."""
    mods = instruction.mods
    take = lambda name, default: (list(mods.get(name, [])) + [default] * count)[:count]  # noqa: E731
    return take("op_sel", 0), take("op_sel_hi", 1), take("neg_lo", 0), take("neg_hi", 0)


def _half_slots(instruction: Instruction, ctx: Context, selects) -> list[int]:
    """The register of each source that one half of a packed float32 instruction reads."""
    slots = []
    for operand, select in zip(instruction.operands[1:], selects, strict=False):
        pair = operand.kind == "reg" and operand.count > 1
        slots.append(ctx.slot(operand) + (select if pair else 0))
    return slots


@semantics("v_pk_mul_f32", "v_pk_add_f32", "v_pk_fma_f32")
def _packed_float(instruction: Instruction, ctx: Context) -> Run:
    """The same operation on both registers of each pair; op_sel chooses, neg changes the sign."""
    ufunc = {"v_pk_mul_f32": np.multiply, "v_pk_add_f32": np.add}.get(instruction.base)
    function = ufunc or fma32
    count = len(instruction.operands) - 1
    select_lo, select_hi, neg_lo, neg_hi = _selects(instruction, count)
    low = _half_slots(instruction, ctx, select_lo)
    high = _half_slots(instruction, ctx, select_hi)
    target = instruction.operands[0].slot
    if ufunc and target not in high and not any(neg_lo + neg_hi) and not ctx.flushes:
        (a, b), (c, d) = low, high

        def run(g):
            regs = g.f
            ufunc(regs[a], regs[b], out=regs[target], where=g.where)
            ufunc(regs[c], regs[d], out=regs[target + 1], where=g.where)

        return run
    tidy = flush if ctx.flushes else (lambda x: x)

    def half(g, slots, negated):
        return tidy(
            function(
                *(
                    tidy(np.negative(g.f[s]) if neg else g.f[s])
                    for s, neg in zip(slots, negated, strict=True)
                )
            )
        )

    def run_general(g):
        first, second = half(g, low, neg_lo), half(g, high, neg_hi)
        np.copyto(g.f[target], first, where=g.where)
        np.copyto(g.f[target + 1], second, where=g.where)

    return run_general


@semantics("v_pk_mov_b32")
def _packed_move(instruction: Instruction, ctx: Context) -> Run:
    """Low result from source 0 (op_sel chooses), high result from source 1."""
    select, _, _, _ = _selects(instruction, 2)
    low, high = _half_slots(instruction, ctx, select)
    target = instruction.operands[0].slot

    def run(g):
        first, second = np.array(g.u[low]), np.array(g.u[high])
        np.copyto(g.u[target], first, where=g.where)
        np.copyto(g.u[target + 1], second, where=g.where)

    return run


@semantics("v_pack_b32_f16")
def _pack(instruction: Instruction, ctx: Context) -> Run:
    """Two halves side by side; op_sel chooses which half of each source."""
    low, high = (source(instruction, i, ctx, "h") for i in (1, 2))
    target = instruction.operands[0].slot

    def run(g):
        bits = [np.broadcast_to(get(g), g.shape).view(U16).astype(U32) for get in (low, high)]
        np.copyto(g.u[target], bits[0] | (bits[1] << U32(16)), where=g.where)

    return run


def _fma16(a, b, c):
    return (a.astype(F64) * b + c).astype(F16)


def _in_bf16(function):
    """A bfloat16 operation on values held as float32."""
    return lambda *args: (bf16_bits(function(*args)) << U32(16)).view(F32)


# mnemonic: (function, element type; "bf16" is computed in float32)
_HALVES = {
    "v_pk_add_f16": (np.add, F16),
    "v_pk_mul_f16": (np.multiply, F16),
    "v_pk_fma_f16": (_fma16, F16),
    "v_pk_max_f16": (np.fmax, F16),
    "v_pk_min_f16": (np.fmin, F16),
    "v_pk_maximum3_f16": (lambda a, b, c: np.maximum(np.maximum(a, b), c), F16),
    "v_pk_minimum3_f16": (lambda a, b, c: np.minimum(np.minimum(a, b), c), F16),
    "v_pk_add_u16": (np.add, U16),
    "v_pk_add_i16": (np.add, U16),
    "v_pk_sub_u16": (np.subtract, U16),
    "v_pk_sub_i16": (np.subtract, U16),
    "v_pk_mul_lo_u16": (np.multiply, U16),
    "v_pk_mad_u16": (lambda a, b, c: a * b + c, U16),
    "v_pk_max_u16": (np.maximum, U16),
    "v_pk_min_u16": (np.minimum, U16),
    "v_pk_max_i16": (np.maximum, I16),
    "v_pk_min_i16": (np.minimum, I16),
    "v_pk_lshlrev_b16": (lambda a, b: b << (a & U16(15)), U16),
    "v_pk_lshrrev_b16": (lambda a, b: b >> (a & U16(15)), U16),
    "v_pk_ashrrev_i16": (lambda a, b: b >> (a & I16(15)), I16),
    "v_pk_add_bf16": (_in_bf16(np.add), "bf16"),
    "v_pk_mul_bf16": (_in_bf16(np.multiply), "bf16"),
}


def _build_halves(instruction: Instruction, ctx: Context, function, kind) -> Run:
    if "clamp" in instruction.mods:
        raise Unsupported(instruction, "clamp of packed halves")
    count = len(instruction.operands) - 1
    select_lo, select_hi, neg_lo, neg_hi = _selects(instruction, count)
    operands = instruction.operands[1:]
    slots = [ctx.slot(op) for op in operands]
    # A float constant is a 16-bit value in the low half.
    constants = [U32(op.bits(16)) if isinstance(op.value, float) else None for op in operands]
    target = instruction.operands[0].slot

    def fetch(g, i: int, high: int, negated: int):
        constant = constants[i]
        register = g.u[slots[i]] if constant is None else constant
        bits = register >> U32(16 if high else 0)
        value = (bits << U32(16)).view(F32) if kind == "bf16" else bits.astype(U16).view(kind)
        return np.negative(value) if negated else value

    def encode(value):
        if kind == "bf16":
            return value.view(U32) >> U32(16)
        return value.view(U16).astype(U32)

    def run(g):
        low = function(*(fetch(g, i, select_lo[i], neg_lo[i]) for i in range(count)))
        high = function(*(fetch(g, i, select_hi[i], neg_hi[i]) for i in range(count)))
        np.copyto(g.u[target], encode(low) | (encode(high) << U32(16)), where=g.where)

    return run


def _register(name: str, function, kind):
    @semantics(name)
    def build(instruction: Instruction, ctx: Context) -> Run:
        return _build_halves(instruction, ctx, function, kind)


for _name, (_function, _kind) in _HALVES.items():
    _register(_name, _function, _kind)
