"""Dropout in the Hopper backward: the assembly by which a warp sets the signs of dropped
probabilities, done one instruction after the other by all of its lanes."""

import re

import numpy as np
import pytest

pytest.importorskip("triton")

from heedful.kernels.hopper.backward import scores
from heedful.reference.philox import keep_mask, keep_threshold, key_words, philox4x32

KEYS, WARPS, LANES = 64, 8, np.arange(32)
SEED = -77


def permuted(low, high, selector):
    """prmt.b32: each nibble of the selector says which of eight bytes goes there."""
    pool = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    bytes_of = [(selector >> 4 * i & 7) * 8 for i in range(4)]
    made = [
        (pool >> at.astype(np.uint64) & np.uint64(255)) << 8 * i for i, at in enumerate(bytes_of)
    ]
    return np.bitwise_or.reduce(made).astype(np.int64)


INSTRUCTIONS = {
    "mov.u32": lambda a: a,
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "setp.eq.u32": lambda a, b: a == b,
    "setp.ge.u32": lambda a, b: a >= b,
    "selp.b32": lambda a, b, p: np.where(p, a, b),
    "prmt.b32": permuted,
    "shfl.sync.bfly.b32": lambda a, lanes, clamp, members: a[LANES ^ lanes],
    # The table 0x78.
    "lop3.b32": lambda a, b, c, table: a ^ (b & c),
}


def executed(text: str, registers: list[np.ndarray]) -> list[np.ndarray]:
    """The registers of a warp's lanes after this assembly, which has no loops."""
    values = {f"${i}": value for i, value in enumerate(registers)} | {"%laneid": LANES}

    def value(name: str):
        return values[name] if name in values else np.full(32, int(name, 0))

    for line in text.removeprefix("{").removesuffix("}").split(";"):
        words = re.split(r"[\s,]+", line.strip())
        if words[0] in ("", ".reg"):
            continue
        predicate = words.pop(0)[1:] if words[0].startswith("@") else ""
        kind, target, *sources = words
        made = INSTRUCTIONS[kind](*map(value, sources))
        if predicate:
            made = np.where(values[predicate], made, values[target])
        values[target] = made
    return [values[f"${i}"] for i in range(len(registers))]


def places(bases: list[list[int]], index):
    """The place of a number of a layout, by the bases of its bits."""
    bits = [(index[..., None] >> bit & 1) * np.array(base) for bit, base in enumerate(bases)]
    return np.bitwise_or.reduce(bits)


def words_of(warp: int, queries: int, origin) -> list[np.ndarray]:
    """The four tensors of a warp's words, a register after the other."""
    layout = scores.counters_layout(queries, WARPS)
    at = places(layout.warp_bases, np.array(warp)) + places(layout.lane_bases, LANES)
    batch, head, row, col = origin
    made = []
    for i in range(queries // 8):
        quad, query = np.moveaxis(at + places(layout.reg_bases, np.array(i)), -1, 0)
        counter = ((quad * 4 + col) >> 2, query + row, np.array(head), np.array(batch))
        made.append(philox4x32(key_words(SEED), counter).T.astype(np.int64))
    return list(np.stack(made, 1).reshape(-1, 32))


@pytest.mark.parametrize("queries", [64, 128])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 1.0])
def test_the_signs_of_pairs_are_those_of_the_reference_mask(queries, dropout_p):
    origin = 3, 5, 192, 2**31 + 64
    kept = keep_mask(SEED, dropout_p, 0, 1, queries, KEYS, origin)[0]
    threshold = np.full(32, keep_threshold(dropout_p))
    pairs = [np.full(32, i * 0x10001, np.int64) for i in range(queries // 4)]
    seen = np.zeros(kept.shape, int)
    for warp in range(WARPS):
        registers = [*pairs, *pairs, *words_of(warp, queries, origin), threshold]
        after = executed(scores._signs(queries), registers)
        for i, pair in enumerate(pairs):
            assert not ((after[i] ^ pair) & 0x7FFF7FFF).any()
            # The registers of an accumulator of keys by queries: two queries of one key.
            key = warp % 4 * 16 + LANES // 4 + 8 * (i % 2)
            for half in range(2):
                query = 8 * (i // 2) + LANES % 4 * 2 + half
                is_dropped = after[i] >> 16 * half + 15 & 1 == 1
                assert (is_dropped != kept[query, key]).all()
                seen[query, key] += 1
    assert (seen == 2).all()
