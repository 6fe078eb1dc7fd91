"""The dropout mask, in NumPy: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011), counted by score so that no tile size, backend or rank can change it.

key = (seed low word, seed high word); counter = (column >> 2, row, query head, batch);
a score takes word (column & 3) and is kept iff word < floor((1 - p) * 2^32).
"""

import numpy as np

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF


def key_words(seed: int) -> tuple[int, int]:
    """The two key words of a 64-bit seed; a negative seed counts as its two's complement."""
    return seed & WORD, (seed >> 32) & WORD


def keep_threshold(dropout_p: float) -> int:
    """A word below this is kept: 2^32 (every word) at p = 0, 0 (none) at p = 1."""
    return int((1.0 - dropout_p) * 2.0**32)


def keep_scale(dropout_p: float) -> float:
    """The factor of kept probabilities; at p = 1 nothing is kept, and 0 avoids 0/0."""
    return 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0


def philox4x32(key: tuple[int, int], counter) -> np.ndarray:
    """Ten rounds.

    key: two 32-bit words. counter: four integer arrays that broadcast together.
    Returns uint32 (..., 4).
    """
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c).astype(np.uint64) for c in counter))
    k0, k1 = key
    for _ in range(ROUNDS):
        wide0 = (c0 & np.uint64(WORD)) * np.uint64(MULTIPLIERS[0])
        wide1 = (c2 & np.uint64(WORD)) * np.uint64(MULTIPLIERS[1])
        high0, low0 = wide0 >> np.uint64(32), wide0 & np.uint64(WORD)
        high1, low1 = wide1 >> np.uint64(32), wide1 & np.uint64(WORD)
        c0, c1, c2, c3 = high1 ^ c1 ^ np.uint64(k0), low1, high0 ^ c3 ^ np.uint64(k1), low0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def keep_mask(
    seed: int,
    dropout_p: float,
    batch: int,
    heads: int,
    rows: int,
    cols: int,
    origin: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> np.ndarray:
    """Which scores of one sequence survive: bool (heads, rows, cols).

    origin: (batch, head, row, column) added to the indices, each modulo 2^32.
    """
    word = np.uint64(WORD)
    batch_index = (batch + origin[0]) & WORD
    head = (np.arange(heads, dtype=np.uint64) + np.uint64(origin[1])) & word
    row = (np.arange(rows, dtype=np.uint64) + np.uint64(origin[2])) & word
    col = (np.arange(cols, dtype=np.uint64) + np.uint64(origin[3])) & word
    # One block of four words serves four columns.
    blocks, block_of_col = np.unique(col >> np.uint64(2), return_inverse=True)
    counter = (blocks[None, None, :], row[None, :, None], head[:, None, None], batch_index)
    words = philox4x32(key_words(seed), counter)
    picked = words[:, :, block_of_col, (col & np.uint64(3)).astype(np.int64)]
    return picked.astype(np.uint64) < np.uint64(keep_threshold(dropout_p))
