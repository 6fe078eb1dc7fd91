"""Gradient of the additive bias, summed over whatever the bias was broadcast over.

Shapes: B batch, H query heads, G kv heads, M query rows, N key rows, D qk dim, E v dim.
"""

import triton
import triton.language as tl

from heedful.kernels.portable.philox import keep_tile, seed_words
from heedful.kernels.portable.scores import (
    bias_tile,
    lse_to_subtract,
    probabilities,
    product_of_rows,
)
from heedful.kernels.portable.sequences import key_sequence, load_rows, query_sequence, wide

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
    "own_b",
    "own_h",
    "own_m",
    "own_n",
]


@triton.jit(do_not_specialize=LENGTHS)
def bias_gradients(
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
    dbias,
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
    stride_dbb,
    stride_dbh,
    stride_dbm,
    stride_dbn,
    seqlen_q,
    seqlen_k,
    batch,
    heads_q,
    heads_k,
    longest_q,
    longest_k,
    own_b,
    own_h,
    own_m,
    own_n,
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
    """dbias of shape (own_b, own_h, own_m, own_n), each 1 or the full size.

    One program makes one tile of it and walks every tile of scores that it was broadcast to, in
    one order, so the sum is the same in every run.
    """
    IS_EXACT: tl.constexpr = q.dtype.element_ty == tl.float32
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(own_n, BLOCK_N)
    tiles_m = tl.cdiv(own_m, BLOCK_M)
    tile_n = pid % tiles_n
    tile_m = pid // tiles_n % tiles_m
    at_h = pid // tiles_n // tiles_m % own_h
    at_b = pid // tiles_n // tiles_m // own_h
    # How many score tiles, heads and sequences one element stands for.
    over_n = tl.where(own_n == 1, tl.cdiv(longest_k, BLOCK_N), 1)
    over_m = tl.where(own_m == 1, tl.cdiv(longest_q, BLOCK_M), 1)
    over_h = tl.where(own_h == 1, heads_q, 1)
    over_b = tl.where(own_b == 1, batch, 1)
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if HAS_DROPOUT:
        key0, key1 = seed_words(seed)
        threshold = drop_threshold.to(tl.uint32, bitcast=True)
    for visit in range(0, over_b * over_h * over_m * over_n):
        col0 = (tile_n + visit % over_n) * BLOCK_N
        row0 = (tile_m + visit // over_n % over_m) * BLOCK_M
        h = wide(at_h + visit // over_n // over_m % over_h)
        b = wide(at_b + visit // over_n // over_m // over_h)
        g = h // (heads_q // heads_k)
        token_q, len_q, _ = query_sequence(b, cu_seqlens_q, seqused_q, seqlen_q)
        token_k, len_k, _ = key_sequence(b, cu_seqlens_k, seqused_k, leftpad_k, seqlen_k)
        len_q = tl.minimum(len_q, longest_q)
        len_k = tl.minimum(len_k, longest_k)
        if row0 < len_q and col0 < len_k:
            off = bottom_right * (len_k - len_q) + shift
            q_MD = load_rows(
                q + b * stride_qb + h * stride_qh + token_q * stride_qm,
                stride_qm,
                row0,
                len_q,
                HEAD_DIM,
                BLOCK_M,
                BLOCK_D,
                True,
            )
            k_ND = load_rows(
                k + b * stride_kb + g * stride_kh + token_k * stride_kn,
                stride_kn,
                col0,
                len_k,
                HEAD_DIM,
                BLOCK_N,
                BLOCK_D,
                True,
            )
            s_MN = product_of_rows(q_MD, k_ND, PRECISION, IS_EXACT)
            rows_M = row0 + tl.arange(0, BLOCK_M)
            cols_N = col0 + tl.arange(0, BLOCK_N)
            places_M = b * stride_lb + h * stride_lh + token_q + rows_M
            lse_M = lse_to_subtract(lse, places_M, rows_M < len_q, True)
            delta_M = tl.load(delta + places_M, mask=rows_M < len_q, other=0.0)
            slope = 0.0
            if alibi_slopes is not None:
                slope = tl.load(alibi_slopes + b * stride_alibib + h)
            tree = tree_mask
            if tree_mask is not None:
                tree = tree_mask + b * stride_treeb
            bias_MN = bias_tile(
                bias + b * stride_biasb + h * stride_biash,
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
            p_MN, _kept = probabilities(
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
                tree,
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
                True,
            )
            do_ME = load_rows(
                dout + b * stride_dob + h * stride_doh + token_q * stride_dom,
                stride_dom,
                row0,
                len_q,
                HEAD_DIM_V,
                BLOCK_M,
                BLOCK_E,
                True,
            )
            v_NE = load_rows(
                v + b * stride_vb + g * stride_vh + token_k * stride_vn,
                stride_vn,
                col0,
                len_k,
                HEAD_DIM_V,
                BLOCK_N,
                BLOCK_E,
                True,
            )
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
            acc_MN += p_MN * (dp_MN - delta_M[:, None])
    # Rows or columns that the bias was broadcast over end up in its first.
    rows_M = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols_N = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if own_m == 1:
        acc_MN = tl.sum(acc_MN, 0)[None, :] + tl.zeros([BLOCK_M, 1], tl.float32)
    if own_n == 1:
        acc_MN = tl.sum(acc_MN, 1)[:, None] + tl.zeros([1, BLOCK_N], tl.float32)
    dbias += wide(at_b) * stride_dbb + wide(at_h) * stride_dbh
    places = wide(rows_M)[:, None] * stride_dbm + wide(cols_N)[None, :] * stride_dbn
    mask = (rows_M < own_m)[:, None] & (cols_N < own_n)[None, :]
    tl.store(dbias + places, acc_MN.to(dbias.dtype.element_ty), mask=mask)
