"""Philox4x32-10 (Salmon et al., SC'11) and the dropout mask drawn from it.

Score (row, col) of query head h in sequence b is kept iff word `col & 3` of the counter
(col >> 2, row, h, b) under the 64-bit seed is below a threshold: the mask depends on indices alone,
never on tiles. Shapes: M query rows, N key columns.
"""

import triton
import triton.language as tl


@triton.jit
def philox_words(c0, c1, c2, c3, key0, key1):
    """The four words of counters (c0, c1, c2, c3), all uint32 and broadcastable."""
    for _ in tl.static_range(10):
        hi0 = tl.umulhi(c0, 0xD2511F53)
        lo0 = c0 * 0xD2511F53
        hi2 = tl.umulhi(c2, 0xCD9E8D57)
        lo2 = c2 * 0xCD9E8D57
        c0 = hi2 ^ c1 ^ key0
        c1 = lo2
        c2 = hi0 ^ c3 ^ key1
        c3 = lo0
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def seed_words(seed):
    """The low and high word of the 64-bit seed at this address."""
    value = tl.load(seed)
    return value.to(tl.uint32), (value >> 32).to(tl.uint32)


@triton.jit
def keep_quads(
    key0, key1, threshold, row, col, head, seq, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Kept scores of the tile from (row, col) on, with col % 4 == 0: one draw per 4 columns."""
    rows_M = (row + tl.arange(0, BLOCK_M)).to(tl.uint32)
    quads_N = (col + 4 * tl.arange(0, BLOCK_N // 4)).to(tl.uint32) >> 2
    zero_MN = tl.zeros([BLOCK_M, BLOCK_N // 4], tl.uint32)
    w0, w1, w2, w3 = philox_words(
        zero_MN + quads_N[None, :],
        zero_MN + rows_M[:, None],
        zero_MN + head,
        zero_MN + seq,
        key0,
        key1,
    )
    # join adds an innermost axis, so [.., x, y] holds word 2 * x + y.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(words, [BLOCK_M, BLOCK_N]) < threshold


@triton.jit
def keep_singles(
    key0, key1, threshold, row, col, head, seq, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Kept scores of the tile from (row, col) on for any col: one draw per score."""
    rows_M = (row + tl.arange(0, BLOCK_M)).to(tl.uint32)
    cols_N = (col + tl.arange(0, BLOCK_N)).to(tl.uint32)
    zero_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.uint32)
    w0, w1, w2, w3 = philox_words(
        zero_MN + (cols_N >> 2)[None, :],
        zero_MN + rows_M[:, None],
        zero_MN + head,
        zero_MN + seq,
        key0,
        key1,
    )
    which_MN = zero_MN + (cols_N & 3)[None, :]
    low = tl.where(which_MN == 0, w0, w1)
    high = tl.where(which_MN == 2, w2, w3)
    return tl.where(which_MN < 2, low, high) < threshold


@triton.jit
def keep_tile(
    key0,
    key1,
    threshold,
    row,
    col,
    head,
    seq,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_QUAD: tl.constexpr,
):
    """Kept scores [M, N] of the tile from global indices (row, col) on, all modulo 2^32;
    IS_QUAD: col % 4 == 0."""
    head = head.to(tl.uint32)
    seq = seq.to(tl.uint32)
    if IS_QUAD:
        return keep_quads(key0, key1, threshold, row, col, head, seq, BLOCK_M, BLOCK_N)
    return keep_singles(key0, key1, threshold, row, col, head, seq, BLOCK_M, BLOCK_N)
