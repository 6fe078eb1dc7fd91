"""Conversions between number formats."""

import numpy as np

from heedful.emulator.floats import (
    F16,
    F32,
    F64,
    FP8,
    I16,
    I32,
    U16,
    U32,
    bf16_bits,
    bf16_values,
    f16_bits,
    f16_bits_rtz,
    fp8_bits,
)
from heedful.emulator.program.asm import Instruction
from heedful.emulator.semantics.operands import destination, source, vector_op
from heedful.emulator.semantics.table import Context, Run, Unsupported, semantics

# Mode register bit 23: results beyond a small format's range become its largest value.
_FP16_OVERFLOW = U32(1 << 23)


def _to_int(low: int, high: int, kind, rounding=np.trunc):
    """Float to integer: round, clamp to the range, NaN to zero."""

    def convert(x):
        exact = rounding(np.where(np.isnan(x), 0, x).astype(F64))
        return np.clip(exact, low, high).astype(np.int64).astype(kind)

    return convert


def _byte(index: int):
    """One byte of a register as a float."""
    return lambda x: ((x >> U32(8 * index)) & U32(255)).astype(F32)


_I32_RANGE = (-(2**31), 2**31 - 1)

_OPS = {
    "v_cvt_f32_u32": (lambda x: x.astype(F32), "u", "f"),
    "v_cvt_f32_i32": (lambda x: x.astype(F32), "i", "f"),
    "v_cvt_u32_f32": (_to_int(0, 2**32 - 1, U32), "f", "u"),
    "v_cvt_i32_f32": (_to_int(*_I32_RANGE, I32), "f", "i"),
    "v_cvt_rpi_i32_f32": (_to_int(*_I32_RANGE, I32, lambda x: np.floor(x + 0.5)), "f", "i"),
    "v_cvt_flr_i32_f32": (_to_int(*_I32_RANGE, I32, np.floor), "f", "i"),
    "v_cvt_f32_f16": (lambda x: x.astype(F32), "h", "f"),
    "v_cvt_f16_f32": (lambda x: x.astype(F16), "f", "h"),
    "v_cvt_f16_u16": (lambda x: x.astype(F16), "w", "h"),
    "v_cvt_f16_i16": (lambda x: x.astype(F16), "x", "h"),
    "v_cvt_u16_f16": (_to_int(0, 2**16 - 1, U16), "h", "w"),
    "v_cvt_i16_f16": (_to_int(-(2**15), 2**15 - 1, I16), "h", "x"),
    "v_cvt_f64_f32": (lambda x: x.astype(F64), "f", "F"),
    "v_cvt_f32_f64": (lambda x: x.astype(F32), "F", "f"),
    "v_cvt_f64_i32": (lambda x: x.astype(F64), "i", "F"),
    "v_cvt_f64_u32": (lambda x: x.astype(F64), "u", "F"),
    "v_cvt_i32_f64": (_to_int(*_I32_RANGE, I32), "F", "i"),
    "v_cvt_u32_f64": (_to_int(0, 2**32 - 1, U32), "F", "u"),
    "v_cvt_pk_bf16_f32": (
        lambda a, b: bf16_bits(a) | (bf16_bits(b) << U32(16)),
        "ff",
        "u",
    ),
    "v_cvt_pk_f16_f32": (lambda a, b: f16_bits(a) | (f16_bits(b) << U32(16)), "ff", "u"),
    "v_cvt_pkrtz_f16_f32": (
        lambda a, b: f16_bits_rtz(a) | (f16_bits_rtz(b) << U32(16)),
        "ff",
        "u",
    ),
    "v_cvt_pk_u16_u32": (
        lambda a, b: np.minimum(a, 0xFFFF) | (np.minimum(b, 0xFFFF) << U32(16)),
        "uu",
        "u",
    ),
    "v_cvt_pk_i16_i32": (
        lambda a, b: (
            np.clip(a, -(2**15), 2**15 - 1).astype(I16).view(U16).astype(U32)
            | (np.clip(b, -(2**15), 2**15 - 1).astype(I16).view(U16).astype(U32) << U32(16))
        ),
        "ii",
        "u",
    ),
    **{f"v_cvt_f32_ubyte{i}": (_byte(i), "u", "f") for i in range(4)},
}


def _register(name: str, function, banks: str, out: str):
    @semantics(name)
    def build(instruction: Instruction, ctx: Context) -> Run:
        return vector_op(instruction, ctx, function, banks, out)


for _name, (_function, _banks, _out) in _OPS.items():
    _register(_name, _function, _banks, _out)


@semantics("v_cvt_f32_bf16")
def _cvt_f32_bf16(instruction: Instruction, ctx: Context) -> Run:
    """bfloat16 half to float32."""
    get = source(instruction, 1, ctx, "w")
    put = destination(instruction, ctx, "f")
    return lambda g: put(g, bf16_values(get(g)))


def _format(instruction: Instruction) -> str:
    return "bf8" if "_bf8" in instruction.base else "fp8"


def _saturates(g) -> bool:
    return bool((g.mode & _FP16_OVERFLOW).any())


def _scale(values):
    """A scale operand is used as the power of two in its exponent field."""
    exponent = ((values.view(U32) >> U32(23)) & U32(0xFF)).astype(I32)
    return np.ldexp(F32(1), exponent - 127)


@semantics(
    "v_cvt_pk_fp8_f32",
    "v_cvt_pk_bf8_f32",
    "v_cvt_scalef32_pk_fp8_f32",
    "v_cvt_scalef32_pk_bf8_f32",
)
def _pack_fp8(instruction: Instruction, ctx: Context) -> Run:
    """Two floats to two 8-bit floats in one half (the last op_sel) of the destination."""
    a, b = (source(instruction, i, ctx, "f") for i in (1, 2))
    scale = source(instruction, 3, ctx, "f") if "scalef32" in instruction.base else None
    table = FP8[ctx.arch][_format(instruction)]
    high = instruction.mods.get("op_sel", [0])[-1]
    slot, shift = instruction.operands[0].slot, U32(16 if high else 0)
    kept = U32(0x0000FFFF if high else 0xFFFF0000)

    def run(g):
        x, y = a(g), b(g)
        if scale:
            factor = _scale(scale(g))
            x, y = x / factor, y / factor
        full = _saturates(g)
        bits = fp8_bits(x, table, full) | (fp8_bits(y, table, full) << U32(8))
        np.copyto(g.u[slot], (g.u[slot] & kept) | (bits << shift), where=g.where)

    return run


@semantics("v_cvt_f32_fp8", "v_cvt_f32_bf8")
def _unpack_fp8(instruction: Instruction, ctx: Context) -> Run:
    """One byte (chosen by src0_sel or op_sel) of a register to float32."""
    get = source(instruction, 1, ctx, "u")
    put = destination(instruction, ctx, "f")
    table = FP8[ctx.arch][_format(instruction)]
    select = instruction.mods.get("op_sel", [0, 0])
    shift = U32(8 * (2 * select[0] + select[1]) if "op_sel" in instruction.mods else 0)
    if "op_sel" in instruction.mods and ctx.arch == "gfx942":
        raise Unsupported(instruction, "op_sel")
    return lambda g: put(g, table[(get(g) >> shift) & U32(0xFF)])


@semantics(
    "v_cvt_pk_f32_fp8",
    "v_cvt_pk_f32_bf8",
    "v_cvt_scalef32_pk_f32_fp8",
    "v_cvt_scalef32_pk_f32_bf8",
)
def _unpack_fp8_pair(instruction: Instruction, ctx: Context) -> Run:
    """Two bytes, of the low or high half, to two float32 registers."""
    get = source(instruction, 1, ctx, "u")
    scale = source(instruction, 2, ctx, "f") if "scalef32" in instruction.base else None
    table = FP8[ctx.arch][_format(instruction)]
    shift = U32(16 if instruction.mods.get("op_sel", [0])[0] else 0)
    slot = instruction.operands[0].slot

    def run(g):
        bits = get(g) >> shift
        low, high = table[bits & U32(0xFF)], table[(bits >> U32(8)) & U32(0xFF)]
        if scale:
            factor = _scale(scale(g))
            low, high = low * factor, high * factor
        np.copyto(g.f[slot], low, where=g.where)
        np.copyto(g.f[slot + 1], high, where=g.where)

    return run


@semantics("v_cvt_scalef32_pk_bf16_fp8", "v_cvt_scalef32_pk_bf16_bf8", "v_cvt_scalef32_pk_f16_fp8")
def _unpack_fp8_half(instruction: Instruction, ctx: Context) -> Run:
    """Two scaled bytes to a packed pair of 16-bit floats."""
    get, scale = source(instruction, 1, ctx, "u"), source(instruction, 2, ctx, "f")
    table = FP8[ctx.arch]["bf8" if instruction.base.endswith("bf8") else "fp8"]
    shift = U32(16 if instruction.mods.get("op_sel", [0])[0] else 0)
    encode = bf16_bits if "_pk_bf16_" in instruction.base else f16_bits
    slot = instruction.operands[0].slot

    def run(g):
        bits, factor = get(g) >> shift, _scale(scale(g))
        low, high = table[bits & U32(0xFF)], table[(bits >> U32(8)) & U32(0xFF)]
        packed = encode(low * factor) | (encode(high * factor) << U32(16))
        np.copyto(g.u[slot], packed, where=g.where)

    return run
