"""The PTX that makes numbers of stored integers, executed here for every word there is. No kernel
runs: processes of both kinds (`support.runs.interpreted`) will do.
"""

import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import triton.language as tl

from heedful.kernels.portable.decode.cache import assembly, unit_of

SIGNS = {"bf16": (8, 7, 127), "f16": (5, 10, 15)}  # bits of exponent and mantissa, bias


def number(bits: np.ndarray, kind: str) -> np.ndarray:
    """What 16 bits say in float64, subnormal numbers too."""
    exponents, mantissas, bias = SIGNS[kind]
    exponent = (bits >> mantissas) & ((1 << exponents) - 1)
    mantissa = (bits & ((1 << mantissas) - 1)) / (1 << mantissas)
    size = np.where(
        exponent == 0,
        mantissa * 2.0 ** (1 - bias),
        (1 + mantissa) * 2.0 ** (exponent.astype(float) - bias),
    )
    return np.where(bits >> 15, -size, size)


def is_representable(x: np.ndarray, kind: str) -> bool:
    """Whether no result of these had to be rounded: whole multiples of the last bit."""
    _, mantissas, bias = SIGNS[kind]
    exponent = np.maximum(np.frexp(x)[1] - 1, 1 - bias)
    return bool((np.ldexp(x, mantissas - exponent) % 1 == 0).all())


def prmt(a: np.ndarray, b: int, select: int) -> np.ndarray:
    both = a.astype(np.uint64) | np.uint64(b << 32)
    picked = [(both >> np.uint64(8 * (select >> 4 * i & 7))) & np.uint64(255) for i in range(4)]
    found = [byte << np.uint64(8 * i) for i, byte in enumerate(picked)]
    return np.sum(found, axis=0).astype(np.int64)


def executed(text: str, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two results of the instructions, as numbers. words: of 32 bits."""
    registers: dict = {"$1": words}

    def value(name: str) -> Any:
        return int(name, 0) if re.match(r"-?\d", name) else registers[name]

    for line in text.strip("{} ").split(";"):
        if not line.strip() or line.split()[0] == ".reg":
            continue
        op, rest = line.split(maxsplit=1)
        to, *given = [name.strip() for name in rest.split(",")]
        x = [value(name) for name in given]
        if op == "mov.b32":
            registers[to] = x[0]
        elif op in ("xor.b32", "and.b32", "or.b32", "shr.b32"):
            of = {"xor": np.bitwise_xor, "and": np.bitwise_and, "or": np.bitwise_or}
            registers[to] = of.get(op[:-4], np.right_shift)(x[0], x[1])
        elif op == "lop3.b32":
            # Of each bit of three, the bit of the table at the number that they make.
            a, b, c, table = x
            registers[to] = np.zeros_like(words)
            for bit in range(32):
                row = 4 * (a >> bit & 1) + 2 * (b >> bit & 1) + (c >> bit & 1)
                registers[to] |= (table >> row & 1) << bit
        elif op == "prmt.b32":
            registers[to] = prmt(*x)
        else:
            kind = "bf16" if "bf16" in op else "f16"
            halves = []
            for shift in (0, 16):
                a, *more = (number(np.asarray(v) >> shift & 0xFFFF, kind) for v in x)
                halves.append(a * more[0] + more[1] if op.startswith("fma.rn") else a - more[0])
            assert op.startswith(("fma.rn", "sub")) and to == "$0"
            assert all(is_representable(half, kind) for half in halves)
            registers[to] = tuple(halves)
    return registers["$0"]


@pytest.mark.parametrize("how", [1, 2], ids=["bits", "fma"])
@pytest.mark.parametrize("is_bf16", [True, False], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("values", [2, 4], ids=["int8", "int4"])
def test_every_stored_integer_becomes_its_number_exactly(values, is_bf16, how):
    low = np.arange(1 << 16, dtype=np.int64)
    # The other word differs in every bit, so that none comes from the wrong one.
    high = low ^ 0xFFFF
    unit = unit_of(values, tl.int8, tl.bfloat16 if is_bf16 else tl.float16, how)
    bits = 16 // values
    for i in range(values):
        got = executed(assembly(values, tl.int8, is_bf16, how, i), low | high << 16)
        for found, word in zip(got, (low, high), strict=True):
            stored = word >> bits * i & ((1 << bits) - 1)
            want = stored - (stored >> bits - 1 << bits)
            assert np.array_equal(found * unit, want)


@pytest.mark.parametrize("how", [1, 2])
@pytest.mark.parametrize(
    "stored, kind",
    [(tl.float8e4nv, "e4m3"), (tl.float8e5, "e5m2"), (tl.float8e4b8, "e4m3")],
    ids=str,
)
def test_floats_of_8_bits_become_float16_by_the_instruction_of_their_kind(stored, kind, how):
    for i, byte in ((0, "0x4420"), (1, "0x4431")):
        text = assembly(2, stored, False, how, i)
        assert f"cvt.rn.f16x2.{kind}x2 t, c;" in text and f"prmt.b32 t, t, 0, {byte};" in text
        assert text.endswith(" mov.b32 $0, t; }")
        wide = assembly(2, stored, True, how, i)
        assert f"cvt.rn.f16x2.{kind}x2 t, c;" in wide and "cvt.rn.bf16x2.f32 $0, g, f;" in wide
        assert f"prmt.b32 t, t, 0, {byte};" in wide
