"""The maximum and the sum of rows, made anew: where a log-sum-exp, one float32, is so far from 0
that the logarithm of the sum is lost in its rounding. A row's maximum is then subtracted from
scores, which is exact, in place of the log-sum-exp, and what comes of it is divided by the sum.

Shapes: M query rows, N key rows, D qk dim, E v dim.
"""

import triton
import triton.language as tl

from heedful.kernels.args.kinds import RowArray, Rows
from heedful.kernels.args.shared import Descales, KVLayout, Mask, ScoreMods, Tile
from heedful.kernels.common.constants import LOG2E
from heedful.kernels.common.keys import load_keys
from heedful.kernels.common.rows import load_rows, row_base, wide
from heedful.kernels.common.scores import (
    adjust_scores,
    bias_tile,
    exponential,
    finite_or_zero,
    product_of_rows,
    sink_state,
    visible,
)
from heedful.kernels.common.tile_range import key_tiles

# From here on a log-sum-exp is far from 0: one of 2^10 is known to 2^-14, which rows of 16 bits do
# not notice, one of 2^6 to 2^-19.
FAR = tl.constexpr(1024.0)
FAR_OF_FLOAT32 = tl.constexpr(64.0)


@triton.jit
def is_far(lse_M, IS_EXACT: tl.constexpr):
    """Which rows' log-sum-exp has lost digits that count, of float32 (IS_EXACT) or 16 bits. Those
    that saw nothing have none."""
    LEAST: tl.constexpr = FAR_OF_FLOAT32 if IS_EXACT else FAR
    size_M = tl.abs(lse_M)
    return (size_M >= LEAST) & (size_M < float("inf"))


@triton.jit
def any_far(lse_M, IS_EXACT: tl.constexpr):
    """1 if any row is far from 0, else 0."""
    return tl.max(is_far(lse_M, IS_EXACT).to(tl.int32), 0)


@triton.jit
def with_scores(m_M, l_M, s_MN, unit, IS_ADJUSTED: tl.constexpr):
    """(maximum, sum) of rows so far and of a tile of scores: in natural units or, raw, of which
    `unit` makes those in base 2."""
    top_M = tl.max(s_MN, 1)
    if not IS_ADJUSTED:
        top_M = top_M * unit
    new_M = tl.maximum(m_M, top_M)
    base_M = finite_or_zero(new_M)
    if IS_ADJUSTED:
        p_MN = exponential(s_MN - base_M[:, None], True)
        old_M = exponential(m_M - base_M, True)
    else:
        p_MN = tl.exp2(tl.fma(s_MN, unit, -base_M[:, None]))
        old_M = tl.exp2(m_M - base_M)
    return new_M, l_M * old_M + tl.sum(p_MN, 1)


@triton.jit
def sink_statistics(place, mods: ScoreMods, tile: Tile, IS_ADJUSTED: tl.constexpr):
    """(maximum, sum) of rows that have seen nothing but the sink, if there is one."""
    m_M = tl.full([tile.BLOCK_M], float("-inf"), tl.float32)
    l_M = tl.zeros([tile.BLOCK_M], tl.float32)
    if mods.sink is not None:
        m_M, l_M = sink_state(tl.load(mods.sink + place.h), m_M, IS_ADJUSTED)
    return m_M, l_M


@triton.jit
def statistics_of_keys(
    q_MD,
    keys,
    k: Rows,
    cache: KVLayout,
    descales: Descales,
    row0,
    place,
    head,
    mask: Mask,
    mods: ScoreMods,
    tile: Tile,
    IS_ADJUSTED: tl.constexpr,
):
    """`row_statistics` of queries that are loaded, over keys from whatever storage: `Keys` or,
    without descales, the address of rows."""
    D: tl.constexpr = tile.HEAD_DIM
    N: tl.constexpr = tile.BLOCK_N
    IS_EXACT: tl.constexpr = q_MD.dtype == tl.float32
    rows_M = row0 + tl.arange(0, tile.BLOCK_M)
    m_M, l_M = sink_statistics(place, mods, tile, IS_ADJUSTED)
    tiles = key_tiles(row0, place, mask, tile)
    # ptxas: few calls come by, so it takes no shared memory from loops behind.
    for visit in tl.range(0, tiles.first_end + (tiles.end - tiles.begin), num_stages=1):
        block = visit
        if visit >= tiles.first_end:
            block = visit - tiles.first_end + tiles.begin
        col0 = block * N
        if descales is None:
            k_ND = load_rows(keys, k.stride_n, col0, place.seq.len_k, D, N, tile.BLOCK_D, True)
        else:
            k_ND = load_keys(
                keys, k, descales.k, cache, descales, tile, col0, D, tile.BLOCK_D, True
            )
        s_MN = product_of_rows(q_MD, k_ND.to(q_MD.dtype), tile.PRECISION, IS_EXACT)
        cols_N = col0 + tl.arange(0, N)
        distance_MN = cols_N[None, :] - (rows_M + place.seq.off)[:, None]
        if IS_ADJUSTED:
            bias_MN = bias_tile(row0, col0, place, head, mods, tile, False)
            s_MN, _slope = adjust_scores(s_MN, distance_MN, bias_MN, head, mods)
        ok_MN = visible(rows_M[:, None], cols_N[None, :], distance_MN, place, head, mask)
        s_MN = tl.where(ok_MN, s_MN, float("-inf"))
        m_M, l_M = with_scores(m_M, l_M, s_MN, head.scale * LOG2E, IS_ADJUSTED)
    return m_M, l_M


@triton.jit
def row_statistics(
    q: Rows,
    k: Rows,
    row0,
    place,
    head,
    mask: Mask,
    mods: ScoreMods,
    tile: Tile,
    IS_ADJUSTED: tl.constexpr = True,
):
    """(maximum, sum of exp(score - maximum)) of a tile of query rows over all keys that they see,
    and the sink. Rows that see nothing have -inf and 0. IS_ADJUSTED: the maximum is in natural
    units, whatever the problem; else, of plain scores, raw ones times scale * LOG2E."""
    keys = row_base(k, place.b, place.g, place.seq.token_k)
    queries = row_base(q, place.b, place.h, place.seq.token_q)
    q_MD = load_rows(
        queries,
        q.stride_n,
        row0,
        place.seq.len_q,
        tile.HEAD_DIM,
        tile.BLOCK_M,
        tile.BLOCK_D,
        True,
    )
    return statistics_of_keys(
        q_MD, keys, k, None, None, row0, place, head, mask, mods, tile, IS_ADJUSTED
    )


@triton.jit
def with_statistics(lse_M, m_M, l_M, IS_EXACT: tl.constexpr):
    """(reference, factor) of rows: of those far from 0 a maximum and 1 over a sum, of others the
    LSE, as it is subtracted, and 1."""
    far_M = is_far(lse_M, IS_EXACT)
    return tl.where(far_M, m_M, lse_M), tl.where(far_M, 1.0 / l_M, 1.0)


@triton.jit
def load_references(reference, factor, lse_M, places_M, exists_M):
    """(reference, factor) of rows as they were stored, or without such arrays the LSE and 1. Rows
    that do not exist subtract inf."""
    if reference is None:
        return lse_M, tl.full(lse_M.shape, 1.0, tl.float32)
    else:
        reference_M = tl.load(reference + places_M, mask=exists_M, other=float("inf"))
        return reference_M, tl.load(factor + places_M, mask=exists_M, other=1.0)


@triton.jit
def row_deltas(o_ME, do_ME, lse_M, dlse: RowArray, place, rows_M, exists_M):
    """delta = rowsum(out * dout) - dlse (M,) of query rows: an LSE that is an output itself enters
    the softmax's gradient exactly as the row sum does. Rows that saw nothing have 0, whatever they
    hold. dlse may be absent."""
    delta_M = tl.sum(o_ME.to(tl.float32) * do_ME.to(tl.float32), 1)
    if dlse.ptr is not None:
        base = dlse.ptr + (
            place.b * dlse.stride_b + place.h * dlse.stride_h + place.seq.token_q * dlse.stride_m
        )
        delta_M -= tl.load(base + wide(rows_M) * dlse.stride_m, mask=exists_M, other=0.0)
    return tl.where(lse_M == float("-inf"), 0.0, delta_M)
