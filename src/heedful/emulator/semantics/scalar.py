"""Scalar ALU: integers, bit fields, compares, selects, exec masks and mode register."""

import re

import numpy as np

from heedful.emulator.floats import I32, I64, U32, U64
from heedful.emulator.program.asm import EXEC, Instruction, Operand
from heedful.emulator.semantics.table import Context, Run, Unsupported, semantics

_31, _63 = U32(31), U64(63)


def _wide(a):
    return np.asarray(a).astype(I64)


def _signed(a):
    return np.asarray(a).view(I32)


def _signed64(a):
    return np.asarray(a).view(I64)


def _low(x):
    return np.asarray(x).astype(U32)


def _nonzero(result):
    """The usual condition code: the result is not zero."""
    return result, result != 0


def _add_i32(a, b):
    total = _wide(_signed(a)) + _wide(_signed(b))
    return _low(total), total != _wide(_low(total).view(I32))


def _sub_i32(a, b):
    total = _wide(_signed(a)) - _wide(_signed(b))
    return _low(total), total != _wide(_low(total).view(I32))


def _carry(total):
    return _low(total), (total < 0) | (total > 0xFFFFFFFF)


def _bfe_u32(a, b):
    offset, width = _wide(b & _31), _wide((b >> U32(16)) & U32(127))
    return _nonzero(_low((_wide(a) >> offset) & ((I64(1) << np.minimum(width, 32)) - 1)))


def _bfe_i32(a, b):
    offset, width = _wide(b & _31), np.minimum(_wide((b >> U32(16)) & U32(127)), 32)
    field = (_wide(a) >> offset) & ((I64(1) << width) - 1)
    sign = (I64(1) << np.maximum(width, 1)) >> 1
    return _nonzero(_low(np.where(width == 0, 0, (field ^ sign) - sign)))


def _bfm(a, b):
    return _low(((I64(1) << _wide(a & _31)) - 1) << _wide(b & _31)), None


def _pick(take_first, a, b):
    return np.where(take_first, a, b), take_first


def _shift_add(shift: int):
    return lambda a, b: _carry((_wide(a) << shift) + _wide(b))


def _pack(shift_a: int, shift_b: int):
    def run(a, b):
        low, high = (a >> U32(shift_a)) & U32(0xFFFF), (b >> U32(shift_b)) & U32(0xFFFF)
        return low | (high << U32(16)), None

    return run


# Two 32-bit sources. Each function gives the result and the condition code (None: unchanged).
_BINARY32 = {
    "s_add_u32": lambda a, b: _carry(_wide(a) + _wide(b)),
    "s_sub_u32": lambda a, b: _carry(_wide(a) - _wide(b)),
    "s_add_i32": _add_i32,
    "s_sub_i32": _sub_i32,
    "s_mul_i32": lambda a, b: (_low(_wide(a) * _wide(b)), None),
    "s_mul_hi_u32": lambda a, b: (
        _low((np.asarray(a).astype(U64) * np.asarray(b).astype(U64)) >> U64(32)),
        None,
    ),
    "s_mul_hi_i32": lambda a, b: (_low((_wide(_signed(a)) * _wide(_signed(b))) >> 32), None),
    "s_lshl_b32": lambda a, b: _nonzero(a << (b & _31)),
    "s_lshr_b32": lambda a, b: _nonzero(a >> (b & _31)),
    "s_ashr_i32": lambda a, b: _nonzero((_signed(a) >> _signed(b & _31)).view(U32)),
    "s_and_b32": lambda a, b: _nonzero(a & b),
    "s_or_b32": lambda a, b: _nonzero(a | b),
    "s_xor_b32": lambda a, b: _nonzero(a ^ b),
    "s_andn2_b32": lambda a, b: _nonzero(a & ~b),
    "s_orn2_b32": lambda a, b: _nonzero(a | ~b),
    "s_nand_b32": lambda a, b: _nonzero(~(a & b)),
    "s_nor_b32": lambda a, b: _nonzero(~(a | b)),
    "s_xnor_b32": lambda a, b: _nonzero(~(a ^ b)),
    "s_min_i32": lambda a, b: _pick(_signed(a) < _signed(b), a, b),
    "s_max_i32": lambda a, b: _pick(_signed(a) > _signed(b), a, b),
    "s_min_u32": lambda a, b: _pick(a < b, a, b),
    "s_max_u32": lambda a, b: _pick(a > b, a, b),
    "s_bfe_u32": _bfe_u32,
    "s_bfe_i32": _bfe_i32,
    "s_bfm_b32": _bfm,
    "s_absdiff_i32": lambda a, b: _nonzero(_low(np.abs(_wide(_signed(a)) - _wide(_signed(b))))),
    "s_pack_ll_b32_b16": _pack(0, 0),
    "s_pack_lh_b32_b16": _pack(0, 16),
    "s_pack_hh_b32_b16": _pack(16, 16),
    **{f"s_lshl{i}_add_u32": _shift_add(i) for i in (1, 2, 3, 4)},
}
_BINARY64 = {
    "s_and_b64": lambda a, b: a & b,
    "s_or_b64": lambda a, b: a | b,
    "s_xor_b64": lambda a, b: a ^ b,
    "s_andn2_b64": lambda a, b: a & ~b,
    "s_orn2_b64": lambda a, b: a | ~b,
    "s_nand_b64": lambda a, b: ~(a & b),
    "s_nor_b64": lambda a, b: ~(a | b),
    "s_xnor_b64": lambda a, b: ~(a ^ b),
}
_SHIFT64 = {
    "s_lshl_b64": lambda a, n: a << n,
    "s_lshr_b64": lambda a, n: a >> n,
    "s_ashr_i64": lambda a, n: (_signed64(a) >> n.astype(I64)).view(U64),
}


def _leading_zeros(a):
    _, exponent = np.frexp(np.asarray(a).astype(np.float64))
    return np.where(a == 0, U32(0xFFFFFFFF), _low(32 - exponent))


def _trailing_zeros(a):
    _, exponent = np.frexp((a & (~a + U32(1))).astype(np.float64))
    return np.where(a == 0, U32(0xFFFFFFFF), _low(exponent - 1))


def _reverse(a):
    result = U32(0)
    for i in range(32):
        result = result | (((a >> U32(i)) & U32(1)) << U32(31 - i))
    return result


_UNARY32 = {
    "s_abs_i32": lambda a: _nonzero(_low(np.abs(_wide(_signed(a))))),
    "s_not_b32": lambda a: _nonzero(~a),
    "s_brev_b32": lambda a: (_reverse(a), None),
    "s_sext_i32_i8": lambda a: (_low((_wide(a) << 56) >> 56), None),
    "s_sext_i32_i16": lambda a: (_low((_wide(a) << 48) >> 48), None),
    "s_bcnt1_i32_b32": lambda a: _nonzero(np.bitwise_count(a).astype(U32)),
    "s_bcnt0_i32_b32": lambda a: _nonzero(U32(32) - np.bitwise_count(a).astype(U32)),
    "s_ff1_i32_b32": lambda a: (_trailing_zeros(a), None),
    "s_flbit_i32_b32": lambda a: (_leading_zeros(a), None),
}
_COMPARES = {
    "eq": np.equal,
    "lg": np.not_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
}


def _imm16(operand: Operand):
    """A 16-bit immediate, sign-extended, as uint32."""
    value = operand.bits(16)
    return U32((value ^ 0x8000) - 0x8000 & 0xFFFFFFFF)


def _store(g, target: int, result, code):
    g.s[target][...] = result
    if code is not None:
        g.scc[...] = code


def _register32(name: str, function, arity: int):
    @semantics(name)
    def build(instruction: Instruction, ctx: Context) -> Run:
        target, *sources = (ctx.slot(op) for op in instruction.operands)
        if arity == 1:
            (a,) = sources
            return lambda g: _store(g, target, *function(g.s[a]))
        a, b = sources
        return lambda g: _store(g, target, *function(g.s[a], g.s[b]))


for _name, _function in _BINARY32.items():
    _register32(_name, _function, 2)
for _name, _function in _UNARY32.items():
    _register32(_name, _function, 1)


def _store64(g, target: int, result):
    g.s64[target][...] = result
    g.scc[...] = g.s64[target] != 0


def _register64(name: str, function):
    @semantics(name)
    def build(instruction: Instruction, ctx: Context) -> Run:
        target, a, b = (ctx.slot(op) for op in instruction.operands)
        return lambda g: _store64(g, target, function(g.s64[a], g.s64[b]))


def _register_shift(name: str, function):
    @semantics(name)
    def build(instruction: Instruction, ctx: Context) -> Run:
        target, a, b = (ctx.slot(op) for op in instruction.operands)
        return lambda g: _store64(
            g, target, function(g.s64[a], np.asarray(g.s[b]).astype(U64) & _63)
        )


for _name, _function in _BINARY64.items():
    _register64(_name, _function)
for _name, _function in _SHIFT64.items():
    _register_shift(_name, _function)


def _register_compare(name: str, test, bank: str):
    @semantics(name)
    def build(instruction: Instruction, ctx: Context) -> Run:
        first, second = instruction.operands
        a = ctx.slot(first)
        if name.startswith("s_cmpk"):
            value = _imm16(second) if bank == "i" else U32(second.bits(16))
            value = value.view(I32) if bank == "i" else value
            return lambda g: np.copyto(g.scc, test(g.s[a].view(value.dtype), value))
        b = ctx.slot(second)
        if bank == "U":
            return lambda g: np.copyto(g.scc, test(g.s64[a], g.s64[b]))
        if bank == "i":
            return lambda g: np.copyto(g.scc, test(_signed(g.s[a]), _signed(g.s[b])))
        return lambda g: np.copyto(g.scc, test(g.s[a], g.s[b]))


for _test, _function in _COMPARES.items():
    for _type, _bank in (("i32", "i"), ("u32", "u")):
        _register_compare(f"s_cmp_{_test}_{_type}", _function, _bank)
        _register_compare(f"s_cmpk_{_test}_{_type}", _function, _bank)
    if _test in ("eq", "lg"):
        _register_compare(f"s_cmp_{_test}_u64", _function, "U")


@semantics("s_mov_b32", "s_mov_b64", "s_cmov_b32", "s_cmov_b64", "s_not_b64", "s_wqm_b64")
def _move(instruction: Instruction, ctx: Context) -> Run:
    """Moves, conditional moves and the 64-bit complement."""
    target, a = (ctx.slot(op) for op in instruction.operands)
    name = instruction.mnemonic
    if name == "s_wqm_b64":
        raise Unsupported(instruction, "pixel shaders only")
    if name == "s_mov_b32":
        return lambda g: np.copyto(g.s[target], g.s[a])
    if name == "s_mov_b64":
        return lambda g: np.copyto(g.s64[target], g.s64[a])
    if name == "s_not_b64":
        return lambda g: _store64(g, target, ~g.s64[a])
    if name == "s_cmov_b32":
        return lambda g: np.copyto(g.s[target], g.s[a], where=g.scc)
    return lambda g: np.copyto(g.s64[target], g.s64[a], where=g.scc)


@semantics("s_movk_i32", "s_addk_i32", "s_mulk_i32", "s_cmovk_i32")
def _immediate(instruction: Instruction, ctx: Context) -> Run:
    """Operations with a sign-extended 16-bit immediate."""
    target, value = instruction.operands[0].slot, _imm16(instruction.operands[1])
    name = instruction.mnemonic
    if name == "s_movk_i32":
        return lambda g: np.copyto(g.s[target], value)
    if name == "s_cmovk_i32":
        return lambda g: np.copyto(g.s[target], value, where=g.scc)
    if name == "s_mulk_i32":
        return lambda g: np.copyto(g.s[target], g.s[target] * value)
    return lambda g: _store(g, target, *_add_i32(g.s[target], value))


@semantics("s_addc_u32", "s_subb_u32")
def _with_carry(instruction: Instruction, ctx: Context) -> Run:
    """Add or subtract with the condition code as carry."""
    target, a, b = (ctx.slot(op) for op in instruction.operands)
    if instruction.mnemonic == "s_addc_u32":
        return lambda g: _store(g, target, *_carry(_wide(g.s[a]) + _wide(g.s[b]) + g.scc))
    return lambda g: _store(g, target, *_carry(_wide(g.s[a]) - _wide(g.s[b]) - g.scc))


@semantics("s_cselect_b32", "s_cselect_b64")
def _select(instruction: Instruction, ctx: Context) -> Run:
    """Choose by the condition code."""
    target, a, b = (ctx.slot(op) for op in instruction.operands)
    if instruction.mnemonic == "s_cselect_b32":
        return lambda g: np.copyto(g.s[target], np.where(g.scc, g.s[a], g.s[b]))
    return lambda g: np.copyto(g.s64[target], np.where(g.scc, g.s64[a], g.s64[b]))


_SAVEEXEC = {k.removeprefix("s_").removesuffix("_b64"): f for k, f in _BINARY64.items()}


@semantics(*(f"s_{name}_saveexec_b64" for name in _SAVEEXEC))
def _saveexec(instruction: Instruction, ctx: Context) -> Run:
    """Save exec and combine it with a mask."""
    function = _SAVEEXEC[re.sub(r"s_(\w+)_saveexec_b64", r"\1", instruction.mnemonic)]
    target, a = (ctx.slot(op) for op in instruction.operands)

    def run(g):
        old = g.s64[EXEC].copy()
        new = function(np.asarray(g.s64[a]).copy(), old)
        g.s64[target][...] = old
        g.s64[EXEC][...] = new
        g.scc[...] = new != 0

    return run


@semantics("s_bitcmp0_b32", "s_bitcmp1_b32")
def _bitcmp(instruction: Instruction, ctx: Context) -> Run:
    """Test one bit."""
    a, b = (ctx.slot(op) for op in instruction.operands)
    wanted = U32(int(instruction.mnemonic[8]))
    return lambda g: np.copyto(g.scc, ((g.s[a] >> (g.s[b] & _31)) & U32(1)) == wanted)


@semantics("s_bitset0_b32", "s_bitset1_b32")
def _bitset(instruction: Instruction, ctx: Context) -> Run:
    """Set or clear one bit."""
    target, a = (ctx.slot(op) for op in instruction.operands)

    def run(g):
        bit = U32(1) << (np.asarray(g.s[a]) & _31)
        old = g.s[target]
        g.s[target][...] = old | bit if instruction.mnemonic == "s_bitset1_b32" else old & ~bit

    return run


@semantics("s_bcnt1_i32_b64", "s_ff1_i32_b64", "s_flbit_i32_b64")
def _count64(instruction: Instruction, ctx: Context) -> Run:
    """Population, first set bit, leading zeros of 64 bits."""
    target, a = (ctx.slot(op) for op in instruction.operands)
    name = instruction.mnemonic

    def run(g):
        low = _low(np.asarray(g.s64[a]) & U64(0xFFFFFFFF))
        high = _low(np.asarray(g.s64[a]) >> U64(32))
        if name == "s_bcnt1_i32_b64":
            count = (np.bitwise_count(low) + np.bitwise_count(high)).astype(U32)
            _store(g, target, *_nonzero(count))
        elif name == "s_ff1_i32_b64":
            upper = np.where(high == 0, U32(0xFFFFFFFF), _trailing_zeros(high) + U32(32))
            g.s[target][...] = np.where(low == 0, upper, _trailing_zeros(low))
        else:
            lower = np.where(low == 0, U32(0xFFFFFFFF), _leading_zeros(low) + U32(32))
            g.s[target][...] = np.where(high == 0, lower, _leading_zeros(high))

    return run


@semantics("s_setreg_imm32_b32", "s_setreg_b32")
def _setreg(instruction: Instruction, ctx: Context) -> Run:
    """Write a field of the mode register; rounding and denormal modes must stay as launched."""
    match = re.search(r"hwreg\((\w+)(?:,\s*(\d+),\s*(\d+))?\)", instruction.text)
    name, offset, size = match.groups() if match else ("", None, None)
    if name not in ("HW_REG_MODE", "1"):
        return lambda g: None
    offset, size = int(offset or 0), int(size or 32)
    if offset < 8:
        raise Unsupported(instruction, "changing rounding or denormal mode at run time")
    value = ctx.slot(instruction.operands[-1])
    mask = U32(((1 << size) - 1) << offset)

    def run(g):
        g.mode[...] = (g.mode & ~mask) | ((g.s[value] << U32(offset)) & mask)

    return run
