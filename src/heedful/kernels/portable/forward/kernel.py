"""Attention forward with an online softmax (Milakov & Gimelshein 2018; FlashAttention-2).

The kernel is `attention_forward`, launched by `launch/bind/portable.py`. Each program computes one
tile of queries of one head, over all its keys or one split of them; the grid is (row tiles of all
heads, splits). Key tiles that need no mask come first, in a loop without tests of single elements.
An online softmax may visit tiles in any order.

Shapes: B batch, H query heads, G KV heads, M query rows, N key rows, D qk dim, E v dim.
"""

import triton
import triton.language as tl

from heedful.kernels.args.shared import (
    Descales,
    Dropout,
    ForwardIO,
    KVLayout,
    Mask,
    ScoreMods,
    Sequences,
    Shape,
    Tile,
    TileOrder,
)
from heedful.kernels.common.constants import LN2, LOG2E
from heedful.kernels.common.gaps import clear_gaps
from heedful.kernels.common.keys import Keys, keys_at_place, load_keys
from heedful.kernels.common.log_sum import log_sum_exp
from heedful.kernels.common.rows import load_rows, row_base, store_rows
from heedful.kernels.common.scores import (
    adjust_scores,
    bias_tile,
    descaled,
    exponential,
    finite_or_zero,
    head_mods,
    plus_product,
    product_of_rows,
    sink_state,
    visible,
)
from heedful.kernels.common.sequences import place_of_queries
from heedful.kernels.common.tile_range import key_tiles, masked_count, visited_tile
from heedful.kernels.portable.shared.dropout import dropout_words, keep_tile
from heedful.kernels.portable.shared.order import head_of


@triton.jit
def softmax_step(
    s_MN, m_M, l_M, scale, mods: ScoreMods, IS_EXACT: tl.constexpr, IS_SAFE: tl.constexpr
):
    """(probabilities, new maximum, new sum, factor for earlier sums).

    mods.IS_ADJUSTED: scores and maximum are in natural units; else scores are raw, the maximum is
    in base 2, and the scale is folded into the exponent. IS_SAFE: a row may have seen no key yet.
    """
    top_M = tl.max(s_MN, 1)
    if not mods.IS_ADJUSTED:
        top_M = top_M * (scale * LOG2E)
    new_M = tl.maximum(m_M, top_M)
    base_M = new_M
    if IS_SAFE:
        base_M = finite_or_zero(new_M)
    if mods.IS_ADJUSTED:
        p_MN = exponential(s_MN - base_M[:, None], IS_EXACT)
        alpha_M = exponential(m_M - base_M, IS_EXACT)
    else:
        p_MN = tl.exp2(tl.fma(s_MN, scale * LOG2E, -base_M[:, None]))
        alpha_M = tl.exp2(m_M - base_M)
    return p_MN, new_M, l_M * alpha_M + tl.sum(p_MN, 1), alpha_M


@triton.jit
def raw_scores(
    q_MD,
    q_MR,
    keys,
    col0,
    io: ForwardIO,
    cache: KVLayout,
    descales: Descales,
    tile: Tile,
    IS_MASKED: tl.constexpr,
    IS_EXACT: tl.constexpr,
):
    """q k^T of a tile of keys. q_MR: the columns of q past BLOCK_D, if BLOCK_R > 0."""
    MAIN_DIM: tl.constexpr = tile.HEAD_DIM if tile.BLOCK_R == 0 else tile.BLOCK_D
    k_ND = load_keys(
        keys, io.k, descales.k, cache, descales, tile, col0, MAIN_DIM, tile.BLOCK_D, IS_MASKED
    ).to(q_MD.dtype)
    s_MN = product_of_rows(q_MD, k_ND, tile.PRECISION, IS_EXACT)
    if tile.BLOCK_R > 0:
        REST: tl.constexpr = tile.HEAD_DIM - MAIN_DIM
        rest = Keys(keys.base + tile.BLOCK_D, keys.pages, keys.groups, keys.seq)
        k_NR = load_keys(
            rest, io.k, descales.k, cache, descales, tile, col0, REST, tile.BLOCK_R, IS_MASKED
        ).to(q_MD.dtype)
        s_MN = plus_product(s_MN, q_MR, tl.trans(k_NR), tile.PRECISION, IS_EXACT)
    return s_MN


@triton.jit
def modified_scores(
    s_MN,
    rows_M,
    row0,
    col0,
    place,
    head,
    mask: Mask,
    mods: ScoreMods,
    tile: Tile,
    IS_MASKED: tl.constexpr,
):
    """Raw products after score modifiers; scores that are not visible become -inf."""
    cols_N = col0 + tl.arange(0, tile.BLOCK_N)
    distance_MN = cols_N[None, :] - (rows_M + place.seq.off)[:, None]
    if mods.IS_ADJUSTED:
        bias_MN = bias_tile(row0, col0, place, head, mods, tile, False)
        s_MN, _gate = adjust_scores(s_MN, distance_MN, bias_MN, head, mods)
    if IS_MASKED:
        ok_MN = visible(rows_M[:, None], cols_N[None, :], distance_MN, place, head, mask)
        s_MN = tl.where(ok_MN, s_MN, float("-inf"))
    return s_MN


@triton.jit
def first_state(split, place, mods: ScoreMods, tile: Tile):
    """(maximum, sum, output) of rows before any key. In the first split they include the sink,
    which is one more key whose value is zero."""
    m_M = tl.full([tile.BLOCK_M], float("-inf"), tl.float32)
    l_M = tl.zeros([tile.BLOCK_M], tl.float32)
    if mods.sink is not None:
        logit = tl.where(split == 0, tl.load(mods.sink + place.h), float("-inf"))
        m_M, l_M = sink_state(logit, m_M, mods.IS_ADJUSTED)
    return m_M, l_M, tl.zeros([tile.BLOCK_M, tile.BLOCK_E], tl.float32)


@triton.jit
def store_results(
    m_M,
    l_M,
    acc_ME,
    factor,
    split,
    rows_M,
    row0,
    place,
    io: ForwardIO,
    tile: Tile,
    IS_ADJUSTED: tl.constexpr,
):
    """Stores out and lse. Rows of the tile that are stored but not in use are written too, as rows
    that see nothing. factor: of outputs."""
    acc_ME *= (factor / tl.where(l_M == 0.0, 1.0, l_M))[:, None]
    if io.rest is None:
        if not IS_ADJUSTED:
            m_M *= LN2
        lse_M = m_M + tl.log2(l_M) * LN2
    else:
        lse_M, rest_M = log_sum_exp(m_M, l_M, not IS_ADJUSTED)
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
    store_rows(base, acc_ME, io.out.stride_n, row0, place.seq.stored_q, tile.HEAD_DIM_V)


@triton.jit
def attention_forward(
    io: ForwardIO,
    sequences: Sequences,
    shape: Shape,
    mask: Mask,
    mods: ScoreMods,
    dropout: Dropout,
    cache: KVLayout,
    descales: Descales,
    order: TileOrder,
    tile: Tile,
):
    """Stores out (.., M, H, E) and lse (B, H, M); with splits, float32 partial results with a
    leading split."""
    MAIN_DIM: tl.constexpr = tile.HEAD_DIM if tile.BLOCK_R == 0 else tile.BLOCK_D
    E: tl.constexpr = tile.HEAD_DIM_V
    HAS_BIAS: tl.constexpr = mods.bias.ptr is not None
    IS_EXACT: tl.constexpr = io.q.ptr.dtype.element_ty == tl.float32
    IS_FP8: tl.constexpr = io.q.ptr.dtype.element_ty.is_fp8()
    DTYPE: tl.constexpr = tl.bfloat16 if IS_FP8 else io.q.ptr.dtype.element_ty
    split = tl.program_id(1)
    heads = shape.batch * shape.heads_q
    block, bh = head_of(tl.program_id(0), order, heads, mask.HAS_RIGHT)
    place = place_of_queries(bh, sequences, shape, mask, HAS_BIAS)
    row0 = block * tile.BLOCK_M
    if sequences.cu_q is not None:
        share, shares = tl.program_id(0), tl.num_programs(0)
        cu_q, total, batch, heads_q = sequences.cu_q, sequences.seqlen_q, shape.batch, shape.heads_q
        clear_gaps(
            io.out, io.lse, split, cu_q, total, batch, heads_q, share, shares, E, tile.BLOCK_E
        )
    if row0 >= place.seq.stored_q:
        return
    tiles = key_tiles(row0, place, mask, tile)
    full = tiles.full_end - tiles.full_begin
    visits = full + masked_count(tiles)
    # A sequence is split by its own length alone, so that its result does not depend on the batch.
    per_split = tl.cdiv(visits, order.splits)
    visit_begin = tl.minimum(split * per_split, visits)
    visit_end = tl.minimum(visit_begin + per_split, visits)

    q, stride_n, len_q = (
        row_base(io.q, place.b, place.h, place.seq.token_q),
        io.q.stride_n,
        place.seq.len_q,
    )
    q_MD = load_rows(q, stride_n, row0, len_q, MAIN_DIM, tile.BLOCK_M, tile.BLOCK_D, True).to(DTYPE)
    q_MR = q_MD
    if tile.BLOCK_R > 0:
        REST: tl.constexpr = tile.HEAD_DIM - MAIN_DIM
        q += tile.BLOCK_D
        q_MR = load_rows(q, stride_n, row0, len_q, REST, tile.BLOCK_M, tile.BLOCK_R, True).to(DTYPE)
    keys = keys_at_place(io.k, descales.k, cache, place, descales.KV_GROUP)
    values = keys_at_place(io.v, descales.v, cache, place, descales.KV_GROUP)
    scale = descaled(mods.scale, descales.q, place)
    factor = dropout.inverse_keep
    if descales.KV_GROUP == 0:
        scale = descaled(scale, descales.k, place)
        factor = descaled(factor, descales.v, place)
    head = head_mods(scale, place.b, place.h, mods, mask)
    words = dropout_words(dropout)
    m_M, l_M, acc_ME = first_state(split, place, mods, tile)
    rows_M = row0 + tl.arange(0, tile.BLOCK_M)
    for masked in tl.static_range(2):
        visit_from = visit_begin
        visit_to = tl.minimum(visit_end, full)
        if masked == 1:
            visit_from = tl.maximum(visit_begin, full)
            visit_to = visit_end
        for visit in range(visit_from, visit_to):
            index = visit - full if masked == 1 else visit
            col0 = visited_tile(index, tiles, mask.HAS_LEFT, masked == 1) * tile.BLOCK_N
            # S = Q K^T
            s_MN = raw_scores(
                q_MD, q_MR, keys, col0, io, cache, descales, tile, masked == 1, IS_EXACT
            )
            s_MN = modified_scores(
                s_MN, rows_M, row0, col0, place, head, mask, mods, tile, masked == 1
            )
            p_MN, m_M, l_M, alpha_M = softmax_step(
                s_MN, m_M, l_M, scale, mods, IS_EXACT, masked == 1 or HAS_BIAS
            )
            if dropout.IS_ON:
                keep_MN = keep_tile(
                    words, place.b, place.h, row0, col0, dropout, tile.BLOCK_M, tile.BLOCK_N
                )
                p_MN = tl.where(keep_MN, p_MN, 0.0)
            v_NE = load_keys(
                values, io.v, descales.v, cache, descales, tile, col0, E, tile.BLOCK_E, masked == 1
            ).to(DTYPE)
            # O += P V
            acc_ME = plus_product(
                acc_ME * alpha_M[:, None], p_MN.to(DTYPE), v_NE, tile.PRECISION, IS_EXACT
            )
    store_results(m_M, l_M, acc_ME, factor, split, rows_M, row0, place, io, tile, mods.IS_ADJUSTED)
