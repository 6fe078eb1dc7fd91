"""Attention forward with an online softmax (Milakov & Gimelshein 2018; FlashAttention-2).

One program makes one tile of queries of one head, over all its keys or one split of them. Tiles
that need no mask come first, in a loop without any per-element test; the order of tiles does not
matter to an online softmax.

Shapes: B batch, H query heads, G kv heads, M query rows, N key rows, D qk dim, E v dim.
"""

import triton
import triton.language as tl

from heedful.kernels.args import (
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
from heedful.kernels.portable.keys import load_keys
from heedful.kernels.portable.philox import keep_tile, seed_words
from heedful.kernels.portable.scores import (
    LN2,
    LOG2E,
    adjust_scores,
    bias_tile,
    exponential,
    finite_or_zero,
    plus_product,
    product_of_rows,
    tree_visible,
    visible,
)
from heedful.kernels.portable.sequences import (
    cache_row,
    head_of,
    key_sequence,
    key_tiles,
    load_rows,
    masked_tile,
    query_sequence,
    store_rows,
)
from heedful.kernels.portable.unused import clear_gaps


@triton.jit
def softmax_step(
    s_MN,
    m_M,
    l_M,
    scale,
    IS_ADJUSTED: tl.constexpr,
    IS_EXACT: tl.constexpr,
    IS_SAFE: tl.constexpr,
):
    """(probabilities, new maximum, new sum, factor for what was summed before).

    IS_ADJUSTED: scores and maximum are in natural units; else scores are raw, the maximum is in
    log2 units, and the scale is folded into the exponent.
    IS_SAFE: a row may have seen no key yet.
    """
    top_M = tl.max(s_MN, 1)
    if not IS_ADJUSTED:
        top_M = top_M * (scale * LOG2E)
    new_M = tl.maximum(m_M, top_M)
    base_M = new_M
    if IS_SAFE:
        base_M = finite_or_zero(new_M)
    if IS_ADJUSTED:
        p_MN = exponential(s_MN - base_M[:, None], IS_EXACT)
        alpha_M = exponential(m_M - base_M, IS_EXACT)
    else:
        p_MN = tl.exp2(s_MN * (scale * LOG2E) - base_M[:, None])
        alpha_M = tl.exp2(m_M - base_M)
    return p_MN, new_M, l_M * alpha_M + tl.sum(p_MN, 1), alpha_M


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
    """out (.., M, H, E) and lse (B, H, M), or float32 partial ones with a leading split."""
    MAIN_DIM: tl.constexpr = tile.HEAD_DIM if tile.BLOCK_R == 0 else tile.BLOCK_D
    REST_DIM: tl.constexpr = tile.HEAD_DIM - MAIN_DIM
    IS_EXACT: tl.constexpr = io.q.ptr.dtype.element_ty == tl.float32
    IS_FP8: tl.constexpr = io.q.ptr.dtype.element_ty.is_fp8()
    DTYPE: tl.constexpr = tl.bfloat16 if IS_FP8 else io.q.ptr.dtype.element_ty
    q_ptr, k_ptr, v_ptr, out, lse = io.q.ptr, io.k.ptr, io.v.ptr, io.out.ptr, io.lse.ptr
    scale, bias, tree, table = mods.scale, mods.bias.ptr, mask.tree, cache.table
    k_descale, k_shift = descales.k.ptr, descales.k.shift
    v_descale, v_shift = descales.v.ptr, descales.v.shift
    split = tl.program_id(1)
    block, bh = head_of(
        tl.program_id(0), order.tiles, order.l2_heads, shape.batch * shape.heads_q, mask.HAS_RIGHT
    )
    b = bh // shape.heads_q
    h = bh % shape.heads_q
    g = h // (shape.heads_q // shape.heads_k)
    token_q, len_q, stored_q = query_sequence(
        b, sequences.cu_q, sequences.used_q, sequences.seqlen_q
    )
    token_k, len_k, _ = key_sequence(
        b, sequences.cu_k, sequences.used_k, sequences.leftpad_k, sequences.seqlen_k
    )
    row0 = block * tile.BLOCK_M
    if sequences.cu_q is not None:
        clear_gaps(
            out + split * io.out.stride_s,
            lse if lse is None else lse + split * io.lse.stride_s,
            sequences.cu_q,
            io.out.stride_n,
            io.out.stride_h,
            io.lse.stride_h,
            sequences.seqlen_q,
            shape.batch,
            shape.heads_q,
            tl.program_id(0),
            tl.num_programs(0),
            tile.HEAD_DIM_V,
            tile.BLOCK_E,
        )
    if row0 >= stored_q:
        return
    if bias is not None:
        len_q = tl.minimum(len_q, shape.longest_q)
        len_k = tl.minimum(len_k, shape.longest_k)
    last = tl.minimum(row0 + tile.BLOCK_M, len_q) - 1
    off = mask.bottom_right * (len_k - len_q) + mask.shift
    first_end, begin, full_begin, full_end, end = key_tiles(
        row0,
        last,
        off,
        len_k,
        mask.left,
        mask.right,
        mask.first,
        tile.BLOCK_N,
        mask.HAS_LEFT,
        mask.HAS_RIGHT,
    )
    if tree is not None:
        full_end = tl.minimum(full_end, tl.maximum(len_k - len_q, 0) // tile.BLOCK_N)
        full_end = tl.maximum(full_end, full_begin)
        tree += b.to(tl.int64) * mask.stride_treeb
    full = full_end - full_begin
    visits = full + first_end + (full_begin - begin) + (end - full_end)
    # A sequence is split by its own length alone, so that no neighbour changes its result.
    per_split = tl.cdiv(visits, order.splits)
    visit_begin = tl.minimum(split * per_split, visits)
    visit_end = tl.minimum(visit_begin + per_split, visits)

    b = b.to(tl.int64)
    h = h.to(tl.int64)
    g = g.to(tl.int64)
    q_ptr += b * io.q.stride_b + h * io.q.stride_h + token_q * io.q.stride_n
    q_MD = load_rows(
        q_ptr, io.q.stride_n, row0, len_q, MAIN_DIM, tile.BLOCK_M, tile.BLOCK_D, True
    ).to(DTYPE)
    if tile.BLOCK_R > 0:
        q_ptr += tile.BLOCK_D
        q_MR = load_rows(
            q_ptr, io.q.stride_n, row0, len_q, REST_DIM, tile.BLOCK_M, tile.BLOCK_R, True
        ).to(DTYPE)
    kv_b = cache_row(cache.batch_idx, b, cache.entries)
    k_ptr += g * io.k.stride_h
    v_ptr += g * io.v.stride_h
    if table is None:
        k_ptr += kv_b * io.k.stride_b
        v_ptr += kv_b * io.v.stride_b
    else:
        table += kv_b * cache.stride_tableb
    out_scale = dropout.inverse_keep
    if descales.q.ptr is not None:
        scale *= tl.load(descales.q.ptr + b * descales.q.stride_b + g * descales.q.stride_h)
    if descales.KV_GROUP == 0:
        if k_descale is not None:
            scale *= tl.load(k_descale + b * descales.k.stride_b + g * descales.k.stride_h)
        if v_descale is not None:
            out_scale *= tl.load(v_descale + b * descales.v.stride_b + g * descales.v.stride_h)
    else:
        k_offset = g * descales.k.stride_h
        v_offset = g * descales.v.stride_h
        if table is None:
            k_offset += kv_b * descales.k.stride_b
            v_offset += kv_b * descales.v.stride_b
        k_descale += k_offset
        v_descale += v_offset
        if k_shift is not None:
            k_shift += k_offset
            v_shift += v_offset
    slope = 0.0
    if mods.alibi is not None:
        slope = tl.load(mods.alibi + b * mods.stride_alibib + h)
    if bias is not None:
        bias += b * mods.bias.stride_b + h * mods.bias.stride_h
    if dropout.IS_ON:
        key0, key1 = seed_words(dropout.seed)
        threshold = dropout.threshold.to(tl.uint32, bitcast=True)

    m_M = tl.full([tile.BLOCK_M], float("-inf"), tl.float32)
    l_M = tl.zeros([tile.BLOCK_M], tl.float32)
    acc_ME = tl.zeros([tile.BLOCK_M, tile.BLOCK_E], tl.float32)
    if mods.sink is not None:
        # The sink is one more key whose value is zero: the running softmax begins with it.
        # Of several splits the first has it.
        logit = tl.where(split == 0, tl.load(mods.sink + h), float("-inf"))
        if not mods.IS_ADJUSTED:
            logit *= LOG2E
        m_M = tl.zeros([tile.BLOCK_M], tl.float32) + logit
        l_M += tl.where(m_M == float("-inf"), 0.0, 1.0)
    rows_M = row0 + tl.arange(0, tile.BLOCK_M)
    for masked in tl.static_range(2):
        if masked == 1:
            visit_from = tl.maximum(visit_begin, full)
            visit_to = visit_end
        else:
            visit_from = visit_begin
            visit_to = tl.minimum(visit_end, full)
        for visit in range(visit_from, visit_to):
            if masked == 0:
                col0 = (visit + full_begin) * tile.BLOCK_N
            elif mask.HAS_LEFT:
                col0 = (
                    masked_tile(visit - full, first_end, begin, full_begin, full_end) * tile.BLOCK_N
                )
            else:
                col0 = (visit - full + full_end) * tile.BLOCK_N
            k_ND = load_keys(
                k_ptr,
                io.k.stride_b,
                io.k.stride_n,
                table,
                cache.page_size,
                cache.entries,
                token_k,
                col0,
                len_k,
                k_descale,
                k_shift,
                descales.k.stride_b,
                descales.k.stride_n,
                MAIN_DIM,
                tile.BLOCK_N,
                tile.BLOCK_D,
                descales.KV_GROUP,
                descales.IS_INT4,
                masked == 1,
                DTYPE,
            )
            s_MN = product_of_rows(q_MD, k_ND, tile.PRECISION, IS_EXACT)
            if tile.BLOCK_R > 0:
                k_NR = load_keys(
                    k_ptr + tile.BLOCK_D,
                    io.k.stride_b,
                    io.k.stride_n,
                    table,
                    cache.page_size,
                    cache.entries,
                    token_k,
                    col0,
                    len_k,
                    k_descale,
                    k_shift,
                    descales.k.stride_b,
                    descales.k.stride_n,
                    REST_DIM,
                    tile.BLOCK_N,
                    tile.BLOCK_R,
                    descales.KV_GROUP,
                    descales.IS_INT4,
                    masked == 1,
                    DTYPE,
                )
                s_MN = plus_product(s_MN, q_MR, tl.trans(k_NR), tile.PRECISION, IS_EXACT)
            cols_N = col0 + tl.arange(0, tile.BLOCK_N)
            distance_MN = cols_N[None, :] - (rows_M + off)[:, None]
            if mods.IS_ADJUSTED:
                bias_MN = 0.0
                if bias is not None:
                    bias_MN = bias_tile(
                        bias,
                        mods.bias.stride_m,
                        mods.bias.stride_n,
                        row0,
                        col0,
                        len_q,
                        len_k,
                        tile.BLOCK_M,
                        tile.BLOCK_N,
                        False,
                    )
                s_MN, _gate = adjust_scores(
                    s_MN,
                    distance_MN,
                    scale,
                    mods.softcap,
                    slope,
                    bias_MN,
                    mods.HAS_SOFTCAP,
                    mods.alibi is not None,
                    bias is not None,
                )
            if masked == 1:
                ok_MN = visible(
                    cols_N[None, :],
                    distance_MN,
                    len_k,
                    mask.left,
                    mask.right,
                    mask.first,
                    mask.HAS_LEFT,
                    mask.HAS_RIGHT,
                )
                if tree is not None:
                    ok_MN &= tree_visible(
                        tree,
                        mask.stride_treem,
                        rows_M[:, None],
                        cols_N[None, :],
                        len_q,
                        len_k,
                    )
                s_MN = tl.where(ok_MN, s_MN, float("-inf"))
            p_MN, m_M, l_M, alpha_M = softmax_step(
                s_MN, m_M, l_M, scale, mods.IS_ADJUSTED, IS_EXACT, masked == 1 or bias is not None
            )
            if dropout.IS_ON:
                keep_MN = keep_tile(
                    key0,
                    key1,
                    threshold,
                    dropout.origin_m + row0,
                    dropout.origin_n + col0,
                    dropout.origin_h + h,
                    dropout.origin_b + b,
                    tile.BLOCK_M,
                    tile.BLOCK_N,
                    dropout.IS_QUAD,
                )
                p_MN = tl.where(keep_MN, p_MN, 0.0)
            v_NE = load_keys(
                v_ptr,
                io.v.stride_b,
                io.v.stride_n,
                table,
                cache.page_size,
                cache.entries,
                token_k,
                col0,
                len_k,
                v_descale,
                v_shift,
                descales.v.stride_b,
                descales.v.stride_n,
                tile.HEAD_DIM_V,
                tile.BLOCK_N,
                tile.BLOCK_E,
                descales.KV_GROUP,
                descales.IS_INT4,
                masked == 1,
                DTYPE,
            )
            acc_ME = plus_product(
                acc_ME * alpha_M[:, None], p_MN.to(DTYPE), v_NE, tile.PRECISION, IS_EXACT
            )

    acc_ME *= (out_scale / tl.where(l_M == 0.0, 1.0, l_M))[:, None]
    if not mods.IS_ADJUSTED:
        m_M *= LN2
    lse_M = m_M + tl.log2(l_M) * LN2
    # Rows of a tile that are stored but not used are written too, as rows that see nothing.
    used_M = rows_M < len_q
    acc_ME = tl.where(used_M[:, None], acc_ME, 0.0)
    lse_M = tl.where(used_M, lse_M, float("-inf"))
    out += (
        split * io.out.stride_s
        + b * io.out.stride_b
        + h * io.out.stride_h
        + token_q * io.out.stride_n
    )
    if lse is not None:
        lse += split * io.lse.stride_s + b * io.lse.stride_b + h * io.lse.stride_h + token_q
        tl.store(lse + rows_M, lse_M, mask=rows_M < stored_q)
    store_rows(
        out, acc_ME, io.out.stride_n, row0, stored_q, tile.HEAD_DIM_V, tile.BLOCK_M, tile.BLOCK_E
    )
