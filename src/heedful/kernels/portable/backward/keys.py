"""Gradients of keys and values (FlashAttention-2, Dao 2023, algorithm 2, without its dQ).

The kernel is `key_gradients`, launched by `launch/bind/portable.py` after `query_gradients`, which
stores delta and the numbers to subtract from scores. Each program computes one tile of keys of one
KV head, over the queries of every query head that shares it. So the sums over the group stay in
registers and have a fixed order. Scores are computed transposed: both products that sum over
queries can then use P and dS as they are.

Shapes: B batch, H query heads, G KV heads, M query rows, N key rows, D qk dim, E v dim.
"""

import triton
import triton.language as tl

from heedful.kernels.args.portable import KeyGradientsIO
from heedful.kernels.args.shared import PortableParams
from heedful.kernels.common.block_lists import list_of, listed, step_of
from heedful.kernels.common.rows import load_rows, row_base, store_rows
from heedful.kernels.common.scores import (
    head_mods,
    plus_product,
    probabilities,
    product_of_rows,
    with_bits,
)
from heedful.kernels.common.sequences import place_of
from heedful.kernels.common.tile_range import TileRange, query_tiles
from heedful.kernels.portable.backward.seen import seeing_tiles
from heedful.kernels.portable.shared.dropout import dropout_words, keep_tile
from heedful.kernels.portable.shared.order import head_of


@triton.jit
def visited_rows(index, tiles, IS_MASKED: tl.constexpr):
    """The query tile of a visit. Visits are counted apart for tiles that need a mask (IS_MASKED)
    and for those that need none."""
    if IS_MASKED:
        if index >= tiles.full_begin - tiles.begin:
            index += tiles.full_end - tiles.full_begin
        return tiles.begin + index
    else:
        return tiles.full_begin + index


@triton.jit
def listing_tiles(col0, place, params, IS_GQA: tl.constexpr):
    """The `TileRange` of a tile of keys that has a list of query tiles, by places in the list: as
    many as the longest has, of all query heads. All of them need a mask."""
    group = params.shape.heads_q // params.shape.heads_k if IS_GQA else 1
    longest = 0
    for r in range(0, group):
        rows_of = list_of(place.b, place.g * group + r, col0, params.mask.blocks)
        whole, part = listed(rows_of, params.mask.blocks)
        longest = tl.maximum(longest, whole + part)
    longest = tl.where((col0 < place.seq.len_k) & (place.seq.len_q > 0), longest, 0)
    end = longest * (params.mask.blocks.SIDE // params.tile.BLOCK_M)
    return TileRange(0, 0, 0, 0, 0, end)


@triton.jit
def query_tile(visit, col0, h, place, params):
    """(first row, index of bits) of a visited tile of queries. If there are lists, it is a place in
    one; a head whose list is shorter visits rows that do not exist."""
    M: tl.constexpr = params.tile.BLOCK_M
    if params.mask.blocks.SIDE:
        rows_of = list_of(place.b, h, col0, params.mask.blocks)
        whole, part = listed(rows_of, params.mask.blocks)
        len_q = place.seq.len_q
        row, bits = step_of(rows_of, visit, len_q, params.mask.blocks, M, True)
        is_listed = visit < (whole + part) * (params.mask.blocks.SIDE // M)
        return tl.where(is_listed, row, tl.cdiv(len_q, M) * M), bits
    else:
        return visit * M, -1


@triton.jit
def key_gradients(io: KeyGradientsIO, params: PortableParams, IS_GQA: tl.constexpr):
    """Stores dk (B, N, G, D) and dv (B, N, G, E). Rows past the used length become zero. IS_GQA:
    several query heads share a KV head."""
    HAS_BIAS: tl.constexpr = params.mods.bias.ptr is not None
    DTYPE: tl.constexpr = io.q.ptr.dtype.element_ty
    IS_EXACT: tl.constexpr = tl.float32 == DTYPE
    PRECISION: tl.constexpr = params.tile.PRECISION
    D: tl.constexpr = params.tile.HEAD_DIM
    E: tl.constexpr = params.tile.HEAD_DIM_V
    M: tl.constexpr = params.tile.BLOCK_M
    N: tl.constexpr = params.tile.BLOCK_N
    BLOCK_D: tl.constexpr = params.tile.BLOCK_D
    BLOCK_E: tl.constexpr = params.tile.BLOCK_E
    heads_k = params.shape.heads_k
    block, bg = head_of(tl.program_id(0), params.order, params.shape.batch * heads_k, False)
    bk, gk = bg // heads_k, bg % heads_k
    place = place_of(bk, gk, gk, params.seqs, params.shape, params.mask, HAS_BIAS)
    col0 = block * N
    if col0 >= place.seq.stored_k:
        return
    if params.mask.blocks.SIDE:
        tiles = listing_tiles(col0, place, params, IS_GQA)
    elif params.mask.RANGES:
        tiles = seeing_tiles(col0, io.seen, place, params, IS_GQA)
    else:
        tiles = query_tiles(col0, place, params.mask, params.tile)
    b, g, token_k = place.b, place.g, place.seq.token_k
    len_q, len_k = place.seq.len_q, place.seq.len_k
    group = params.shape.heads_q // heads_k
    q = row_base(io.q, b, 0, place.seq.token_q)
    dout = row_base(io.dout, b, 0, place.seq.token_q)
    rows_lse = b * io.lse.stride_b + place.seq.token_q
    k = row_base(io.k, b, g, token_k)
    v = row_base(io.v, b, g, token_k)
    k_ND = load_rows(k, io.k.stride_n, col0, len_k, D, N, BLOCK_D, True)
    v_NE = load_rows(v, io.v.stride_n, col0, len_k, E, N, BLOCK_E, True)
    cols_N = col0 + tl.arange(0, N)
    words = dropout_words(params.dropout)

    dk_ND = tl.zeros([N, BLOCK_D], tl.float32)
    dv_NE = tl.zeros([N, BLOCK_E], tl.float32)
    # Factors of far rows cost instructions and registers in each step, and few programs see such
    # rows. So these make the sums of the first two loops, of full tiles and of masked ones, NaN.
    # The third computes all again, with factors.
    for loop in tl.static_range(3):
        count = tiles.full_end - tiles.full_begin
        if loop > 0:
            count = tiles.end - tiles.begin - count
        if loop == 2:
            total = tl.sum(tl.sum(dk_ND, 1), 0)
            is_far = total != total
            dk_ND = tl.where(is_far, 0.0, dk_ND)
            dv_NE = tl.where(is_far, 0.0, dv_NE)
            count = tl.where(is_far, tiles.end - tiles.begin, 0)
        # ptxas: a pipeline in the third loop would cost the others registers.
        for visit in tl.range(
            0, count * group, num_stages=1 if loop == 2 else None, disable_licm=loop == 2
        ):
            # One loop over heads and tiles, so that loads stay in flight from one head to the next.
            h = g
            index = visit
            if IS_GQA:
                h = g * group + visit // count
                index = visit % count
            if loop == 2:
                block = tiles.begin + index
            else:
                block = visited_rows(index, tiles, loop == 1)
            row0, bits = query_tile(block, col0, h, place, params)
            rows_M = row0 + tl.arange(0, M)
            q_h = q + h * io.q.stride_h
            q_MD = load_rows(q_h, io.q.stride_n, row0, len_q, D, M, BLOCK_D, loop > 0)
            places_M = rows_lse + h * io.lse.stride_h + rows_M
            exists_M = rows_M < len_q
            if loop == 0:
                lse_M = tl.load(io.rows.near + places_M)
            elif loop == 1:
                lse_M = tl.load(io.rows.near + places_M, mask=exists_M, other=float("inf"))
            else:
                lse_M = tl.load(io.rows.reference + places_M, mask=exists_M, other=float("inf"))
            head = with_bits(head_mods(params.mods.scale, b, h, params), bits)
            # S^T = K Q^T
            p_NM, slope_of_cap = probabilities(
                q_MD, k_ND, lse_M, row0, col0, place, head, params, loop > 0, True
            )
            do_h = dout + h * io.dout.stride_h
            do_ME = load_rows(do_h, io.dout.stride_n, row0, len_q, E, M, BLOCK_E, loop > 0)
            # dP^T = V dO^T
            dp_NM = product_of_rows(v_NE, do_ME, PRECISION, IS_EXACT)
            # ptxas: the factor is loaded here, where registers are free.
            if loop == 2:
                p_NM *= tl.load(io.rows.factor + places_M, mask=exists_M, other=1.0)[None, :]
            kept_NM = p_NM
            if params.dropout.IS_ON:
                keep_NM = tl.trans(keep_tile(words, b, h, row0, col0, params.dropout, M, N))
                kept_NM = tl.where(keep_NM, p_NM, 0.0)
                dp_NM = tl.where(keep_NM, dp_NM * params.dropout.inverse_keep, 0.0)
            # dV += P^T dO
            dv_NE = plus_product(dv_NE, kept_NM.to(DTYPE), do_ME, PRECISION, IS_EXACT)
            if loop > 0:
                delta_M = tl.load(io.delta + places_M, mask=exists_M, other=0.0)
            else:
                delta_M = tl.load(io.delta + places_M)
            ds_NM = p_NM * (dp_NM - delta_M[None, :]) * slope_of_cap
            # dK += dS^T Q
            dk_ND = plus_product(dk_ND, ds_NM.to(DTYPE), q_MD, PRECISION, IS_EXACT)

    used_N = (cols_N < len_k)[:, None]
    dk_ND = tl.where(used_N, dk_ND * params.mods.scale, 0.0)
    dv_NE = tl.where(used_N, dv_NE * params.dropout.inverse_keep, 0.0)
    dk = row_base(io.dk, b, g, token_k)
    dv = row_base(io.dv, b, g, token_k)
    store_rows(dk, dk_ND, io.dk.stride_n, col0, place.seq.stored_k, D)
    store_rows(dv, dv_NE, io.dv.stride_n, col0, place.seq.stored_k, E)
