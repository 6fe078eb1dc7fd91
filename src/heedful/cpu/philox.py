"""The dropout mask of one tile, bit for bit that of `reference.philox`.

It uses NumPy: an operation has a third of the fixed cost of torch's, and enters no parallel region.
"""

from collections import OrderedDict
from functools import lru_cache

import numpy as np
import torch

from heedful.core.base import forks
from heedful.reference.philox import MULTIPLIERS, ROUNDS, WEYL, WORD, keep_threshold, key_words

# How many counters, of four scores each, are processed at a time: three arrays of two words each
# fit into the inner caches. One core of an AMD EPYC, NumPy 2, 26 November 2026: 4.4 ns a score, 11
# with four times as many.
CHUNK = 16 * 1024
# Bytes of masks that are kept, the latest, so that a backward need not draw its forward's again.
KEPT = 8 << 20
# Up to this many counters are kept for the next seed: on a short sequence it takes longer to make
# them than to draw by them.
FEW = 4096
_WORD, _BLOCK, _HALF = np.uint64(WORD), np.uint64(WORD >> 2), np.uint64(32)
# The increments of the key's words round by round, (ROUNDS, 2, 1).
_STEPS = np.arange(ROUNDS, dtype=np.uint64)[:, None, None] * np.array(WEYL, np.uint64)[:, None]
_FACTORS = np.array(MULTIPLIERS, dtype=np.uint64)[:, None]


def philox4x32(
    key: tuple[int, int], even: np.ndarray, odd: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Ten rounds. The memory of both arguments is used.

    key: two 32-bit words. even: the first and the third word of counters, uint64 (2, n). odd: the
    second and the fourth. Returns both, updated; the odd ones have undefined bits above 32.
    """
    wide = np.empty_like(even)
    keys = np.array(key, dtype=np.uint64)[:, None] + _STEPS
    for words in np.bitwise_and(keys, _WORD, keys):
        np.multiply(even, _FACTORS, wide)
        wide = wide[::-1]
        np.right_shift(wide, _HALF, even)
        # The bits of `odd` above a word are cut off here.
        np.bitwise_xor(even, odd, even)
        np.bitwise_xor(even, words, even)
        np.bitwise_and(even, _WORD, even)
        odd, wide = wide, odd
    return even, odd


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
    key, threshold = key_words(seed), np.uint64(keep_threshold(dropout_p))
    # One block of four words serves four columns; a column index is modulo 2^32, a block's 2^30.
    first = cols.start + origin[3]
    blocks = range(first >> 2, (first + len(cols) + 3) >> 2)
    keep = np.empty((len(batches), len(heads), len(rows), len(blocks), 4), dtype=bool)
    # By place of a word, all scores.
    words = keep.transpose(4, 0, 1, 2, 3)
    step = max(1, CHUNK // max(1, len(batches) * len(heads) * len(blocks)))
    for begin in range(0, len(rows), step):
        counters = _counters(batches, heads, rows[begin : begin + step], blocks, origin[:3])
        size = counters.shape[2:]
        even, odd = philox4x32(key, *counters.reshape(2, 2, -1))
        np.less(even.reshape(2, *size), threshold, words[::2, :, :, begin : begin + step])
        odd = np.bitwise_and(odd, _WORD, odd).reshape(2, *size)
        np.less(odd, threshold, words[1::2, :, :, begin : begin + step])
    whole = torch.from_numpy(keep).flatten(-2)
    return whole if whole.shape[-1] == len(cols) else whole[..., first & 3 :][..., : len(cols)]


def _counters(batches, heads, rows, blocks, origin) -> np.ndarray:
    """Counters that `philox4x32` may write to: uint64 (2, 2, batches, heads, rows, blocks)."""
    count = len(batches) * len(heads) * len(rows) * len(blocks)
    if count > FEW:
        return _made_counters(batches, heads, rows, blocks, origin)
    return _kept_counters(batches, heads, rows, blocks, origin).copy()


def _made_counters(batches, heads, rows, blocks, origin) -> np.ndarray:
    batch, head, row = map(_numbers_of, (batches, heads, rows), origin)
    size = len(batches), len(heads), len(rows), len(blocks)
    counters = np.empty((2, 2, *size), dtype=np.uint64)
    counters[0, 0] = _numbers(blocks, 0) & _BLOCK
    counters[0, 1] = head[:, None, None]
    counters[1, 0] = row[:, None]
    counters[1, 1] = batch[:, None, None, None]
    return counters


@lru_cache(16)
def _kept_counters(batches, heads, rows, blocks, origin) -> np.ndarray:
    return _made_counters(batches, heads, rows, blocks, origin)


def _numbers(which: range, more: int) -> np.ndarray:
    """The range's numbers, each + more, modulo 2^64."""
    return np.arange(which.start + more, which.stop + more, dtype=np.int64).view(np.uint64)


def _numbers_of(which: range, more: int) -> np.ndarray:
    return _numbers(which, more) & _WORD
