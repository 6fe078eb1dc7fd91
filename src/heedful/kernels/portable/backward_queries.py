"""Gradient of queries (FlashAttention-2, Dao 2023, algorithm 2, its dQ alone).

One program makes one tile of queries of one head, over its keys: no atomics, so the sum has one
order. Scores are made a second time, which costs two products of seven. It runs first: delta, which
the other gradients need too, is made here where dout is at hand anyway.

Shapes: B batch, H query heads, G kv heads, M query rows, N key rows, D qk dim, E v dim.
"""

import triton
import triton.language as tl

from heedful.kernels.portable.backward_rows import row_deltas
from heedful.kernels.portable.philox import keep_tile, seed_words
from heedful.kernels.portable.scores import (
    bias_tile,
    lse_to_subtract,
    plus_product,
    probabilities,
    product_of_rows,
)
from heedful.kernels.portable.sequences import (
    head_of,
    key_sequence,
    key_tiles,
    load_rows,
    masked_tile,
    query_sequence,
    store_rows,
)

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
    "l2_heads",
    "tiles",
]


@triton.jit(do_not_specialize=LENGTHS)
def query_gradients(
    q,
    k,
    v,
    bias,
    alibi_slopes,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_q,
    seqused_k,
    leftpad_k,
    tree_mask,
    seed,
    out,
    dout,
    lse,
    dlse,
    delta,
    dq,
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
    stride_treeb,
    stride_treem,
    stride_lb,
    stride_lh,
    stride_ob,
    stride_om,
    stride_oh,
    stride_dlb,
    stride_dlm,
    stride_dlh,
    stride_dob,
    stride_dom,
    stride_doh,
    stride_dqb,
    stride_dqm,
    stride_dqh,
    seqlen_q,
    seqlen_k,
    batch,
    heads_q,
    heads_k,
    longest_q,
    longest_k,
    l2_heads,
    tiles,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    IS_ADJUSTED: tl.constexpr,
    IS_QUAD: tl.constexpr,
):
    """dq (B, M, H, D), in which rows past the used length are zero, and delta (B, H, M), laid out
    as lse, of the rows within it."""
    DTYPE: tl.constexpr = q.dtype.element_ty
    IS_EXACT: tl.constexpr = q.dtype.element_ty == tl.float32
    tile, bh = head_of(tl.program_id(0), tiles, l2_heads, batch * heads_q, HAS_RIGHT)
    b = bh // heads_q
    h = bh % heads_q
    g = h // (heads_q // heads_k)
    token_q, len_q, stored_q = query_sequence(b, cu_seqlens_q, seqused_q, seqlen_q)
    token_k, len_k, _ = key_sequence(b, cu_seqlens_k, seqused_k, leftpad_k, seqlen_k)
    row0 = tile * BLOCK_M
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

    b = b.to(tl.int64)
    h = h.to(tl.int64)
    g = g.to(tl.int64)
    q += b * stride_qb + h * stride_qh + token_q * stride_qm
    dout += b * stride_dob + h * stride_doh + token_q * stride_dom
    k += b * stride_kb + g * stride_kh + token_k * stride_kn
    v += b * stride_vb + g * stride_vh + token_k * stride_vn
    q_MD = load_rows(q, stride_qm, row0, len_q, HEAD_DIM, BLOCK_M, BLOCK_D, True)
    do_ME = load_rows(dout, stride_dom, row0, len_q, HEAD_DIM_V, BLOCK_M, BLOCK_E, True)
    rows_M = row0 + tl.arange(0, BLOCK_M)
    exists_M = rows_M < len_q
    places_M = b * stride_lb + h * stride_lh + token_q + rows_M
    lse_M = lse_to_subtract(lse, places_M, exists_M, True)
    out += b * stride_ob + h * stride_oh + token_q * stride_om
    o_ME = load_rows(out, stride_om, row0, len_q, HEAD_DIM_V, BLOCK_M, BLOCK_E, True)
    if dlse is not None:
        dlse += b * stride_dlb + h * stride_dlh + token_q * stride_dlm
    delta_M = row_deltas(o_ME, do_ME, lse, dlse, stride_dlm, places_M, rows_M, exists_M)
    tl.store(delta + places_M, delta_M, mask=exists_M)
    slope = 0.0
    if alibi_slopes is not None:
        slope = tl.load(alibi_slopes + b * stride_alibib + h)
    if bias is not None:
        bias += b * stride_biasb + h * stride_biash
    if HAS_DROPOUT:
        key0, key1 = seed_words(seed)
        threshold = drop_threshold.to(tl.uint32, bitcast=True)

    dq_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for masked in tl.static_range(2):
        if masked == 1:
            count = first_end + (full_begin - begin) + (end - full_end)
        else:
            count = full_end - full_begin
        for visit in range(0, count):
            if masked == 0:
                col0 = (visit + full_begin) * BLOCK_N
            elif HAS_LEFT:
                col0 = masked_tile(visit, first_end, begin, full_begin, full_end) * BLOCK_N
            else:
                col0 = (visit + full_end) * BLOCK_N
            cols_N = col0 + tl.arange(0, BLOCK_N)
            k_ND = load_rows(k, stride_kn, col0, len_k, HEAD_DIM, BLOCK_N, BLOCK_D, masked == 1)
            s_MN = product_of_rows(q_MD, k_ND, PRECISION, IS_EXACT)
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
            p_MN, slope_of_cap = probabilities(
                s_MN,
                lse_M[:, None],
                rows_M[:, None],
                cols_N[None, :],
                off,
                len_q,
                len_k,
                left,
                right,
                first,
                tree_mask,
                stride_treem,
                scale,
                softcap,
                slope,
                bias_MN,
                HAS_LEFT,
                HAS_RIGHT,
                HAS_SOFTCAP,
                alibi_slopes is not None,
                bias is not None,
                IS_ADJUSTED,
                IS_EXACT,
                masked == 1,
            )
            v_NE = load_rows(v, stride_vn, col0, len_k, HEAD_DIM_V, BLOCK_N, BLOCK_E, masked == 1)
            dp_MN = product_of_rows(do_ME, v_NE, PRECISION, IS_EXACT)
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
                dp_MN = tl.where(keep_MN, dp_MN * drop_scale, 0.0)
            ds_MN = p_MN * (dp_MN - delta_M[:, None]) * slope_of_cap
            dq_MD = plus_product(dq_MD, ds_MN.to(DTYPE), k_ND, PRECISION, IS_EXACT)

    dq_MD = tl.where(exists_M[:, None], dq_MD * scale, 0.0)
    dq += b * stride_dqb + h * stride_dqh + token_q * stride_dqm
    store_rows(dq, dq_MD, stride_dqm, row0, stored_q, HEAD_DIM, BLOCK_M, BLOCK_D)
