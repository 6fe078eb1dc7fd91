"""Signed probabilities, for tests: the one N x N tensor.

Shapes: B batch, H query heads, G kv heads, M query rows, N key rows, D qk dim.
"""

import triton
import triton.language as tl

from heedful.kernels.portable.keys import load_keys
from heedful.kernels.portable.philox import keep_tile, seed_words
from heedful.kernels.portable.scores import (
    bias_tile,
    lse_to_subtract,
    probabilities,
    product_of_rows,
)
from heedful.kernels.portable.sequences import (
    cache_row,
    key_sequence,
    load_rows,
    query_sequence,
    wide,
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
    "entries",
    "page_size",
    "tiles_m",
    "tiles_n",
]


@triton.jit(do_not_specialize=LENGTHS)
def signed_probabilities(
    q,
    k,
    bias,
    alibi_slopes,
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
    k_shift,
    lse,
    probs,
    scale,
    softcap,
    left,
    right,
    first,
    bottom_right,
    shift,
    drop_threshold,
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
    stride_biasb,
    stride_biash,
    stride_biasm,
    stride_biasn,
    stride_alibib,
    stride_tableb,
    stride_treeb,
    stride_treem,
    stride_lb,
    stride_lh,
    stride_qdb,
    stride_qdh,
    stride_kdb,
    stride_kdn,
    stride_kdh,
    stride_pb,
    stride_ph,
    stride_pm,
    seqlen_q,
    seqlen_k,
    batch,
    heads_q,
    heads_k,
    longest_q,
    longest_k,
    entries,
    page_size,
    tiles_m,
    tiles_n,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    IS_ADJUSTED: tl.constexpr,
    IS_QUAD: tl.constexpr,
    KV_GROUP: tl.constexpr,
    IS_INT4: tl.constexpr,
):
    """probs (B, H, M, N): probabilities before dropout, negative where it drops them. Storage
    past the lengths used is left as it is."""
    DTYPE: tl.constexpr = tl.bfloat16 if q.dtype.element_ty.is_fp8() else q.dtype.element_ty
    IS_EXACT: tl.constexpr = q.dtype.element_ty == tl.float32
    pid = tl.program_id(0)
    col0 = (pid % tiles_n) * BLOCK_N
    row0 = (pid // tiles_n % tiles_m) * BLOCK_M
    b = wide(pid // tiles_n // tiles_m // heads_q)
    h = wide(pid // tiles_n // tiles_m % heads_q)
    g = h // (heads_q // heads_k)
    token_q, len_q, _ = query_sequence(b, cu_seqlens_q, seqused_q, seqlen_q)
    token_k, len_k, _ = key_sequence(b, cu_seqlens_k, seqused_k, leftpad_k, seqlen_k)
    # There is room for no more.
    len_q = tl.minimum(len_q, longest_q)
    len_k = tl.minimum(len_k, longest_k)
    if row0 >= len_q or col0 >= len_k:
        return
    off = bottom_right * (len_k - len_q) + shift
    kv_b = cache_row(kv_batch_idx, b, entries)
    k += g * stride_kh
    if block_table is None:
        k += kv_b * stride_kb
    else:
        block_table += kv_b * stride_tableb
    if q_descale is not None:
        scale *= tl.load(q_descale + b * stride_qdb + g * stride_qdh)
    if KV_GROUP == 0:
        if k_descale is not None:
            scale *= tl.load(k_descale + b * stride_kdb + g * stride_kdh)
    else:
        k_offset = g * stride_kdh
        if block_table is None:
            k_offset += kv_b * stride_kdb
        k_descale += k_offset
        if k_shift is not None:
            k_shift += k_offset
    q += b * stride_qb + h * stride_qh + token_q * stride_qm
    q_MD = load_rows(q, stride_qm, row0, len_q, HEAD_DIM, BLOCK_M, BLOCK_D, True).to(DTYPE)
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
        HEAD_DIM,
        BLOCK_N,
        BLOCK_D,
        KV_GROUP,
        IS_INT4,
        True,
        DTYPE,
    )
    rows_M = row0 + tl.arange(0, BLOCK_M)
    cols_N = col0 + tl.arange(0, BLOCK_N)
    exists_M = rows_M < len_q
    lse_M = lse_to_subtract(lse, b * stride_lb + h * stride_lh + token_q + rows_M, exists_M, True)
    slope = 0.0
    if alibi_slopes is not None:
        slope = tl.load(alibi_slopes + b * stride_alibib + h)
    if tree_mask is not None:
        tree_mask += b * stride_treeb
    bias_MN = 0.0
    if bias is not None:
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
    s_MN = product_of_rows(q_MD, k_ND, PRECISION, IS_EXACT)
    p_MN, _ = probabilities(
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
        True,
    )
    if HAS_DROPOUT:
        key0, key1 = seed_words(seed)
        keep_MN = keep_tile(
            key0,
            key1,
            drop_threshold.to(tl.uint32, bitcast=True),
            origin_m + row0,
            origin_n + col0,
            origin_h + h,
            origin_b + b,
            BLOCK_M,
            BLOCK_N,
            IS_QUAD,
        )
        p_MN = tl.where(keep_MN, p_MN, -p_MN)
    probs += b * stride_pb + h * stride_ph + wide(row0) * stride_pm + col0
    places = tl.arange(0, BLOCK_M)[:, None] * stride_pm + tl.arange(0, BLOCK_N)[None, :]
    mask = exists_M[:, None] & (cols_N < len_k)[None, :]
    tl.store(probs + places, p_MN.to(probs.dtype.element_ty), mask=mask)
