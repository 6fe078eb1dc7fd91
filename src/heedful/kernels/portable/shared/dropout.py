"""The dropout mask, drawn from Philox words.

Score (row, col) of query head h in sequence b is kept if word `col & 3` of the counter (col >> 2,
row, h, b) under the 64-bit seed is below a threshold. So the mask depends on indices alone, never
on tiles. Shapes: M query rows, N key columns.
"""

import triton
import triton.language as tl

from heedful.kernels.args.shared import Dropout
from heedful.kernels.common.philox import philox_words, place_of, seed_words


@triton.jit
def counter_words(words, cols_N, rows_M, head, seq):
    """The four Philox words for each row and each group of four columns."""
    key0, key1, _ = words
    zero_MN = tl.zeros([rows_M.shape[0], cols_N.shape[0]], tl.uint32)
    places = zero_MN + cols_N[None, :], zero_MN + rows_M[:, None], zero_MN + head, zero_MN + seq
    return philox_words(*places, key0, key1)


@triton.jit
def keep_quads(words, row, col, head, seq, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which scores of the tile from (row, col) on are kept, with col % 4 == 0: one counter for four
    columns."""
    rows_M = (row + tl.arange(0, BLOCK_M)).to(tl.uint32)
    quads_N = (col + 4 * tl.arange(0, BLOCK_N // 4)).to(tl.uint32) >> 2
    w0, w1, w2, w3 = counter_words(words, quads_N, rows_M, head, seq)
    # join adds an innermost axis, so [.., x, y] holds word 2 * x + y.
    drawn = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(drawn, [BLOCK_M, BLOCK_N]) < words[2]


@triton.jit
def keep_singles(words, row, col, head, seq, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which scores of the tile from (row, col) on are kept, for any col: one counter for each
    score."""
    rows_M = (row + tl.arange(0, BLOCK_M)).to(tl.uint32)
    cols_N = (col + tl.arange(0, BLOCK_N)).to(tl.uint32)
    w0, w1, w2, w3 = counter_words(words, cols_N >> 2, rows_M, head, seq)
    which_MN = (cols_N & 3)[None, :]
    low = tl.where(which_MN == 0, w0, w1)
    high = tl.where(which_MN == 2, w2, w3)
    return tl.where(which_MN < 2, low, high) < words[2]


@triton.jit
def dropout_words(dropout: Dropout):
    """(both words of the seed, threshold), or zeros without dropout."""
    if dropout.IS_ON:
        key0, key1 = seed_words(dropout.seed)
        return key0, key1, dropout.threshold.to(tl.uint32, bitcast=True)
    else:
        return 0, 0, 0


@triton.jit
def keep_tile(
    words, b, h, row0, col0, dropout: Dropout, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Which scores [M, N] of the tile from (row0, col0) on are kept, of head h in sequence b.
    Indices in the whole problem are modulo 2^32. words: the result of `dropout_words`."""
    seq, head, origin_m, origin_n = place_of(dropout, b, h)
    row = origin_m + row0
    col = origin_n + col0
    head = head.to(tl.uint32)
    seq = seq.to(tl.uint32)
    if dropout.IS_QUAD:
        return keep_quads(words, row, col, head, seq, BLOCK_M, BLOCK_N)
    else:
        return keep_singles(words, row, col, head, seq, BLOCK_M, BLOCK_N)
