"""The code that loads and stores of every width share: widths by name, halves of registers,
atomics."""

import numpy as np

from heedful.emulator.floats import F16, F32, F64, I8, I16, I32, U8, U16, U32, U64, bf16_bits

# Bytes in memory by the last part of the mnemonic.
WIDTH = {
    "ubyte": 1,
    "sbyte": 1,
    "byte": 1,
    "ushort": 2,
    "sshort": 2,
    "short": 2,
    "dword": 4,
    "dwordx2": 8,
    "dwordx3": 12,
    "dwordx4": 16,
}


def width_of(kind: str) -> tuple[int, bool, str]:
    """(bytes, signed, half) of a kind as `short_d16_hi`; half is "", "lo" or "hi"."""
    half = "hi" if kind.endswith("_d16_hi") else "lo" if kind.endswith("_d16") else ""
    name = kind.removesuffix("_hi").removesuffix("_d16")
    return WIDTH[name], name.startswith("s") and name != "short", half


def extend(value, nbytes: int, signed: bool):
    """Zero-extended bytes or shorts to 32 bits, with their sign if asked."""
    if not signed:
        return value
    kind = (U8, I8) if nbytes == 1 else (U16, I16)
    return value.astype(kind[0]).view(kind[1]).astype(I32).view(U32)


def write_register(g, slot: int, data, nbytes: int, signed: bool, half: str):
    """Put loaded data (groups, waves, 64, words) into registers, under exec."""
    if nbytes >= 4:
        count = nbytes // 4
        np.copyto(g.vec[slot : slot + count], data.transpose(3, 0, 1, 2), where=g.where)
        return
    value = extend(data[..., 0], nbytes, signed)
    if half == "hi":
        value = (value << U32(16)) | (g.u[slot] & U32(0xFFFF))
    elif half == "lo":
        value = (value & U32(0xFFFF)) | (g.u[slot] & U32(0xFFFF0000))
    np.copyto(g.u[slot], value, where=g.where)


def read_register(g, slot: int, nbytes: int, half: str = ""):
    """Data to store (groups, waves, 64, words) from registers."""
    count = max(nbytes // 4, 1)
    data = g.vec[slot : slot + count].transpose(1, 2, 3, 0)
    return data >> U32(16) if half == "hi" else data


def _pair(kind):
    """See (n, 2) words as n 64-bit values, and back."""
    return lambda words: np.ascontiguousarray(words).view(kind)


def _typed(function, kind):
    """An operation on words seen as another type of the same or double size."""
    see = _pair(kind)
    return lambda old, data: np.ascontiguousarray(function(see(old), see(data))).view(U32)


def _halves(kind):
    return _typed(np.add, kind)


def _add_bf16(old, data):
    result = U32(0)
    for shift in (0, 16):
        a, b = ((((x >> U32(shift)) & U32(0xFFFF)) << U32(16)).view(F32) for x in (old, data))
        result = result | (bf16_bits(a + b) << U32(shift))
    return result


def _compare_swap(old, data):
    """Data is (new, expected)."""
    half = old.shape[-1]
    equal = (old == data[..., half:]).all(-1, keepdims=True)
    return np.where(equal, data[..., :half], old)


# name: (operation on words, words of data per word of memory, words of memory)
ATOMICS = {
    "swap": (lambda old, data: data, 1, 1),
    "cmpswap": (_compare_swap, 2, 1),
    "add": (lambda old, data: old + data, 1, 1),
    "sub": (lambda old, data: old - data, 1, 1),
    "smin": (_typed(np.minimum, I32), 1, 1),
    "smax": (_typed(np.maximum, I32), 1, 1),
    "umin": (np.minimum, 1, 1),
    "umax": (np.maximum, 1, 1),
    "and": (np.bitwise_and, 1, 1),
    "or": (np.bitwise_or, 1, 1),
    "xor": (np.bitwise_xor, 1, 1),
    "inc": (lambda old, data: np.where(old >= data, U32(0), old + U32(1)), 1, 1),
    "dec": (lambda old, data: np.where((old == 0) | (old > data), data, old - U32(1)), 1, 1),
    "add_f32": (_typed(np.add, F32), 1, 1),
    "min_f32": (_typed(np.fmin, F32), 1, 1),
    "max_f32": (_typed(np.fmax, F32), 1, 1),
    "pk_add_f16": (_halves(F16), 1, 1),
    "pk_add_bf16": (_add_bf16, 1, 1),
    "swap_x2": (lambda old, data: data, 1, 2),
    "cmpswap_x2": (_compare_swap, 2, 2),
    "add_x2": (_typed(np.add, U64), 1, 2),
    "sub_x2": (_typed(np.subtract, U64), 1, 2),
    "add_f64": (_typed(np.add, F64), 1, 2),
    "min_f64": (_typed(np.fmin, F64), 1, 2),
    "max_f64": (_typed(np.fmax, F64), 1, 2),
}
