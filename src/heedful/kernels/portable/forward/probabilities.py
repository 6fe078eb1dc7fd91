"""Signed probabilities, for tests and `return_attn_probs`: the only N x N tensor.

The kernel is `signed_probabilities`, launched by `launch/bind/portable.py` after a forward. Its
grid has one program for each tile of the tensor.

Shapes: B batch, H query heads, G KV heads, M query rows, N key rows, D qk dim.
"""

import triton
import triton.language as tl

from heedful.kernels.args.portable import ProbabilitiesIO
from heedful.kernels.args.shared import (
    Descales,
    Dropout,
    KVLayout,
    Mask,
    ScoreMods,
    Sequences,
    Shape,
    Tile,
)
from heedful.kernels.common.keys import keys_at_place, load_keys
from heedful.kernels.common.rows import load_rows, row_base, wide
from heedful.kernels.common.scores import descaled, head_mods, lse_to_subtract, probabilities
from heedful.kernels.common.sequences import place_of_queries
from heedful.kernels.common.statistics import any_far, statistics_of_keys, with_statistics
from heedful.kernels.portable.shared.dropout import dropout_words, keep_tile


@triton.jit
def signed_probabilities(
    io: ProbabilitiesIO,
    sequences: Sequences,
    shape: Shape,
    mask: Mask,
    mods: ScoreMods,
    dropout: Dropout,
    cache: KVLayout,
    descales: Descales,
    tile: Tile,
    tiles_m,
    tiles_n,
):
    """Stores probs (B, H, M, N): probabilities before dropout, negative where dropout drops them.
    Elements past the lengths in use keep their values."""
    IS_FP8: tl.constexpr = io.q.ptr.dtype.element_ty.is_fp8()
    DTYPE: tl.constexpr = tl.bfloat16 if IS_FP8 else io.q.ptr.dtype.element_ty
    IS_EXACT: tl.constexpr = tl.float32 == DTYPE
    D: tl.constexpr = tile.HEAD_DIM
    M: tl.constexpr = tile.BLOCK_M
    N: tl.constexpr = tile.BLOCK_N
    pid = tl.program_id(0)
    col0 = (pid % tiles_n) * N
    row0 = (pid // tiles_n % tiles_m) * M
    # The tensor has room for only as many rows as the longest sequences have.
    place = place_of_queries(pid // tiles_n // tiles_m, sequences, shape, mask, True)
    len_q, len_k = place.seq.len_q, place.seq.len_k
    if row0 >= len_q or col0 >= len_k:
        return
    scale = descaled(mods.scale, descales.q, place)
    if descales.KV_GROUP == 0:
        scale = descaled(scale, descales.k, place)
    head = head_mods(scale, place.b, place.h, mods, mask)
    q = row_base(io.q, place.b, place.h, place.seq.token_q)
    q_MD = load_rows(q, io.q.stride_n, row0, len_q, D, M, tile.BLOCK_D, True).to(DTYPE)
    keys = keys_at_place(io.k, descales.k, cache, place, descales.KV_GROUP)
    k_ND = load_keys(keys, io.k, descales.k, cache, descales, tile, col0, D, tile.BLOCK_D, True)
    k_ND = k_ND.to(DTYPE)
    rows_M = row0 + tl.arange(0, M)
    cols_N = col0 + tl.arange(0, N)
    exists_M = rows_M < len_q
    rows_lse = place.b * io.lse.stride_b + place.h * io.lse.stride_h + place.seq.token_q
    lse_M = lse_to_subtract(io.lse, rows_lse + rows_M, exists_M, mods.IS_ADJUSTED, True)
    factor_M = tl.full([M], 1.0, tl.float32)
    if any_far(lse_M, IS_EXACT) != 0:
        m_M, l_M = statistics_of_keys(
            q_MD,
            keys,
            io.k,
            cache,
            descales,
            row0,
            place,
            head,
            mask,
            mods,
            tile,
            mods.IS_ADJUSTED,
        )
        lse_M, factor_M = with_statistics(lse_M, m_M, l_M, IS_EXACT)
    p_MN, _slope = probabilities(
        q_MD, k_ND, lse_M, row0, col0, place, head, mask, mods, tile, True, False
    )
    p_MN *= factor_M[:, None]
    if dropout.IS_ON:
        words = dropout_words(dropout)
        keep_MN = keep_tile(words, place.b, place.h, row0, col0, dropout, M, N)
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
