"""Attention forward with an online softmax (Milakov & Gimelshein 2018; FlashAttention-2).

One program makes one tile of queries of one head, over all its keys or one split of them. Tiles
that need no mask come first, in a loop without any per-element test; the order of tiles does not
matter to an online softmax.

Shapes: B batch, H query heads, G kv heads, M query rows, N key rows, D qk dim, E v dim.
"""

import triton
import triton.language as tl

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


LENGTHS = [
    "left",
    "right",
    "first",
    "bottom_right",
    "shift",
    "drop_threshold",
    "origin_b",
    "origin_h",
    "origin_m",
    "origin_n",
    "seqlen_q",
    "seqlen_k",
    "batch",
    "heads_q",
    "heads_k",
    "longest_q",
    "longest_k",
    "entries",
    "page_size",
    "l2_heads",
    "num_splits",
    "tiles",
]


@triton.jit(do_not_specialize=LENGTHS)
def attention_forward(
    q,
    k,
    v,
    bias,
    alibi_slopes,
    sink,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_q,
    seqused_k,
    block_table,
    kv_batch_idx,
    leftpad_k,
    tree_mask,
    seed,
    q_descale,
    k_descale,
    v_descale,
    k_shift,
    v_shift,
    out,
    lse,
    scale,
    softcap,
    left,
    right,
    first,
    bottom_right,
    shift,
    drop_threshold,
    drop_scale,
    origin_b,
    origin_h,
    origin_m,
    origin_n,
    stride_qb,
    stride_qm,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_biasb,
    stride_biash,
    stride_biasm,
    stride_biasn,
    stride_alibib,
    stride_tableb,
    stride_treeb,
    stride_treem,
    stride_qdb,
    stride_qdh,
    stride_kdb,
    stride_kdn,
    stride_kdh,
    stride_vdb,
    stride_vdn,
    stride_vdh,
    stride_os,
    stride_ob,
    stride_om,
    stride_oh,
    stride_ls,
    stride_lb,
    stride_lh,
    seqlen_q,
    seqlen_k,
    batch,
    heads_q,
    heads_k,
    longest_q,
    longest_k,
    entries,
    page_size,
    l2_heads,
    num_splits,
    tiles,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    KV_GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    IS_ADJUSTED: tl.constexpr,
    IS_INT4: tl.constexpr,
    IS_QUAD: tl.constexpr,
):
    """out (.., M, H, E) and lse (B, H, M), or float32 partial ones with a leading split.

    seqlen_q, seqlen_k: as in `query_sequence`. longest_q, longest_k: rows and keys of a bias.
    entries: batch entries or pages of the cache.
    scale multiplies q k^T; IS_ADJUSTED: scores pass through softcap, ALiBi or bias, or the scale
    is not positive, so that the maximum must be taken after them.
    IS_QUAD: columns of the dropout mask come in aligned fours.
    BLOCK_R: above 0, columns R of q and k that BLOCK_D leaves: a product of their own.
    """
    MAIN_DIM: tl.constexpr = HEAD_DIM if BLOCK_R == 0 else BLOCK_D
    REST_DIM: tl.constexpr = HEAD_DIM - MAIN_DIM
    IS_EXACT: tl.constexpr = q.dtype.element_ty == tl.float32
    DTYPE: tl.constexpr = tl.bfloat16 if q.dtype.element_ty.is_fp8() else q.dtype.element_ty
    split = tl.program_id(1)
    tile, bh = head_of(tl.program_id(0), tiles, l2_heads, batch * heads_q, HAS_RIGHT)
    b = bh // heads_q
    h = bh % heads_q
    g = h // (heads_q // heads_k)
    token_q, len_q, stored_q = query_sequence(b, cu_seqlens_q, seqused_q, seqlen_q)
    token_k, len_k, _ = key_sequence(b, cu_seqlens_k, seqused_k, leftpad_k, seqlen_k)
    row0 = tile * BLOCK_M
    if cu_seqlens_q is not None:
        clear_gaps(
            out + split * stride_os,
            lse if lse is None else lse + split * stride_ls,
            cu_seqlens_q,
            stride_om,
            stride_oh,
            stride_lh,
            seqlen_q,
            batch,
            heads_q,
            tl.program_id(0),
            tl.num_programs(0),
            HEAD_DIM_V,
            BLOCK_E,
        )
    if row0 >= stored_q:
        return
    if bias is not None:
        len_q = tl.minimum(len_q, longest_q)
        len_k = tl.minimum(len_k, longest_k)
    last = tl.minimum(row0 + BLOCK_M, len_q) - 1
    off = bottom_right * (len_k - len_q) + shift
    first_end, begin, full_begin, full_end, end = key_tiles(
        row0, last, off, len_k, left, right, first, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    if tree_mask is not None:
        full_end = tl.minimum(full_end, tl.maximum(len_k - len_q, 0) // BLOCK_N)
        full_end = tl.maximum(full_end, full_begin)
        tree_mask += b.to(tl.int64) * stride_treeb
    full = full_end - full_begin
    visits = full + first_end + (full_begin - begin) + (end - full_end)
    # A sequence is split by its own length alone, so that no neighbour changes its result.
    per_split = tl.cdiv(visits, num_splits)
    visit_begin = tl.minimum(split * per_split, visits)
    visit_end = tl.minimum(visit_begin + per_split, visits)

    b = b.to(tl.int64)
    h = h.to(tl.int64)
    g = g.to(tl.int64)
    q += b * stride_qb + h * stride_qh + token_q * stride_qm
    q_MD = load_rows(q, stride_qm, row0, len_q, MAIN_DIM, BLOCK_M, BLOCK_D, True).to(DTYPE)
    if BLOCK_R > 0:
        q += BLOCK_D
        q_MR = load_rows(q, stride_qm, row0, len_q, REST_DIM, BLOCK_M, BLOCK_R, True).to(DTYPE)
    kv_b = cache_row(kv_batch_idx, b, entries)
    k += g * stride_kh
    v += g * stride_vh
    if block_table is None:
        k += kv_b * stride_kb
        v += kv_b * stride_vb
    else:
        block_table += kv_b * stride_tableb
    out_scale = drop_scale
    if q_descale is not None:
        scale *= tl.load(q_descale + b * stride_qdb + g * stride_qdh)
    if KV_GROUP == 0:
        if k_descale is not None:
            scale *= tl.load(k_descale + b * stride_kdb + g * stride_kdh)
        if v_descale is not None:
            out_scale *= tl.load(v_descale + b * stride_vdb + g * stride_vdh)
    else:
        k_offset = g * stride_kdh
        v_offset = g * stride_vdh
        if block_table is None:
            k_offset += kv_b * stride_kdb
            v_offset += kv_b * stride_vdb
        k_descale += k_offset
        v_descale += v_offset
        if k_shift is not None:
            k_shift += k_offset
            v_shift += v_offset
    slope = 0.0
    if alibi_slopes is not None:
        slope = tl.load(alibi_slopes + b * stride_alibib + h)
    if bias is not None:
        bias += b * stride_biasb + h * stride_biash
    if HAS_DROPOUT:
        key0, key1 = seed_words(seed)
        threshold = drop_threshold.to(tl.uint32, bitcast=True)

    m_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_M = tl.zeros([BLOCK_M], tl.float32)
    acc_ME = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    if sink is not None:
        # The sink is one more key whose value is zero: the running softmax begins with it.
        # Of several splits the first has it.
        logit = tl.where(split == 0, tl.load(sink + h), float("-inf"))
        if not IS_ADJUSTED:
            logit *= LOG2E
        m_M = tl.zeros([BLOCK_M], tl.float32) + logit
        l_M += tl.where(m_M == float("-inf"), 0.0, 1.0)
    rows_M = row0 + tl.arange(0, BLOCK_M)
    for masked in tl.static_range(2):
        if masked == 1:
            visit_from = tl.maximum(visit_begin, full)
            visit_to = visit_end
        else:
            visit_from = visit_begin
            visit_to = tl.minimum(visit_end, full)
        for visit in range(visit_from, visit_to):
            if masked == 0:
                col0 = (visit + full_begin) * BLOCK_N
            elif HAS_LEFT:
                col0 = masked_tile(visit - full, first_end, begin, full_begin, full_end) * BLOCK_N
            else:
                col0 = (visit - full + full_end) * BLOCK_N
            k_ND = load_keys(
                k,
                stride_kb,
                stride_kn,
                block_table,
                page_size,
                entries,
                token_k,
                col0,
                len_k,
                k_descale,
                k_shift,
                stride_kdb,
                stride_kdn,
                MAIN_DIM,
                BLOCK_N,
                BLOCK_D,
                KV_GROUP,
                IS_INT4,
                masked == 1,
                DTYPE,
            )
            s_MN = product_of_rows(q_MD, k_ND, PRECISION, IS_EXACT)
            if BLOCK_R > 0:
                k_NR = load_keys(
                    k + BLOCK_D,
                    stride_kb,
                    stride_kn,
                    block_table,
                    page_size,
                    entries,
                    token_k,
                    col0,
                    len_k,
                    k_descale,
                    k_shift,
                    stride_kdb,
                    stride_kdn,
                    REST_DIM,
                    BLOCK_N,
                    BLOCK_R,
                    KV_GROUP,
                    IS_INT4,
                    masked == 1,
                    DTYPE,
                )
                s_MN = plus_product(s_MN, q_MR, tl.trans(k_NR), PRECISION, IS_EXACT)
            cols_N = col0 + tl.arange(0, BLOCK_N)
            distance_MN = cols_N[None, :] - (rows_M + off)[:, None]
            if IS_ADJUSTED:
                bias_MN = 0.0
                if bias is not None:
                    bias_MN = bias_tile(
                        bias,
                        stride_biasm,
                        stride_biasn,
                        row0,
                        col0,
                        len_q,
                        len_k,
                        BLOCK_M,
                        BLOCK_N,
                        False,
                    )
                s_MN, _gate = adjust_scores(
                    s_MN,
                    distance_MN,
                    scale,
                    softcap,
                    slope,
                    bias_MN,
                    HAS_SOFTCAP,
                    alibi_slopes is not None,
                    bias is not None,
                )
            if masked == 1:
                ok_MN = visible(
                    cols_N[None, :], distance_MN, len_k, left, right, first, HAS_LEFT, HAS_RIGHT
                )
                if tree_mask is not None:
                    ok_MN &= tree_visible(
                        tree_mask,
                        stride_treem,
                        rows_M[:, None],
                        cols_N[None, :],
                        len_q,
                        len_k,
                    )
                s_MN = tl.where(ok_MN, s_MN, float("-inf"))
            p_MN, m_M, l_M, alpha_M = softmax_step(
                s_MN, m_M, l_M, scale, IS_ADJUSTED, IS_EXACT, masked == 1 or bias is not None
            )
            if HAS_DROPOUT:
                keep_MN = keep_tile(
                    key0,
                    key1,
                    threshold,
                    origin_m + row0,
                    origin_n + col0,
                    origin_h + h,
                    origin_b + b,
                    BLOCK_M,
                    BLOCK_N,
                    IS_QUAD,
                )
                p_MN = tl.where(keep_MN, p_MN, 0.0)
            v_NE = load_keys(
                v,
                stride_vb,
                stride_vn,
                block_table,
                page_size,
                entries,
                token_k,
                col0,
                len_k,
                v_descale,
                v_shift,
                stride_vdb,
                stride_vdn,
                HEAD_DIM_V,
                BLOCK_N,
                BLOCK_E,
                KV_GROUP,
                IS_INT4,
                masked == 1,
                DTYPE,
            )
            acc_ME = plus_product(
                acc_ME * alpha_M[:, None], p_MN.to(DTYPE), v_NE, PRECISION, IS_EXACT
            )

    acc_ME *= (out_scale / tl.where(l_M == 0.0, 1.0, l_M))[:, None]
    if not IS_ADJUSTED:
        m_M *= LN2
    lse_M = m_M + tl.log2(l_M) * LN2
    # Rows of a tile that are stored but not used are written too, as rows that see nothing.
    used_M = rows_M < len_q
    acc_ME = tl.where(used_M[:, None], acc_ME, 0.0)
    lse_M = tl.where(used_M, lse_M, float("-inf"))
    out += split * stride_os + b * stride_ob + h * stride_oh + token_q * stride_om
    if lse is not None:
        lse += split * stride_ls + b * stride_lb + h * stride_lh + token_q
        tl.store(lse + rows_M, lse_M, mask=rows_M < stored_q)
    store_rows(out, acc_ME, stride_om, row0, stored_q, HEAD_DIM_V, BLOCK_M, BLOCK_E)
