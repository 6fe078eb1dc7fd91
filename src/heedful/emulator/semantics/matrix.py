"""MFMA: matrix multiply-accumulate on register blocks of a whole wave. Lanes that exec disables
take part.

Inputs: lane l holds row (A) or column (B) l % M and, of the K products, the block l // M. Outputs,
float32: in a 16 x 16 block lane l, register i is row 4 (l // 16) + i; in a 32 x 32 block row 8 (i
// 4) + 4 (l // 32) + i % 4; column l % M.
"""

import re

import numpy as np

from heedful.emulator.floats import F16, F32, F64, FP4, FP8, I8, I32, U8, U16, U32
from heedful.emulator.program.asm import Instruction, Operand
from heedful.emulator.semantics.table import TABLE, Context, Run, Unsupported

_NAME = re.compile(r"v_mfma_(scale_)?(f32|i32|f64)_(\d+)x(\d+)x(\d+)_?(\w+)")
_F8F6F4 = {0: "fp8", 1: "bf8", 4: "fp4"}
_HIGH = U32(0xFFFF0000)


def _expand(block, form: str, arch: str):
    """Registers (n, groups, waves, G, M) to values (groups, waves, K, M), K in any order.

    A and B go through the same order, and a sum of products does not depend on it.
    """
    n, groups, waves, ways, m = block.shape
    source = block.transpose(1, 2, 3, 0, 4)
    if form == "bf16":
        out = np.empty((groups, waves, ways, n, 2, m), U32)
        np.left_shift(source, U32(16), out=out[..., 0, :])
        np.bitwise_and(source, _HIGH, out=out[..., 1, :])
        return out.view(F32).reshape(groups, waves, ways * n * 2, m)
    if form in ("f32", "xf32"):
        return source.view(F32).reshape(groups, waves, ways * n, m)
    parts = {"f16": U16, "fp4": U8}.get(form, U8)
    per = 4 // np.dtype(parts).itemsize
    pieces = np.ascontiguousarray(source).view(parts).reshape(groups, waves, ways, n, m, per)
    if form == "f16":
        values = pieces.view(F16).astype(F32)
    elif form == "i8":
        values = pieces.view(I8).astype(F64)
    elif form == "fp4":
        values = np.stack([FP4[pieces & 15], FP4[pieces >> 4]], axis=-1)
        values = values.reshape(*pieces.shape[:-1], 2 * per)
    else:
        values = FP8[arch][form][pieces]
    return values.swapaxes(-1, -2).reshape(groups, waves, -1, m)


def _rows(matrix, m: int):
    """A product (groups, waves, M, M) in the order of the output registers and lanes."""
    groups, waves = matrix.shape[:2]
    if m == 32:
        return matrix.reshape(groups, waves, 4, 2, 4, 32).transpose(2, 4, 0, 1, 3, 5)
    return matrix.reshape(groups, waves, 4, 4, 16).transpose(3, 0, 1, 2, 4)


def spread_lanes(a, b, c, m: int):
    """Lanes of any output register that depend on the marked lanes of A, B and C.

    A row of A reaches a row of the result, a column of B a column; C reaches its own lane. In the
    layout of the result a lane has one column and several rows, so any row marks every lane.
    """
    groups, waves = a.shape[:2]
    rows = a.reshape(groups, waves, -1, m).any(axis=2)
    columns = b.reshape(groups, waves, -1, m).any(axis=2)
    product = rows[..., :, None] | columns[..., None, :]
    lanes = _rows(product, m)
    lanes = lanes.reshape(-1, groups, waves, 64).any(axis=0)
    return lanes | c


def _registers(file, slot: int, m: int):
    """Accumulator registers as a view of the shape of `_rows`."""
    groups, waves = file.shape[1:3]
    if m == 32:
        return file[slot : slot + 16].reshape(4, 4, groups, waves, 2, 32)
    return file[slot : slot + 4].reshape(4, groups, waves, 4, 16)


def _scales(g, slot: int, byte: int, m: int, per_lane: int):
    """Block scales of one input: a power of two per lane, spread over the lane's products."""
    exponent = ((np.broadcast_to(g.u[slot], g.shape) >> U32(8 * byte)) & U32(0xFF)).astype(I32)
    factor = np.ldexp(F32(1), exponent - 127).reshape(*g.shape[:2], 64 // m, 1, m)
    return np.repeat(factor, per_lane, axis=3).reshape(*g.shape[:2], -1, m)


def _forms(kind: str, instruction: Instruction) -> tuple[str, str]:
    """Element formats of A and B."""
    if kind == "f8f6f4":
        codes = (instruction.mods.get("cbsz", 0), instruction.mods.get("blgp", 0))
        if any(code not in _F8F6F4 for code in codes):
            raise Unsupported(instruction, "6-bit floats")
        return _F8F6F4[codes[0]], _F8F6F4[codes[1]]
    if kind in ("fp8_fp8", "fp8_bf8", "bf8_fp8", "bf8_bf8"):
        a, b = kind.split("_")
        return a, b
    form = kind.removesuffix("_1k")
    if form not in ("bf16", "f16", "f32", "xf32", "i8"):
        raise Unsupported(instruction)
    return form, form


def build(instruction: Instruction, ctx: Context) -> Run:
    """D = A B + C for one MFMA."""
    match = _NAME.fullmatch(instruction.base)
    if not match or match[3] not in ("16", "32"):
        raise Unsupported(instruction)
    scaled, out, m, kind = match[1], match[2], int(match[3]), match[6]
    if out == "f64":
        return _build_f64(instruction)
    if re.match(r"\d+b", kind):
        raise Unsupported(instruction, "several blocks in one MFMA")
    form_a, form_b = _forms(kind, instruction)
    d, a, b, c = instruction.operands[:4]
    addend = _addend(c, m, out)
    ways, file_type = 64 // m, I32 if out == "i32" else F32
    scale = _build_scale(instruction, ctx, m, int(match[5]) // ways) if scaled else None

    def expand(g, operand: Operand, form: str):
        block = g.vec[operand.slot : operand.slot + operand.count]
        return _expand(block.reshape(*block.shape[:3], ways, m), form, ctx.arch)

    def run(g):
        left, right = expand(g, a, form_a), expand(g, b, form_b)
        if scale:
            left, right = scale(g, left, right)
        product = _rows(np.matmul(left.swapaxes(-1, -2), right), m)
        target = _registers(g.vec.view(file_type), d.slot, m)
        if out == "i32":
            product = product.astype(np.int64)
            target[...] = (product + addend(g)).astype(I32)
        else:
            np.add(product, addend(g), out=target)

    return run


def _build_scale(instruction: Instruction, ctx: Context, m: int, per_lane: int):
    """Multiply both inputs by the block scales of v_mfma_scale."""
    slots = [ctx.slot(op) for op in instruction.operands[4:6]]
    low = (list(instruction.mods.get("op_sel", [])) + [0, 0])[:2]
    high = (list(instruction.mods.get("op_sel_hi", [])) + [0, 0])[:2]
    bytes_ = [low[i] + 2 * high[i] for i in range(2)]

    def scale(g, left, right):
        return (
            left * _scales(g, slots[0], bytes_[0], m, per_lane),
            right * _scales(g, slots[1], bytes_[1], m, per_lane),
        )

    return scale


def _addend(operand: Operand, m: int, out: str):
    """A function that gives C, registers or a constant."""
    if operand.kind == "reg":
        kind = I32 if out == "i32" else F32
        return lambda g: _registers(g.vec.view(kind), operand.slot, m)
    value = operand.value if out == "i32" else U32(operand.bits(32)).view(F32)
    return lambda g: value


def _build_f64(instruction: Instruction) -> Run:
    """16 x 16 x 4 in float64: register pair i of lane l is row 4 i + l // 16."""
    if "16x16x4" not in instruction.base:
        raise Unsupported(instruction)
    d, a, b, c = instruction.operands[:4]

    def pairs(g, slot: int, count: int):
        low = g.vec[slot : slot + 2 * count : 2].astype(np.uint64)
        high = g.vec[slot + 1 : slot + 2 * count : 2].astype(np.uint64)
        return (low | high << np.uint64(32)).view(F64)

    def run(g):
        groups, waves = g.shape[:2]
        left = pairs(g, a.slot, 1)[0].reshape(groups, waves, 4, 16)
        right = pairs(g, b.slot, 1)[0].reshape(groups, waves, 4, 16)
        product = np.matmul(left.swapaxes(-1, -2), right).reshape(groups, waves, 4, 4, 16)
        total = product.transpose(2, 0, 1, 3, 4).reshape(4, groups, waves, 64)
        total = total + (pairs(g, c.slot, 4) if c.kind == "reg" else F64(c.value))
        bits = np.ascontiguousarray(total).view(np.uint64)
        g.vec[d.slot : d.slot + 8 : 2] = bits.astype(U32)
        g.vec[d.slot + 1 : d.slot + 8 : 2] = (bits >> np.uint64(32)).astype(U32)

    return run


def find(base: str):
    """The builder of any mnemonic of the family, or None."""
    return build if base.startswith("v_mfma_") else TABLE.get(base)
