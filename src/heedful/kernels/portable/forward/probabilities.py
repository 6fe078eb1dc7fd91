"""Signed probabilities, for tests and `return_attn_probs`: the only N x N tensor.

The kernel is `signed_probabilities`, launched by `launch/bind/portable.py` after a forward. Its
grid has one program for each tile of the tensor.

Shapes: B batch, H query heads, G KV heads, M query rows, N key rows, D qk dim.
"""

import triton
import triton.language as tl

from heedful.kernels.args.portable import ProbabilitiesIO
from heedful.kernels.args.shared import PortableParams
from heedful.kernels.common.keys import keys_at_place, load_keys
from heedful.kernels.common.rows import load_head_rows, wide
from heedful.kernels.common.scores import (
    head_mods,
    lse_to_subtract,
    probabilities,
    with_descales,
)
from heedful.kernels.common.sequences import place_of_queries
from heedful.kernels.common.statistics import any_far, statistics_of_keys, with_statistics
from heedful.kernels.portable.shared.dropout import dropout_words, keep_tile


@triton.jit
def signed_probabilities(io: ProbabilitiesIO, params: PortableParams, tiles_m, tiles_n):
    """Stores probs (B, H, M, N): probabilities before dropout, negative where dropout drops them.
    Elements past the lengths in use keep their values."""
    IS_FP8: tl.constexpr = io.q.ptr.dtype.element_ty.is_fp8()
    DTYPE: tl.constexpr = tl.bfloat16 if IS_FP8 else io.q.ptr.dtype.element_ty
    IS_EXACT: tl.constexpr = tl.float32 == DTYPE
    D: tl.constexpr = params.tile.HEAD_DIM
    BLOCK_D: tl.constexpr = params.tile.BLOCK_D
    M: tl.constexpr = params.tile.BLOCK_M
    N: tl.constexpr = params.tile.BLOCK_N
    IS_ADJUSTED: tl.constexpr = params.mods.IS_ADJUSTED
    pid = tl.program_id(0)
    col0 = (pid % tiles_n) * N
    row0 = (pid // tiles_n % tiles_m) * M
    # The tensor has room for only as many rows as the longest sequences have.
    bh = pid // tiles_n // tiles_m
    place = place_of_queries(bh, params.seqs, params.shape, params.mask, True)
    b, h, token_q = place.b, place.h, place.seq.token_q
    len_q, len_k = place.seq.len_q, place.seq.len_k
    if row0 >= len_q or col0 >= len_k:
        return
    scale, _factor = with_descales(params.mods.scale, 1.0, place, params.descales)
    head = head_mods(scale, b, h, params)
    q_MD = load_head_rows(io.q, b, h, token_q, row0, len_q, D, M, BLOCK_D).to(DTYPE)
    keys = keys_at_place(io.k, params.descales.k, place, params)
    k_ND = load_keys(keys, io.k, params.descales.k, params, col0, D, BLOCK_D, True).to(DTYPE)
    rows_M = row0 + tl.arange(0, M)
    cols_N = col0 + tl.arange(0, N)
    exists_M = rows_M < len_q
    places_M = b * io.lse.stride_b + h * io.lse.stride_h + token_q + rows_M
    lse_M = lse_to_subtract(io.lse, places_M, exists_M, IS_ADJUSTED)
    factor_M = tl.full([M], 1.0, tl.float32)
    if any_far(lse_M, IS_EXACT) != 0:
        m_M, l_M = statistics_of_keys(q_MD, keys, io.k, row0, place, head, params, IS_ADJUSTED)
        lse_M, factor_M = with_statistics(lse_M, m_M, l_M, IS_EXACT)
    p_MN, _slope = probabilities(q_MD, k_ND, lse_M, row0, col0, place, head, params, True, False)
    p_MN *= factor_M[:, None]
    if params.dropout.IS_ON:
        words = dropout_words(params.dropout)
        keep_MN = keep_tile(words, b, h, row0, col0, params.dropout, M, N)
        p_MN = tl.where(keep_MN, p_MN, -p_MN)
    probs = io.probs.ptr + (
        place.b * io.probs.stride_b
        + place.h * io.probs.stride_h
        + wide(row0) * io.probs.stride_m
        + wide(col0) * io.probs.stride_n
    )
    places = tl.arange(0, M)[:, None] * io.probs.stride_m
    places += tl.arange(0, N)[None, :] * io.probs.stride_n
    exists = exists_M[:, None] & (cols_N < len_k)[None, :]
    tl.store(probs + places, p_MN.to(io.probs.ptr.dtype.element_ty), mask=exists)
