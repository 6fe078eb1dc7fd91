"""Gradient of the additive bias, summed over all axes along which the bias was broadcast.

The kernel is `bias_gradients`, launched by `launch/bind/portable.py` after `query_gradients`, which
stores delta. Its grid has one program for each tile of dbias.

Shapes: B batch, H query heads, G KV heads, M query rows, N key rows, D qk dim, E v dim.
"""

import triton
import triton.language as tl

from heedful.kernels.args.portable import BiasGradientsIO, BiasShape
from heedful.kernels.args.shared import PortableParams
from heedful.kernels.common.rows import load_head_rows, wide
from heedful.kernels.common.scores import head_mods, probabilities, product_of_rows
from heedful.kernels.common.sequences import place_of
from heedful.kernels.portable.shared.dropout import dropout_words, keep_tile


@triton.jit
def score_gradients(row0, col0, place, words, io: BiasGradientsIO, params):
    """Gradients of a tile of scores after all modifiers, [M, N]."""
    IS_EXACT: tl.constexpr = io.q.ptr.dtype.element_ty == tl.float32
    D: tl.constexpr = params.tile.HEAD_DIM
    E: tl.constexpr = params.tile.HEAD_DIM_V
    M: tl.constexpr = params.tile.BLOCK_M
    N: tl.constexpr = params.tile.BLOCK_N
    BLOCK_D: tl.constexpr = params.tile.BLOCK_D
    BLOCK_E: tl.constexpr = params.tile.BLOCK_E
    b, h, g, len_q, len_k = place.b, place.h, place.g, place.seq.len_q, place.seq.len_k
    token_q, token_k = place.seq.token_q, place.seq.token_k
    q_MD = load_head_rows(io.q, b, h, token_q, row0, len_q, D, M, BLOCK_D)
    k_ND = load_head_rows(io.k, b, g, token_k, col0, len_k, D, N, BLOCK_D)
    rows_M = row0 + tl.arange(0, M)
    places_M = b * io.lse.stride_b + h * io.lse.stride_h + token_q + rows_M
    exists_M = rows_M < len_q
    lse_M = tl.load(io.reference + places_M, mask=exists_M, other=float("inf"))
    factor_M = tl.load(io.factor + places_M, mask=exists_M, other=1.0)
    delta_M = tl.load(io.delta + places_M, mask=exists_M, other=0.0)
    head = head_mods(params.mods.scale, b, h, params)
    p_MN, _slope = probabilities(q_MD, k_ND, lse_M, row0, col0, place, head, params, True, False)
    do_ME = load_head_rows(io.dout, b, h, token_q, row0, len_q, E, M, BLOCK_E)
    v_NE = load_head_rows(io.v, b, g, token_k, col0, len_k, E, N, BLOCK_E)
    dp_MN = product_of_rows(do_ME, v_NE, params.tile.PRECISION, IS_EXACT)
    if params.dropout.IS_ON:
        keep_MN = keep_tile(words, b, h, row0, col0, params.dropout, M, N)
        dp_MN = tl.where(keep_MN, dp_MN * params.dropout.inverse_keep, 0.0)
    return p_MN * (dp_MN * factor_M[:, None] - (delta_M * factor_M)[:, None])


@triton.jit
def bias_gradients(io: BiasGradientsIO, bias: BiasShape, params: PortableParams):
    """Stores dbias, whose shape is `bias`.

    Each program computes one tile of it. It walks over every tile of scores that its elements were
    broadcast to, always in one order, so that the sum is the same in every run.
    """
    M: tl.constexpr = params.tile.BLOCK_M
    N: tl.constexpr = params.tile.BLOCK_N
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(bias.n, N)
    tiles_m = tl.cdiv(bias.m, M)
    tile_n = pid % tiles_n
    tile_m = pid // tiles_n % tiles_m
    first_h = pid // tiles_n // tiles_m % bias.h
    first_b = pid // tiles_n // tiles_m // bias.h
    # How many score tiles, heads and sequences one element was broadcast to.
    over_n = tl.where(bias.n == 1, tl.cdiv(params.shape.longest_k, N), 1)
    over_m = tl.where(bias.m == 1, tl.cdiv(params.shape.longest_q, M), 1)
    over_h = tl.where(bias.h == 1, params.shape.heads_q, 1)
    over_b = tl.where(bias.b == 1, params.shape.batch, 1)
    acc_MN = tl.zeros([M, N], tl.float32)
    words = dropout_words(params.dropout)
    for visit in range(0, over_b * over_h * over_m * over_n):
        col0 = (tile_n + visit % over_n) * N
        row0 = (tile_m + visit // over_n % over_m) * M
        h = wide(first_h + visit // over_n // over_m % over_h)
        b = wide(first_b + visit // over_n // over_m // over_h)
        g = h // (params.shape.heads_q // params.shape.heads_k)
        place = place_of(b, h, g, params.seqs, params.shape, params.mask, True)
        if row0 < place.seq.len_q and col0 < place.seq.len_k:
            acc_MN += score_gradients(row0, col0, place, words, io, params)
    # Where the bias was broadcast over rows or columns, the sum goes to the first of them.
    rows_M = tile_m * M + tl.arange(0, M)
    cols_N = tile_n * N + tl.arange(0, N)
    if bias.m == 1:
        acc_MN = tl.sum(acc_MN, 0)[None, :] + tl.zeros([M, 1], tl.float32)
    if bias.n == 1:
        acc_MN = tl.sum(acc_MN, 1)[:, None] + tl.zeros([1, N], tl.float32)
    dbias = io.dbias.ptr + (wide(first_b) * io.dbias.stride_b + wide(first_h) * io.dbias.stride_h)
    places = wide(rows_M)[:, None] * io.dbias.stride_m + wide(cols_N)[None, :] * io.dbias.stride_n
    exists = (rows_M < bias.m)[:, None] & (cols_N < bias.n)[None, :]
    tl.store(dbias + places, acc_MN.to(io.dbias.ptr.dtype.element_ty), mask=exists)
