"""Gradients of keys and values (FlashAttention-2, Dao 2023, algorithm 2, without its dQ).

One program makes one tile of keys of one kv head, over the queries of every query head that shares
it: sums over the group stay in registers, in a fixed order. Scores are made transposed, so that
both products that sum over queries take them as they are.

Shapes: B batch, H query heads, G kv heads, M query rows, N key rows, D qk dim, E v dim.
"""

import triton
import triton.language as tl

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
    load_rows,
    query_sequence,
    query_tiles,
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
def key_gradients(
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
    dout,
    lse,
    delta,
    dk,
    dv,
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
    stride_dob,
    stride_dom,
    stride_doh,
    stride_dkb,
    stride_dkn,
    stride_dkh,
    stride_dvb,
    stride_dvn,
    stride_dvh,
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
    IS_GQA: tl.constexpr,
    IS_QUAD: tl.constexpr,
):
    """dk (B, N, G, D) and dv (B, N, G, E); rows past the used length are zero."""
    DTYPE: tl.constexpr = q.dtype.element_ty
    IS_EXACT: tl.constexpr = q.dtype.element_ty == tl.float32
    tile, bg = head_of(tl.program_id(0), tiles, l2_heads, batch * heads_k, False)
    b = bg // heads_k
    g = bg % heads_k
    token_q, len_q, _ = query_sequence(b, cu_seqlens_q, seqused_q, seqlen_q)
    token_k, len_k, stored_k = key_sequence(b, cu_seqlens_k, seqused_k, leftpad_k, seqlen_k)
    col0 = tile * BLOCK_N
    if col0 >= stored_k:
        return
    if bias is not None:
        len_q = tl.minimum(len_q, longest_q)
        len_k = tl.minimum(len_k, longest_k)
    last = tl.minimum(col0 + BLOCK_N, len_k) - 1
    off = bottom_right * (len_k - len_q) + shift
    begin, full_begin, full_end, end = query_tiles(
        col0, last, off, len_q, left, right, first, BLOCK_M, HAS_LEFT, HAS_RIGHT
    )
    if tree_mask is not None:
        if last >= len_k - len_q:
            full_end = full_begin
        tree_mask += b.to(tl.int64) * stride_treeb

    b = b.to(tl.int64)
    g = g.to(tl.int64)
    group = heads_q // heads_k
    q += b * stride_qb + token_q * stride_qm
    dout += b * stride_dob + token_q * stride_dom
    rows_lse = b * stride_lb + token_q
    k += b * stride_kb + g * stride_kh + token_k * stride_kn
    v += b * stride_vb + g * stride_vh + token_k * stride_vn
    k_ND = load_rows(k, stride_kn, col0, len_k, HEAD_DIM, BLOCK_N, BLOCK_D, True)
    v_NE = load_rows(v, stride_vn, col0, len_k, HEAD_DIM_V, BLOCK_N, BLOCK_E, True)
    cols_N = col0 + tl.arange(0, BLOCK_N)
    if HAS_DROPOUT:
        key0, key1 = seed_words(seed)
        threshold = drop_threshold.to(tl.uint32, bitcast=True)

    dk_ND = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_NE = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    for masked in tl.static_range(2):
        if masked == 1:
            count = full_begin - begin + (end - full_end)
        else:
            count = full_end - full_begin
        for visit in range(0, count * group):
            # One loop over heads and tiles: its loads stay in flight from head to head.
            h = g
            index = visit
            if IS_GQA:
                h = g * group + visit // count
                index = visit % count
            if masked == 1:
                if index >= full_begin - begin:
                    index += full_end - full_begin
                row0 = (begin + index) * BLOCK_M
            else:
                row0 = (full_begin + index) * BLOCK_M
            rows_M = row0 + tl.arange(0, BLOCK_M)
            q_MD = load_rows(
                q + h * stride_qh,
                stride_qm,
                row0,
                len_q,
                HEAD_DIM,
                BLOCK_M,
                BLOCK_D,
                masked == 1,
            )
            s_NM = product_of_rows(k_ND, q_MD, PRECISION, IS_EXACT)
            places_M = rows_lse + h * stride_lh + rows_M
            lse_M = lse_to_subtract(lse, places_M, rows_M < len_q, masked == 1)
            slope = 0.0
            if alibi_slopes is not None:
                slope = tl.load(alibi_slopes + b * stride_alibib + h)
            bias_NM = 0.0
            if bias is not None:
                bias_NM = bias_tile(
                    bias + b * stride_biasb + h * stride_biash,
                    stride_biasm,
                    stride_biasn,
                    row0,
                    col0,
                    len_q,
                    len_k,
                    BLOCK_M,
                    BLOCK_N,
                    True,
                )
            p_NM, slope_of_cap = probabilities(
                s_NM,
                lse_M[None, :],
                rows_M[None, :],
                cols_N[:, None],
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
                bias_NM,
                HAS_LEFT,
                HAS_RIGHT,
                HAS_SOFTCAP,
                alibi_slopes is not None,
                bias is not None,
                IS_ADJUSTED,
                IS_EXACT,
                masked == 1,
            )
            do_ME = load_rows(
                dout + h * stride_doh,
                stride_dom,
                row0,
                len_q,
                HEAD_DIM_V,
                BLOCK_M,
                BLOCK_E,
                masked == 1,
            )
            dp_NM = product_of_rows(v_NE, do_ME, PRECISION, IS_EXACT)
            kept_NM = p_NM
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
                keep_NM = tl.trans(keep_MN)
                kept_NM = tl.where(keep_NM, p_NM, 0.0)
                dp_NM = tl.where(keep_NM, dp_NM * drop_scale, 0.0)
            dv_NE = plus_product(dv_NE, kept_NM.to(DTYPE), do_ME, PRECISION, IS_EXACT)
            if masked == 1:
                delta_M = tl.load(delta + places_M, mask=rows_M < len_q, other=0.0)
            else:
                delta_M = tl.load(delta + places_M)
            ds_NM = p_NM * (dp_NM - delta_M[None, :]) * slope_of_cap
            dk_ND = plus_product(dk_ND, ds_NM.to(DTYPE), q_MD, PRECISION, IS_EXACT)

    used_N = (cols_N < len_k)[:, None]
    dk_ND = tl.where(used_N, dk_ND * scale, 0.0)
    dv_NE = tl.where(used_N, dv_NE * drop_scale, 0.0)
    dk += b * stride_dkb + g * stride_dkh + token_k * stride_dkn
    dv += b * stride_dvb + g * stride_dvh + token_k * stride_dvn
    store_rows(dk, dk_ND, stride_dkn, col0, stored_k, HEAD_DIM, BLOCK_N, BLOCK_D)
    store_rows(dv, dv_NE, stride_dvn, col0, stored_k, HEAD_DIM_V, BLOCK_N, BLOCK_E)
