"""Attention forward with an online softmax (Milakov & Gimelshein 2018; FlashAttention-2).

The kernel is `attention_forward`, launched by `launch/bind/portable.py`. Each program computes one
tile of queries of one head, over all its keys or one split of them; the grid is (row tiles of all
heads, splits). Key tiles that need no mask come first, in a loop without tests of single elements.
An online softmax may visit tiles in any order.

Shapes: B batch, H query heads, G KV heads, M query rows, N key rows, D qk dim, E v dim.
"""

import triton
import triton.language as tl

from heedful.kernels.args.kinds import Rows
from heedful.kernels.args.shared import ForwardIO, PortableParams
from heedful.kernels.common.constants import LN2
from heedful.kernels.common.gaps import clear_gaps
from heedful.kernels.common.keys import Keys, keys_at_place, load_keys
from heedful.kernels.common.log_sum import log_sum_exp
from heedful.kernels.common.rows import load_rows, row_base, store_rows
from heedful.kernels.common.scores import (
    first_statistics,
    head_mods,
    modified_scores,
    plus_product,
    product_of_rows,
    softmax_step,
    with_descales,
)
from heedful.kernels.common.sequences import place_of_queries
from heedful.kernels.common.tile_range import key_tile, key_tiles, masked_count, visited_tile
from heedful.kernels.portable.shared.dropout import dropout_words, keep_tile
from heedful.kernels.portable.shared.order import head_of


@triton.constexpr_function
def main_columns(dim, block_d, block_r):
    """Columns of q and k in the main product; those past BLOCK_D are a product of their own."""
    return block_d if block_r else dim


@triton.jit
def raw_scores(
    q_MD,
    q_MR,
    keys,
    col0,
    k: Rows,
    params,
    IS_MASKED: tl.constexpr,
    IS_EXACT: tl.constexpr,
):
    """q k^T of a tile of keys. q_MR: the columns of q past BLOCK_D, if BLOCK_R > 0."""
    D: tl.constexpr = main_columns(params.tile.HEAD_DIM, params.tile.BLOCK_D, params.tile.BLOCK_R)
    BLOCK_R: tl.constexpr = params.tile.BLOCK_R
    PRECISION: tl.constexpr = params.tile.PRECISION
    k_ND = load_keys(keys, k, params.descales.k, params, col0, D, params.tile.BLOCK_D, IS_MASKED)
    s_MN = product_of_rows(q_MD, k_ND.to(q_MD.dtype), PRECISION, IS_EXACT)
    if BLOCK_R > 0:
        rest = Keys(keys.base + D, keys.pages, keys.groups, keys.seq)
        DIM: tl.constexpr = params.tile.HEAD_DIM - D
        k_NR = load_keys(rest, k, params.descales.k, params, col0, DIM, BLOCK_R, IS_MASKED).to(
            q_MD.dtype
        )
        s_MN = plus_product(s_MN, q_MR, tl.trans(k_NR), PRECISION, IS_EXACT)
    return s_MN


@triton.jit
def store_results(m_M, l_M, acc_ME, factor, split, rows_M, row0, place, io: ForwardIO, params):
    """Stores out and lse. Rows of the tile that are stored but not in use are written too, as rows
    that see nothing. factor: of outputs."""
    acc_ME *= (factor / tl.where(l_M == 0.0, 1.0, l_M))[:, None]
    if io.rest is None:
        if not params.mods.IS_ADJUSTED:
            m_M *= LN2
        lse_M = m_M + tl.log2(l_M) * LN2
        rest_M = None
    else:
        lse_M, rest_M = log_sum_exp(m_M, l_M, not params.mods.IS_ADJUSTED)
    store_finished(acc_ME, lse_M, rest_M, split, rows_M, row0, place, io, params)


@triton.jit
def store_finished(acc_ME, lse_M, rest_M, split, rows_M, row0, place, io, params):
    """Stores results of rows as `store_results` says. io: has out, lse and rest."""
    used_M = rows_M < place.seq.len_q
    acc_ME = tl.where(used_M[:, None], acc_ME, 0.0)
    lse_M = tl.where(used_M, lse_M, float("-inf"))
    base = io.out.ptr + (
        split * io.out.stride_s
        + place.b * io.out.stride_b
        + place.h * io.out.stride_h
        + place.seq.token_q * io.out.stride_n
    )
    if io.lse.ptr is not None:
        starts = split * io.lse.stride_s + place.b * io.lse.stride_b + place.h * io.lse.stride_h
        lse = io.lse.ptr + (starts + place.seq.token_q)
        tl.store(lse + rows_M, lse_M, mask=rows_M < place.seq.stored_q)
        if io.rest is not None:
            rest = io.rest + (starts + place.seq.token_q)
            tl.store(rest + rows_M, tl.where(used_M, rest_M, 0.0), mask=rows_M < place.seq.stored_q)
    E: tl.constexpr = params.tile.HEAD_DIM_V
    store_rows(base, acc_ME, io.out.stride_n, row0, place.seq.stored_q, E)


@triton.jit
def attention_forward(io: ForwardIO, params: PortableParams):
    """Stores out (.., M, H, E) and lse (B, H, M); with splits, float32 partial results with a
    leading split."""
    M: tl.constexpr = params.tile.BLOCK_M
    N: tl.constexpr = params.tile.BLOCK_N
    D: tl.constexpr = main_columns(params.tile.HEAD_DIM, params.tile.BLOCK_D, params.tile.BLOCK_R)
    E: tl.constexpr = params.tile.HEAD_DIM_V
    BLOCK_E: tl.constexpr = params.tile.BLOCK_E
    HAS_BIAS: tl.constexpr = params.mods.bias.ptr is not None
    IS_ADJUSTED: tl.constexpr = params.mods.IS_ADJUSTED
    IS_EXACT: tl.constexpr = io.q.ptr.dtype.element_ty == tl.float32
    IS_FP8: tl.constexpr = io.q.ptr.dtype.element_ty.is_fp8()
    DTYPE: tl.constexpr = tl.bfloat16 if IS_FP8 else io.q.ptr.dtype.element_ty
    split = tl.program_id(1)
    heads = params.shape.batch * params.shape.heads_q
    block, bh = head_of(tl.program_id(0), params.order, heads, params.mask.HAS_RIGHT)
    place = place_of_queries(bh, params.seqs, params.shape, params.mask, HAS_BIAS)
    row0 = block * M
    if params.seqs.cu_q is not None:
        clear_gaps(
            io.out,
            io.lse,
            split,
            params.seqs.cu_q,
            params.seqs.seqlen_q,
            params.shape.batch,
            params.shape.heads_q,
            tl.program_id(0),
            tl.num_programs(0),
            E,
            BLOCK_E,
        )
    if row0 >= place.seq.stored_q:
        return
    tiles = key_tiles(row0, place, params.mask, params.tile)
    full = tiles.full_end - tiles.full_begin
    visits = full + masked_count(tiles)
    # A sequence is split by its own length alone, so that its result does not depend on the batch.
    per_split = tl.cdiv(visits, params.order.splits)
    visit_begin = tl.minimum(split * per_split, visits)
    visit_end = tl.minimum(visit_begin + per_split, visits)

    q = row_base(io.q, place.b, place.h, place.seq.token_q)
    stride_n, len_q = io.q.stride_n, place.seq.len_q
    q_MD = load_rows(q, stride_n, row0, len_q, D, M, params.tile.BLOCK_D, True).to(DTYPE)
    q_MR = q_MD
    if params.tile.BLOCK_R > 0:
        REST: tl.constexpr = params.tile.HEAD_DIM - D
        q_MR = load_rows(q + D, stride_n, row0, len_q, REST, M, params.tile.BLOCK_R, True).to(DTYPE)
    keys = keys_at_place(io.k, params.descales.k, place, params)
    values = keys_at_place(io.v, params.descales.v, place, params)
    scale, factor = with_descales(
        params.mods.scale, params.dropout.inverse_keep, place, params.descales
    )
    head = head_mods(scale, place.b, place.h, params)
    words = dropout_words(params.dropout)
    m_M, l_M = first_statistics(split, place, params, IS_ADJUSTED)
    top_M = tl.full([M], float("-inf"), tl.float32)
    acc_ME = tl.zeros([M, BLOCK_E], tl.float32)
    rows_M = row0 + tl.arange(0, M)
    for masked in tl.static_range(2):
        visit_from = visit_begin
        visit_to = tl.minimum(visit_end, full)
        if masked == 1:
            visit_from = tl.maximum(visit_begin, full)
            visit_to = visit_end
        for visit in range(visit_from, visit_to):
            index = visit - full if masked == 1 else visit
            block = visited_tile(index, tiles, params.mask, masked == 1)
            col0, mods = key_tile(block, row0, place, head, params, masked == 1)
            # S = Q K^T
            s_MN = raw_scores(q_MD, q_MR, keys, col0, io.k, params, masked == 1, IS_EXACT)
            s_MN = modified_scores(
                s_MN, rows_M, row0, col0, place, mods, params, IS_ADJUSTED, masked == 1
            )
            if io.max_scores is not None:
                top_M = tl.maximum(top_M, tl.max(s_MN, 1))
            p_MN, m_M, l_M, alpha_M = softmax_step(
                s_MN, m_M, l_M, scale, IS_ADJUSTED, IS_EXACT, masked == 1 or HAS_BIAS
            )
            if params.dropout.IS_ON:
                keep_MN = keep_tile(words, place.b, place.h, row0, col0, params.dropout, M, N)
                p_MN = tl.where(keep_MN, p_MN, 0.0)
            v_NE = load_keys(
                values, io.v, params.descales.v, params, col0, E, BLOCK_E, masked == 1
            ).to(DTYPE)
            # O += P V
            acc_ME = plus_product(
                acc_ME * alpha_M[:, None], p_MN.to(DTYPE), v_NE, params.tile.PRECISION, IS_EXACT
            )
    if io.max_scores is not None:
        if not IS_ADJUSTED:
            top_M *= scale
        rows = place.b * io.lse.stride_b + place.h * io.lse.stride_h + place.seq.token_q
        top_M = tl.where(rows_M < place.seq.len_q, top_M, float("-inf"))
        tl.store(io.max_scores + rows + rows_M, top_M, mask=rows_M < place.seq.stored_q)
    store_results(m_M, l_M, acc_ME, factor, split, rows_M, row0, place, io, params)
