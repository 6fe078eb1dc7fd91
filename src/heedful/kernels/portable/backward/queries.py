"""Gradient of queries (FlashAttention-2, Dao 2023, algorithm 2, its dQ alone).

The kernel is `query_gradients`, launched by `launch/bind/portable.py` before the other gradients.
Each program computes one tile of queries of one head, over its keys. There are no atomics, so the
sum has one order. `key_gradients` computes the scores again, which costs two products of seven. The
other gradients need delta too; it is stored here, where dout is in registers anyway.

Shapes: B batch, H query heads, G KV heads, M query rows, N key rows, D qk dim, E v dim.
"""

import triton
import triton.language as tl

from heedful.kernels.args.portable import QueryGradientsIO
from heedful.kernels.args.shared import PortableParams
from heedful.kernels.common.rows import load_head_rows, load_rows, row_base, store_rows
from heedful.kernels.common.scores import (
    head_mods,
    lse_to_subtract,
    plus_product,
    probabilities,
    product_of_rows,
)
from heedful.kernels.common.sequences import place_of_queries
from heedful.kernels.common.statistics import (
    any_far,
    is_far,
    row_deltas,
    row_statistics,
    with_statistics,
)
from heedful.kernels.common.tile_range import (
    any_tile,
    key_tile,
    key_tiles,
    masked_count,
    visited_tile,
)
from heedful.kernels.portable.backward.seen import store_seen_keys
from heedful.kernels.portable.shared.dropout import dropout_words, keep_tile
from heedful.kernels.portable.shared.order import head_of


@triton.jit
def query_gradients(io: QueryGradientsIO, params: PortableParams):
    """Stores dq (B, M, H, D), whose rows past the used length become zero. Also stores delta and
    `rows` (B, H, M) of the rows within it, in the layout of lse. mods: with the sink,
    which is one of a row's scores."""
    HAS_BIAS: tl.constexpr = params.mods.bias.ptr is not None
    DTYPE: tl.constexpr = io.q.ptr.dtype.element_ty
    IS_EXACT: tl.constexpr = tl.float32 == DTYPE
    IS_ADJUSTED: tl.constexpr = params.mods.IS_ADJUSTED
    PRECISION: tl.constexpr = params.tile.PRECISION
    D: tl.constexpr = params.tile.HEAD_DIM
    E: tl.constexpr = params.tile.HEAD_DIM_V
    M: tl.constexpr = params.tile.BLOCK_M
    N: tl.constexpr = params.tile.BLOCK_N
    BLOCK_D: tl.constexpr = params.tile.BLOCK_D
    BLOCK_E: tl.constexpr = params.tile.BLOCK_E
    # Whether any row is far from 0 is asked before the first step, which then waits for the answer.
    # Beside a bias, steps wait for loads anyway and leave registers: so it is asked after the last.
    IS_LATE: tl.constexpr = HAS_BIAS and D <= 64
    heads = params.shape.batch * params.shape.heads_q
    block, bh = head_of(tl.program_id(0), params.order, heads, params.mask.HAS_RIGHT)
    place = place_of_queries(bh, params.seqs, params.shape, params.mask, HAS_BIAS)
    row0 = block * M
    if row0 >= place.seq.stored_q:
        return
    tiles = key_tiles(row0, place, params.mask, params.tile)
    if params.mask.RANGES and not params.mask.blocks.SIDE:
        store_seen_keys(io.seen, tiles, block, place, params.tile)
    b, h, token_q = place.b, place.h, place.seq.token_q
    len_q, len_k = place.seq.len_q, place.seq.len_k
    q = row_base(io.q, b, h, token_q)
    dout = row_base(io.dout, b, h, token_q)
    k = row_base(io.k, b, place.g, place.seq.token_k)
    v = row_base(io.v, b, place.g, place.seq.token_k)
    q_MD = load_rows(q, io.q.stride_n, row0, len_q, D, M, BLOCK_D, True)
    do_ME = load_rows(dout, io.dout.stride_n, row0, len_q, E, M, BLOCK_E, True)
    rows_M = row0 + tl.arange(0, M)
    exists_M = rows_M < len_q
    places_M = b * io.lse.stride_b + h * io.lse.stride_h + token_q + rows_M
    o_ME = load_head_rows(io.out, b, h, token_q, row0, len_q, E, M, BLOCK_E)
    lse_M = tl.load(io.lse.ptr + places_M, mask=exists_M, other=float("-inf"))
    delta_M = row_deltas(o_ME, do_ME, lse_M, io.dlse, place, rows_M, exists_M)
    tl.store(io.delta + places_M, delta_M, mask=exists_M)
    head = head_mods(params.mods.scale, b, h, params)
    words = dropout_words(params.dropout)
    reference_M = lse_to_subtract(io.lse, places_M, exists_M, IS_ADJUSTED)
    near_M = tl.where(is_far(reference_M, IS_EXACT), float("nan"), reference_M)
    tl.store(io.rows.near + places_M, near_M, mask=exists_M)
    factor_M = tl.full([M], 1.0, tl.float32)
    if not IS_LATE:  # noqa: SIM102  (known when compiling, and `and` is not)
        if any_far(reference_M, IS_EXACT) != 0:
            m_M, l_M = row_statistics(io.q, io.k, row0, place, head, params, IS_ADJUSTED)
            reference_M, factor_M = with_statistics(reference_M, m_M, l_M, IS_EXACT)
    tl.store(io.rows.reference + places_M, reference_M, mask=exists_M)
    tl.store(io.rows.factor + places_M, factor_M, mask=exists_M)
    if IS_LATE:
        reference_M = near_M
    delta_M *= factor_M

    dq_MD = tl.zeros([M, BLOCK_D], tl.float32)
    # Full tiles, masked ones and, if it is late, all again in programs with far rows.
    for loop in tl.static_range(3 if IS_LATE else 2):
        count = masked_count(tiles) if loop == 1 else tiles.full_end - tiles.full_begin
        if loop == 2:
            count = 0
            if tl.max((reference_M != reference_M).to(tl.int32), 0) != 0:
                # ptxas: numbers of rows are loaded again, so that loops do not keep them.
                reference_M = lse_to_subtract(io.lse, places_M, exists_M, IS_ADJUSTED)
                m_M, l_M = row_statistics(io.q, io.k, row0, place, head, params, IS_ADJUSTED)
                reference_M, factor_M = with_statistics(reference_M, m_M, l_M, IS_EXACT)
                tl.store(io.rows.reference + places_M, reference_M, mask=exists_M)
                tl.store(io.rows.factor + places_M, factor_M, mask=exists_M)
                delta_M *= factor_M
                dq_MD = tl.zeros([M, BLOCK_D], tl.float32)
                count = tiles.first_end - tiles.first_begin + (tiles.end - tiles.begin)
        # ptxas: a pipeline in the third loop would cost the others registers.
        for visit in tl.range(0, count, num_stages=1 if loop == 2 else None):
            if loop == 2:
                block = any_tile(visit, tiles)
            else:
                block = visited_tile(visit, tiles, params.mask, loop == 1)
            col0, mods = key_tile(block, row0, place, head, params, loop > 0)
            k_ND = load_rows(k, io.k.stride_n, col0, len_k, D, N, BLOCK_D, loop > 0)
            # S = Q K^T
            p_MN, slope_of_cap = probabilities(
                q_MD, k_ND, reference_M, row0, col0, place, mods, params, loop > 0, False
            )
            v_NE = load_rows(v, io.v.stride_n, col0, len_k, E, N, BLOCK_E, loop > 0)
            # dP = dO V^T
            dp_MN = product_of_rows(do_ME, v_NE, PRECISION, IS_EXACT)
            if params.dropout.IS_ON:
                keep_MN = keep_tile(words, b, h, row0, col0, params.dropout, M, N)
                dp_MN = tl.where(keep_MN, dp_MN * params.dropout.inverse_keep, 0.0)
            # The factor comes before the rounding to DTYPE: exponentials of rounded maxima are far
            # from 1.
            if loop == 2 or not IS_LATE:
                dp_MN *= factor_M[:, None]
            ds_MN = p_MN * (dp_MN - delta_M[:, None]) * slope_of_cap
            # dQ += dS K
            dq_MD = plus_product(dq_MD, ds_MN.to(DTYPE), k_ND, PRECISION, IS_EXACT)

    dq_MD = tl.where(exists_M[:, None], dq_MD * params.mods.scale, 0.0)
    dq = row_base(io.dq, b, h, token_q)
    store_rows(dq, dq_MD, io.dq.stride_n, row0, place.seq.stored_q, D)
