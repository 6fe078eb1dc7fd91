"""Integer and bit-field vector instructions of one 32-bit (or 16-bit) result."""

from dataclasses import replace

import numpy as np

from heedful.emulator.floats import I32, I64, U8, U16, U32, U64
from heedful.emulator.program.asm import Instruction
from heedful.emulator.semantics.operands import destination, source, vector_op
from heedful.emulator.semantics.table import Context, Run, Unsupported, semantics

_31, _24 = U32(31), U32(0xFFFFFF)


def _wide(a):
    return np.asarray(a).astype(U64)


def _signed24(a):
    return (np.asarray(a).astype(I64) << 40) >> 40


def _narrow(x):
    return np.asarray(x).astype(U32)


def _mul_hi_i32(a, b):
    return _narrow((a.astype(I64) * b.astype(I64)) >> 32)


def _bfe_u32(a, offset, width):
    offset, width = offset & _31, width & _31
    return (a >> offset) & ((U32(1) << width) - U32(1))


def _bfe_i32(a, offset, width):
    offset, width = offset & _31, (width & _31).astype(I64)
    field = ((a >> offset) & _narrow((I64(1) << width) - 1)).astype(I64)
    sign = (I64(1) << np.maximum(width, 1)) >> 1
    return _narrow(np.where(width == 0, 0, (field ^ sign) - sign))


def _alignbit(a, b, shift):
    return _narrow(((_wide(a) << U64(32)) | _wide(b)) >> _wide(shift & _31))


def _alignbyte(a, b, shift):
    return _narrow(((_wide(a) << U64(32)) | _wide(b)) >> _wide((shift & U32(3)) * U32(8)))


def _perm_alike(a, b, select: int):
    """`_perm` of whole bytes, the same in every lane."""
    a, b = np.broadcast_arrays(a, b)
    octets = [np.ascontiguousarray(x).view(U8).reshape(*x.shape, 4) for x in (b, a)]
    result = np.empty(octets[0].shape, U8)
    for byte in range(4):
        code = select >> 8 * byte & 7
        result[..., byte] = octets[code >> 2][..., code & 3]
    return result.view(U32)[..., 0]


def _perm(a, b, select):
    """Choose four bytes of {a, b}; selectors 8 to 11 spread a sign, 12 is 0x00, above is 0xff."""
    first = int(np.min(select))
    if first == np.max(select) and not first & 0xF8F8F8F8:
        return _perm_alike(a, b, first)
    data = (_wide(a) << U64(32)) | _wide(b)
    result = U32(0)
    for byte in range(4):
        code = (select >> U32(8 * byte)) & U32(0xFF)
        picked = (data >> (_wide(np.minimum(code, 7)) * U64(8))) & U64(0xFF)
        half = np.minimum(np.maximum(code, 8), 11) - U32(8)
        sign = ((data >> (_wide(half) * U64(16) + U64(15))) & U64(1)) * U64(0xFF)
        value = np.where(code <= 7, picked, np.where(code <= 11, sign, U64(0xFF)))
        value = np.where(code == 12, U64(0), value)
        result = result | (_narrow(value) << U32(8 * byte))
    return result


def _reverse(a):
    octets = np.ascontiguousarray(a).astype(">u4").view(np.uint8)
    bits = np.unpackbits(octets, axis=-1, bitorder="big")
    shape = (*np.shape(a), 32)
    return np.packbits(bits.reshape(shape)[..., ::-1], axis=-1).view(">u4")[..., 0].astype(U32)


def _ffbh_u32(a):
    """Leading zeros, all ones for zero."""
    _, exponent = np.frexp(np.asarray(a).astype(np.float64))
    return np.where(a == 0, U32(0xFFFFFFFF), _narrow(32 - exponent))


def _ffbl_b32(a):
    """Trailing zeros, all ones for zero."""
    lowest = a & (~a + U32(1))
    _, exponent = np.frexp(lowest.astype(np.float64))
    return np.where(a == 0, U32(0xFFFFFFFF), _narrow(exponent - 1))


def _median(a, b, c):
    return np.maximum(np.minimum(np.maximum(a, b), c), np.minimum(a, b))


def _halves(function):
    """A 16-bit operation with a wrapping uint16 result."""
    return lambda *args: np.asarray(function(*args)).astype(U16)


# mnemonic: (function, source banks, result bank)
_OPS = {
    "v_mov_b32": (np.positive, "u", "u"),
    "v_accvgpr_read_b32": (np.positive, "u", "u"),
    "v_accvgpr_write_b32": (np.positive, "u", "u"),
    "v_accvgpr_mov_b32": (np.positive, "u", "u"),
    "v_not_b32": (np.invert, "u", "u"),
    "v_bfrev_b32": (_reverse, "u", "u"),
    "v_ffbh_u32": (_ffbh_u32, "u", "u"),
    "v_ffbl_b32": (_ffbl_b32, "u", "u"),
    "v_add_u32": (np.add, "uu", "u"),
    "v_add_i32": (np.add, "uu", "u"),
    "v_sub_u32": (np.subtract, "uu", "u"),
    "v_sub_i32": (np.subtract, "uu", "u"),
    "v_subrev_u32": (lambda a, b: b - a, "uu", "u"),
    "v_and_b32": (np.bitwise_and, "uu", "u"),
    "v_or_b32": (np.bitwise_or, "uu", "u"),
    "v_xor_b32": (np.bitwise_xor, "uu", "u"),
    "v_xnor_b32": (lambda a, b: ~(a ^ b), "uu", "u"),
    "v_lshlrev_b32": (lambda a, b: b << (a & _31), "uu", "u"),
    "v_lshrrev_b32": (lambda a, b: b >> (a & _31), "uu", "u"),
    "v_ashrrev_i32": (lambda a, b: b >> (a & 31), "ii", "i"),
    "v_mul_lo_u32": (np.multiply, "uu", "u"),
    "v_mul_hi_u32": (lambda a, b: _narrow((_wide(a) * _wide(b)) >> U64(32)), "uu", "u"),
    "v_mul_hi_i32": (_mul_hi_i32, "ii", "u"),
    "v_mul_u32_u24": (lambda a, b: (a & _24) * (b & _24), "uu", "u"),
    "v_mul_i32_i24": (lambda a, b: _narrow(_signed24(a) * _signed24(b)), "uu", "u"),
    "v_max_u32": (np.maximum, "uu", "u"),
    "v_min_u32": (np.minimum, "uu", "u"),
    "v_max_i32": (np.maximum, "ii", "i"),
    "v_min_i32": (np.minimum, "ii", "i"),
    "v_bcnt_u32_b32": (lambda a, b: np.bitwise_count(a).astype(U32) + b, "uu", "u"),
    "v_bfm_b32": (lambda a, b: ((U32(1) << (a & _31)) - U32(1)) << (b & _31), "uu", "u"),
    "v_lshlrev_b16": (lambda a, b: b << (a & U16(15)), "ww", "w"),
    "v_lshrrev_b16": (lambda a, b: b >> (a & U16(15)), "ww", "w"),
    "v_ashrrev_i16": (lambda a, b: b >> (a & 15), "xx", "x"),
    "v_add_u16": (_halves(np.add), "ww", "w"),
    "v_sub_u16": (_halves(np.subtract), "ww", "w"),
    "v_subrev_u16": (_halves(lambda a, b: b - a), "ww", "w"),
    "v_mul_lo_u16": (_halves(np.multiply), "ww", "w"),
    "v_mad_u16": (_halves(lambda a, b, c: a * b + c), "www", "w"),
    "v_max_u16": (np.maximum, "ww", "w"),
    "v_min_u16": (np.minimum, "ww", "w"),
    "v_max_i16": (np.maximum, "xx", "x"),
    "v_min_i16": (np.minimum, "xx", "x"),
    "v_add3_u32": (lambda a, b, c: a + b + c, "uuu", "u"),
    "v_and_or_b32": (lambda a, b, c: (a & b) | c, "uuu", "u"),
    "v_or3_b32": (lambda a, b, c: a | b | c, "uuu", "u"),
    "v_xad_u32": (lambda a, b, c: (a ^ b) + c, "uuu", "u"),
    "v_lshl_or_b32": (lambda a, b, c: (a << (b & _31)) | c, "uuu", "u"),
    "v_lshl_add_u32": (lambda a, b, c: (a << (b & _31)) + c, "uuu", "u"),
    "v_add_lshl_u32": (lambda a, b, c: (a + b) << (c & _31), "uuu", "u"),
    "v_bfe_u32": (_bfe_u32, "uuu", "u"),
    "v_bfe_i32": (_bfe_i32, "uuu", "u"),
    "v_bfi_b32": (lambda a, b, c: (a & b) | (~a & c), "uuu", "u"),
    "v_alignbit_b32": (_alignbit, "uuu", "u"),
    "v_alignbyte_b32": (_alignbyte, "uuu", "u"),
    "v_perm_b32": (_perm, "uuu", "u"),
    "v_mad_u32_u24": (lambda a, b, c: (a & _24) * (b & _24) + c, "uuu", "u"),
    "v_mad_i32_i24": (lambda a, b, c: _narrow(_signed24(a) * _signed24(b)) + c, "uuu", "u"),
    "v_max3_u32": (lambda a, b, c: np.maximum(np.maximum(a, b), c), "uuu", "u"),
    "v_min3_u32": (lambda a, b, c: np.minimum(np.minimum(a, b), c), "uuu", "u"),
    "v_max3_i32": (lambda a, b, c: np.maximum(np.maximum(a, b), c), "iii", "i"),
    "v_min3_i32": (lambda a, b, c: np.minimum(np.minimum(a, b), c), "iii", "i"),
    "v_med3_i32": (_median, "iii", "i"),
    "v_med3_u32": (_median, "uuu", "u"),
    "v_sad_u32": (lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c, "uuu", "u"),
}


def _int(a):
    return np.asarray(a).view(I32)


def _saturate(function, low: int, high: int):
    """The exact integer result, kept within the range."""
    return lambda a, b: np.clip(function(a.astype(I64), b.astype(I64)), low, high)


# The additions under the clamp modifier.
_CLAMPED = {
    "v_add_u32": lambda a, b: _narrow(_saturate(np.add, 0, 2**32 - 1)(a, b)),
    "v_sub_u32": lambda a, b: _narrow(_saturate(np.subtract, 0, 2**32 - 1)(a, b)),
    "v_subrev_u32": lambda a, b: _narrow(_saturate(np.subtract, 0, 2**32 - 1)(b, a)),
    "v_add_i32": lambda a, b: _narrow(_saturate(np.add, -(2**31), 2**31 - 1)(_int(a), _int(b))),
    "v_sub_i32": lambda a, b: _narrow(
        _saturate(np.subtract, -(2**31), 2**31 - 1)(_int(a), _int(b))
    ),
}


def _register(name: str, function, banks: str, out: str):
    @semantics(name)
    def build(instruction: Instruction, ctx: Context) -> Run:
        if "clamp" in instruction.mods and name in _CLAMPED:
            mods = {k: v for k, v in instruction.mods.items() if k != "clamp"}
            plain = replace(instruction, mods=mods)
            return vector_op(plain, ctx, _CLAMPED[name], banks, out)
        return vector_op(instruction, ctx, function, banks, out)


for _name, (_function, _banks, _out) in _OPS.items():
    _register(_name, _function, _banks, _out)


@semantics("v_bitop3_b32", "v_bitop3_b16")
def _bitop3(instruction: Instruction, ctx: Context) -> Run:
    """Any boolean function of three inputs: bit 4a + 2b + c of the table is its value."""
    table = instruction.mods.get("bitop3")
    if not isinstance(table, int):
        raise Unsupported(instruction, "bitop3 without a truth table")
    get = [source(instruction, i, ctx, "u") for i in (1, 2, 3)]
    bank = "w" if instruction.base.endswith("16") else "u"
    put = destination(instruction, ctx, bank)
    terms = [i for i in range(8) if table >> i & 1]

    def run(g):
        a, b, c = (fetch(g) for fetch in get)
        result = U32(0)
        for term in terms:
            x = a if term & 4 else ~a
            y = b if term & 2 else ~b
            z = c if term & 1 else ~c
            result = result | (x & y & z)
        put(g, np.asarray(result).astype(U16) if bank == "w" else np.asarray(result))

    return run


@semantics("v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32")
def _mbcnt(instruction: Instruction, ctx: Context) -> Run:
    """Bits of a mask below this lane, in its low or high half, plus a base."""
    lane = np.arange(64)
    if "_lo_" in instruction.base:
        below = (1 << np.minimum(lane, 32)) - 1
    else:
        below = (1 << np.maximum(lane - 32, 0)) - 1
    below = below.astype(U32)
    count = lambda a, b: np.bitwise_count(a & below).astype(U32) + b  # noqa: E731 - table entry
    return vector_op(instruction, ctx, count, "uu", "u")
