"""64-bit integer vector arithmetic, carries, and select."""

import numpy as np

from heedful.emulator.floats import F32, I64, U32, U64
from heedful.emulator.program.asm import VCC, Instruction
from heedful.emulator.semantics.operands import destination, is_plain, source, vector_op
from heedful.emulator.semantics.table import Context, Run, semantics

_63 = U64(63)

# mnemonic: (function, source banks, result bank)
_OPS = {
    "v_lshl_add_u64": (lambda a, b, c: (a << b.astype(U64)) + c, "UuU", "U"),
    "v_lshlrev_b64": (lambda a, b: b << (a.astype(U64) & _63), "uU", "U"),
    "v_lshrrev_b64": (lambda a, b: b >> (a.astype(U64) & _63), "uU", "U"),
    "v_ashrrev_i64": (lambda a, b: b >> (a.astype(I64) & 63), "uI", "I"),
    "v_mov_b64": (np.positive, "U", "U"),
}


def _register(name: str, function, banks: str, out: str):
    @semantics(name)
    def build(instruction: Instruction, ctx: Context) -> Run:
        return vector_op(instruction, ctx, function, banks, out)


for _name, (_function, _banks, _out) in _OPS.items():
    _register(_name, _function, _banks, _out)


@semantics("v_mad_u64_u32", "v_mad_i64_i32")
def _mad64(instruction: Instruction, ctx: Context) -> Run:
    """32 x 32 + 64 bits; the second result is the carry out of 64 bits."""
    bank, kind = ("i", I64) if "i64" in instruction.base else ("u", U64)
    a, b = (source(instruction, i, ctx, bank) for i in (2, 3))
    c = source(instruction, 4, ctx, "U")
    put = destination(instruction, ctx, "U")
    carry = instruction.operands[1]

    def run(g):
        product = (a(g).astype(kind) * b(g).astype(kind)).view(U64)
        addend = c(g)
        total = product + addend
        put(g, total)
        if carry.kind == "reg":
            g.set_lanes(carry.slot, total < addend)

    return run


@semantics(
    "v_add_co_u32",
    "v_addc_co_u32",
    "v_sub_co_u32",
    "v_subb_co_u32",
    "v_subrev_co_u32",
    "v_subbrev_co_u32",
)
def _carry(instruction: Instruction, ctx: Context) -> Run:
    """Add or subtract with carry out, and carry in where there is a fifth operand."""
    a, b = (source(instruction, i, ctx, "u") for i in (2, 3))
    carry_in = instruction.operands[4].slot if len(instruction.operands) > 4 else None
    carry_out = instruction.operands[1].slot
    put = destination(instruction, ctx, "u")
    name = instruction.base

    def run(g):
        x, y = a(g).astype(I64), b(g).astype(I64)
        if "rev" in name:
            x, y = y, x
        extra = g.lanes(carry_in) if carry_in is not None else 0
        total = x + y + extra if "add" in name else x - y - extra
        put(g, total.astype(U32))
        g.set_lanes(carry_out, (total < 0) | (total > 0xFFFFFFFF))

    return run


@semantics("v_cndmask_b32")
def _cndmask(instruction: Instruction, ctx: Context) -> Run:
    """Choose operand 2 in the lanes of a mask, operand 1 elsewhere."""
    operands = instruction.operands
    mask = operands[3].slot if len(operands) > 3 else VCC
    target = operands[0].slot
    if is_plain(instruction, 1) and is_plain(instruction, 2):
        x, y = ctx.slot(operands[1]), ctx.slot(operands[2])

        def run(g):
            np.copyto(g.u[target], np.where(g.lanes(mask), g.u[y], g.u[x]), where=g.where)

        return run
    floats = any(op.neg or op.abs for op in operands[1:3])
    bank = "f" if floats else "u"
    a, b = (source(instruction, i, ctx, bank) for i in (1, 2))
    put = destination(instruction, ctx, "u")

    def run_modified(g):
        picked = np.where(g.lanes(mask), b(g), a(g))
        put(g, picked.astype(F32).view(U32) if floats else picked)

    return run_modified
