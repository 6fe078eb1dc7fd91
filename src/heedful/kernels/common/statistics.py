"""Recomputes the maximum and the sum of rows whose log-sum-exp is far from 0.

A log-sum-exp is stored as one float32. Far from 0, the logarithm of the sum is lost in its
rounding. The backward and the probabilities kernel then subtract the row's maximum from scores,
which is exact, in place of the log-sum-exp, and divide the results by the row's sum. `is_far` says
which rows need this.

Shapes: M query rows, N key rows, D qk dim, E v dim.
"""

import triton
import triton.language as tl

from heedful.kernels.args.kinds import RowArray, Rows
from heedful.kernels.common.keys import load_keys
from heedful.kernels.common.rows import load_head_rows, load_rows, row_base, wide
from heedful.kernels.common.scores import (
    first_statistics,
    modified_scores,
    product_of_rows,
    softmax_step,
)
from heedful.kernels.common.tile_range import any_tile, key_tile, key_tiles

# From these magnitudes on, a log-sum-exp is far from 0. One of 2^10 is known to 2^-14, which 16-bit
# rows do not notice; one of 2^6 is known to 2^-19.
FAR = tl.constexpr(1024.0)
FAR_OF_FLOAT32 = tl.constexpr(64.0)


@triton.jit
def is_far(lse_M, IS_EXACT: tl.constexpr):
    """Which rows have a log-sum-exp that has lost digits which count, in float32 (IS_EXACT) or in
    16 bits. Rows that saw nothing are not far."""
    LEAST: tl.constexpr = FAR_OF_FLOAT32 if IS_EXACT else FAR
    size_M = tl.abs(lse_M)
    return (size_M >= LEAST) & (size_M < float("inf"))


@triton.jit
def any_far(lse_M, IS_EXACT: tl.constexpr):
    """1 if any row is far from 0, else 0."""
    return tl.max(is_far(lse_M, IS_EXACT).to(tl.int32), 0)


@triton.jit
def statistics_of_keys(q_MD, keys, k: Rows, row0, place, head, params, IS_ADJUSTED: tl.constexpr):
    """`row_statistics` of a tile of queries in registers. keys: `Keys` in any storage or, without a
    cache, the address of dense rows."""
    D: tl.constexpr = params.tile.HEAD_DIM
    N: tl.constexpr = params.tile.BLOCK_N
    BLOCK_D: tl.constexpr = params.tile.BLOCK_D
    IS_EXACT: tl.constexpr = q_MD.dtype == tl.float32
    rows_M = row0 + tl.arange(0, params.tile.BLOCK_M)
    m_M, l_M = first_statistics(0, place, params, IS_ADJUSTED)
    tiles = key_tiles(row0, place, params.mask, params.tile)
    # ptxas: few calls run this loop, so it has one stage and takes no shared memory from the loops
    # after it.
    first = tiles.first_end - tiles.first_begin
    for visit in tl.range(0, first + (tiles.end - tiles.begin), num_stages=1):
        col0, mods = key_tile(any_tile(visit, tiles), row0, place, head, params, True)
        if params.cache is None:
            k_ND = load_rows(keys, k.stride_n, col0, place.seq.len_k, D, N, BLOCK_D, True)
        else:
            k_ND = load_keys(keys, k, params.descales.k, params, col0, D, BLOCK_D, True)
        s_MN = product_of_rows(q_MD, k_ND.to(q_MD.dtype), params.tile.PRECISION, IS_EXACT)
        s_MN = modified_scores(s_MN, rows_M, row0, col0, place, mods, params, IS_ADJUSTED, True)
        _p, m_M, l_M, _alpha = softmax_step(s_MN, m_M, l_M, head.scale, IS_ADJUSTED, True)
    return m_M, l_M


@triton.jit
def row_statistics(q: Rows, k: Rows, row0, place, head, params, IS_ADJUSTED: tl.constexpr = True):
    """(maximum, sum of exp(score - maximum)) of a tile of query rows over all keys that they see,
    and over the sink. Rows that see nothing have -inf and 0. IS_ADJUSTED: scores take their
    modifiers and maxima are in natural units; else maxima are those of raw scores times
    scale * LOG2E."""
    keys = row_base(k, place.b, place.g, place.seq.token_k)
    D: tl.constexpr = params.tile.HEAD_DIM
    M: tl.constexpr = params.tile.BLOCK_M
    b, h, token, count = place.b, place.h, place.seq.token_q, place.seq.len_q
    q_MD = load_head_rows(q, b, h, token, row0, count, D, M, params.tile.BLOCK_D)
    return statistics_of_keys(q_MD, keys, k, row0, place, head, params, IS_ADJUSTED)


@triton.jit
def with_statistics(lse_M, m_M, l_M, IS_EXACT: tl.constexpr):
    """(reference, factor) of rows, of which probabilities are exp(score - reference) * factor: the
    maximum and 1 / sum of rows far from 0, the LSE and 1 of all others."""
    far_M = is_far(lse_M, IS_EXACT)
    return tl.where(far_M, m_M, lse_M), tl.where(far_M, 1.0 / l_M, 1.0)


@triton.jit
def load_references(reference, factor, lse_M, places_M, exists_M):
    """(reference, factor) of rows, as `with_statistics` made and a kernel stored them. Without such
    arrays they are the LSE and 1. Rows that do not exist get a reference of inf: probability 0."""
    if reference is None:
        return lse_M, tl.full(lse_M.shape, 1.0, tl.float32)
    else:
        reference_M = tl.load(reference + places_M, mask=exists_M, other=float("inf"))
        return reference_M, tl.load(factor + places_M, mask=exists_M, other=1.0)


@triton.jit
def row_deltas(o_ME, do_ME, lse_M, dlse: RowArray, place, rows_M, exists_M):
    """delta = rowsum(out * dout) - dlse, (M,), of query rows. If the LSE is itself an output, its
    gradient enters the softmax's gradient just as the row sum does. Rows that saw nothing have 0,
    whatever out and dout hold. dlse may be absent."""
    delta_M = tl.sum(o_ME.to(tl.float32) * do_ME.to(tl.float32), 1)
    if dlse.ptr is not None:
        base = dlse.ptr + (
            place.b * dlse.stride_b + place.h * dlse.stride_h + place.seq.token_q * dlse.stride_m
        )
        delta_M -= tl.load(base + wide(rows_M) * dlse.stride_m, mask=exists_M, other=0.0)
    return tl.where(lse_M == float("-inf"), 0.0, delta_M)
