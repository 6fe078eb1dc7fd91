"""key_ranges in the Hopper backward as words of rows: the words that the producer makes, and the
assembly by which a thread hides probabilities, done one instruction after the other."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")

from heedful.kernels.hopper.backward import mask
from support.hopper.assembly import executed
from support.hopper.hosted import Host
from support.problems.grids import in_turns

KEYS = 128


class Arrays:
    """What `word_of` needs of gl, of NumPy's."""

    maximum, minimum = staticmethod(np.maximum), staticmethod(np.minimum)
    constexpr = None


def words_of(bounds, rows, col: int, ranges: int, **window):
    """The words of rows at the key tile from `col` on, as int32."""
    left, right = window.get("left"), window.get("right")
    params = SimpleNamespace(
        mask=SimpleNamespace(
            RANGES=ranges,
            HAS_LEFT=left is not None,
            HAS_RIGHT=right is not None,
            left=left,
            right=right,
        )
    )
    tile = SimpleNamespace(col=col, seq=SimpleNamespace(off=window["off"], len_k=window["len_k"]))
    made = Host({"gl": Arrays}).turned(mask.range_words)(bounds, rows, params, tile)
    return made.astype(np.int64).astype(np.uint32)


def key_bytes(key: int, ranges: int) -> int:
    once = key | (KEYS - 1 - key) << 8
    return once | once << 16 if ranges == 2 else once


def hidden(words, queries: int, warp: int, lane: int, ranges: int) -> dict[tuple[int, int], bool]:
    """By (query, key): whether this thread of a warp of eight hides the probability. Registers are
    those of an accumulator of keys by queries."""
    count = queries // 2
    mine = [i // 4 * 8 + lane % 4 * 2 + i % 2 for i in range(count)]
    keys = [warp * 16 + lane // 4 + 8 * (i // 2 % 2) for i in range(count)]
    columns = [8 * (i // 2) + lane % 4 * 2 + i % 2 for i in range(count // 2)]
    registers = list(range(1, count + 1)) * 2
    registers += [int(words[query]) for query in columns]
    registers += [key_bytes(warp * 16 + lane // 4 + 8 * row, ranges) for row in range(2)]
    after = executed(mask._hidden_by_words(queries, ranges), registers)
    for i in range(count):
        assert after[i] in (0, i + 1)
    return {(mine[i], keys[i]): after[i] == 0 for i in range(count)}


@pytest.mark.parametrize(
    "window, queries, ranges",
    in_turns([{}, {"right": 0}, {"left": 90, "right": 30}], (64, 128), (1, 2)),
    ids=str,
)
def test_a_thread_hides_what_no_range_shows(queries, ranges, window):
    rng = np.random.default_rng(queries + ranges)
    far = [-(2**31), -1, 0, 1, 127, 128, 129, 255, 256, 300, 2**31 - 1]
    bounds = rng.choice([*far, *rng.integers(0, 400, 20)], (2 * ranges, queries))
    row0, off, len_k = 40, 100, 310
    rows, keys = row0 + np.arange(queries), np.arange(512)
    seen = np.zeros((queries, 512), bool)
    for begin, end in bounds.reshape(ranges, 2, queries):
        seen |= (keys >= begin[:, None]) & (keys < end[:, None])
    place = rows[:, None] + off
    seen &= keys < len_k
    if "right" in window:
        seen &= keys <= place + window["right"]
    if "left" in window:
        seen &= keys >= place - window["left"]
    given = tuple(bounds.astype(np.int64))
    for col in (0, 128, 256):
        words = words_of(given, rows, col, ranges, off=off, len_k=len_k, **window)
        found = {}
        for warp in range(8):
            for lane in range(32):
                found |= hidden(words, queries, warp, lane, ranges)
        assert len(found) == queries * KEYS
        for (query, key), is_hidden in found.items():
            assert is_hidden != seen[query, col + key]
