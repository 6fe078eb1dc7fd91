"""The dropout mask of one tile, bit for bit that of `reference.philox`.

It uses NumPy: an operation has a third of the fixed cost of torch's, and enters no parallel region.
"""

import sys
from collections import OrderedDict
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from heedful.core.base import forks
from heedful.reference.philox import (
    MULTIPLIERS,
    ROUNDS,
    WEYL,
    WORD,
    keep_scale,
    keep_threshold,
    key_words,
)

# How many counters, of four scores each, are processed at a time: three arrays of two words each
# fit into the inner caches. One core of an AMD EPYC, NumPy 2.4, 28 November 2026: 5.1 ns a score,
# 5.6 with half as many.
CHUNK = 16 * 1024
# Bytes of masks that are kept, the latest, so that a backward need not draw its forward's again.
KEPT = 8 << 20
# Up to this many counters are kept for the next seed: on a short sequence it takes longer to make
# them than to draw by them.
FEW = 4096
_WORD, _BLOCK, _HALF = np.uint64(WORD), np.uint64(WORD >> 2), np.uint64(32)
# The increments of the key's words round by round.
_STEPS = [(np.arange(ROUNDS, dtype=np.uint64) * step).astype(np.uint32) for step in WEYL]
# Arrays without dimensions: NumPy takes 0.2 us longer for a scalar.
_FACTORS = tuple(np.array(factor, dtype=np.uint64) for factor in MULTIPLIERS)
# The 32-bit halves of a 64-bit word in memory.
_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)


class _Product(NamedTuple):
    """Views of a row that products of the first words and of the third are written to, and of its
    32-bit halves, backwards."""

    first: np.ndarray
    third: np.ndarray
    high: np.ndarray
    low: np.ndarray


class Words:
    """The words of `count` counters, and their ten rounds. All views of this memory are made once.

    The first words of all counters and the third ones are one row, in which the third ones lie in
    the reverse order. The same goes for their products by the factors. In a round the two products
    of a counter change places: read backwards, the row has them in that order. So each operand is
    one row of equal strides: NumPy's fixed cost of such an operation is a quarter of others'.
    """

    def __init__(self, count: int):
        self.count = count
        # The high halves of `even` are 0.
        self.even, self.odd, product = np.zeros((3, 2 * count), dtype=np.uint64)
        self._first, self._third = self.even[:count], self.even[count:]
        self._low, self._received = _halves(self.even, _LOW), _halves(self.odd, _LOW)
        self._products = [
            _Product(row[:count], row[count:], _halves(row, _HIGH)[::-1], _halves(row, _LOW)[::-1])
            for row in (product, self.odd)
        ]
        odd = self._products[0].low
        self._results = [row[:count] for row in (self._low, odd, self._low[::-1], odd[::-1])]
        # The two words of the key, and those of all rounds.
        self._seed = [np.empty((), dtype=np.uint32) for _ in WEYL]
        keys = np.zeros((len(WEYL), ROUNDS), dtype=np.uint64)
        self._key_words = [_halves(row, _LOW) for row in keys]
        self._keys = [(keys[0, number, ...], keys[1, number, ...]) for number in range(ROUNDS)]
        # Others of this count, which no thread uses now.
        self.free: list[Words] = []

    def fill(self, batches, heads, rows, blocks, origin) -> "Words":
        """Makes the counters, up to the products of the first round, which no key changes."""
        size = len(batches), len(heads), len(rows), len(blocks)
        batch, head, row = map(_numbers_of, (batches, heads, rows), origin)
        by_block = (_numbers(blocks, 0) & _BLOCK) * _FACTORS[0]
        by_head = (head * _FACTORS[1])[:, None, None]
        self._first.reshape(size)[:] = (by_head >> _HALF) ^ row[:, None]
        self.odd[: self.count].reshape(size)[:] = by_head
        self._third[::-1].reshape(size)[:] = (by_block >> _HALF) ^ batch[:, None, None, None]
        self.odd[::-1][: self.count].reshape(size)[:] = by_block
        return self

    def run(self, key: tuple[int, int], start: "Words") -> None:
        """The rounds of the counters that `start` has. If it is self, they are lost.

        key: two 32-bit words.
        """
        for word, seed, steps, words in zip(key, self._seed, _STEPS, self._key_words, strict=True):
            seed.fill(word)
            np.add(steps, seed, words)
        multiply, xor = np.multiply, np.bitwise_xor
        of_first, of_third = _FACTORS
        first, third, low, odd = self._first, self._third, self._low, start._received
        (key_0, key_1), *keys = self._keys
        xor(start._first, key_0, first)
        xor(start._third, key_1, third)
        product, old = self._products
        for key_0, key_1 in keys:
            multiply(first, of_first, product.first)
            multiply(third, of_third, product.third)
            xor(product.high, odd, low)
            xor(first, key_0, first)
            xor(third, key_1, third)
            odd = product.low
            product, old = old, product

    def below(self, threshold: int) -> np.ndarray:
        """Which words of each counter are less than the threshold, bool (4 count)."""
        if threshold > WORD:
            return np.ones(4 * self.count, dtype=bool)
        limit, kept = np.array(threshold, dtype=np.uint32), np.empty(4 * self.count, dtype=bool)
        for place, words in enumerate(self._results):
            np.less(words, limit, kept[place::4])
        return kept


def _halves(row: np.ndarray, which: int) -> np.ndarray:
    return row.view(np.uint32)[which::2]


def keep_tile(
    seed: int,
    dropout_p: float,
    batches: range,
    heads: range,
    rows: range,
    cols: range,
    origin: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> torch.Tensor:
    """Which scores of a tile survive: bool (batches, heads, rows, cols), ranges of step 1; not to
    be written to.

    origin: (batch, head, row, column) added to the indices, each modulo 2^32.
    """
    which = seed, dropout_p, batches, heads, rows, cols, origin
    mask = MASKS.find(which)
    if mask is None:
        mask = draw(*which)
        MASKS.keep(which, mask)
    return mask


class Masks:
    """The latest masks, up to KEPT bytes of them, and none of a quarter of that."""

    def __init__(self):
        self._lock = forks.new_lock()
        self._kept: OrderedDict[tuple, torch.Tensor] = OrderedDict()
        self.bytes = 0

    def find(self, which: tuple) -> torch.Tensor | None:
        """The value that was kept under this key."""
        with self._lock:
            return self._kept.get(which)

    def keep(self, which: tuple, mask: torch.Tensor) -> None:
        """Keeps a mask in place of the oldest."""
        size = mask.numel()
        if size > KEPT // 4:
            return
        with self._lock:
            if which in self._kept:
                return
            self._kept[which] = mask
            self.bytes += size
            while self.bytes > KEPT:
                _, oldest = self._kept.popitem(last=False)
                self.bytes -= oldest.numel()


MASKS = Masks()


def draw(seed: int, dropout_p: float, batches, heads, rows, cols, origin) -> torch.Tensor:
    """As `keep_tile`, but a mask of its own, which is not kept."""
    return torch.from_numpy(_draw(seed, dropout_p, batches, heads, rows, cols, origin))


def draw_factors(
    shape: torch.Size, seed: int, dropout_p: float, batches, heads, rows, cols, origin
) -> torch.Tensor:
    """By what dropout multiplies the probabilities of a tile: float32, of that shape."""
    kept = _draw(seed, dropout_p, batches, heads, rows, cols, origin)
    factors = np.multiply(kept, np.float32(keep_scale(dropout_p)))
    # The shape is set here: torch takes ten times as long for its first view after NumPy's work.
    return torch.from_numpy(factors.reshape(shape))


def _draw(seed: int, dropout_p: float, batches, heads, rows, cols, origin) -> np.ndarray:
    key, threshold = key_words(seed), keep_threshold(dropout_p)
    if len(batches) * len(heads) * len(rows) * len(cols) <= 4 * FEW:
        start, size, columns = _kept_words(batches, heads, rows, cols, origin)
        try:
            words = start.free.pop()
        except IndexError:
            words = Words(start.count)
        words.run(key, start)
        keep = words.below(threshold).reshape(size)
        start.free.append(words)
        return keep[..., columns]
    blocks, columns = _blocks(cols, origin[3])
    keep = np.empty((len(batches), len(heads), len(rows), 4 * len(blocks)), dtype=bool)
    row_count = len(batches) * len(heads) * len(blocks)
    step, words = max(1, CHUNK // row_count), None
    for begin in range(0, len(rows), step):
        part, whole = rows[begin : begin + step], keep[:, :, begin : begin + step]
        if words is None or words.count != len(part) * row_count:
            words = Words(len(part) * row_count)
        words.run(key, words.fill(batches, heads, part, blocks, origin[:3]))
        whole[:] = words.below(threshold).reshape(whole.shape)
    return keep[..., columns]


def _blocks(cols: range, origin: int) -> tuple[range, slice]:
    """The blocks of four columns that a range is in, and its place in them. One block of four words
    serves four columns; a column index is modulo 2^32, a block's 2^30."""
    first = cols.start + origin
    blocks = range(first >> 2, (first + len(cols) + 3) >> 2)
    return blocks, slice(first & 3, (first & 3) + len(cols))


@lru_cache(16)
def _kept_words(batches, heads, rows, cols, origin) -> tuple[Words, tuple[int, ...], slice]:
    """Counters to begin from, the shape of the mask of their blocks, and the tile's columns."""
    blocks, columns = _blocks(cols, origin[3])
    size = len(batches), len(heads), len(rows), 4 * len(blocks)
    words = Words(prod(size) // 4)
    return words.fill(batches, heads, rows, blocks, origin[:3]), size, columns


def _numbers(which: range, more: int) -> np.ndarray:
    """The range's numbers, each + more, modulo 2^64."""
    return np.arange(which.start + more, which.stop + more, dtype=np.int64).view(np.uint64)


def _numbers_of(which: range, more: int) -> np.ndarray:
    return _numbers(which, more) & _WORD
