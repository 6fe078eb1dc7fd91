"""Attention whose bits do not depend on how a call is made (numerics="invariant").

Keys of a sequence are cut into parts, which begin at multiples of PART_TILES key tiles. Within a
part one loop visits the tiles in the order of their positions, each with a mask: neither the rows
beside a row nor lengths change the order, or choose other code. A part's result is an output and a
log-sum-exp in two numbers. Parts are merged one after the other. Either a program of
`attention_in_parts` takes all parts of its tile, or there is one for each, and `merge_parts` merges
what they stored. Both ways run the same functions on the same numbers, and a part without visible
keys changes nothing. Sums of products are explicit fused multiply-adds, where the compiler might
else contract one of two copies.

Shapes: M query rows, N key rows, D qk dim, E v dim.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from heedful.kernels.args.portable import MergePartsIO
from heedful.kernels.args.shared import ForwardIO, PortableParams
from heedful.kernels.common.gaps import clear_gaps
from heedful.kernels.common.keys import keys_at_place, load_keys
from heedful.kernels.common.log_sum import log_sum_exp
from heedful.kernels.common.parts import all_parts, part_weights, plus_part
from heedful.kernels.common.rows import load_rows, row_base, wide
from heedful.kernels.common.scores import (
    head_mods,
    modified_scores,
    plus_product,
    softmax_step,
    with_descales,
)
from heedful.kernels.common.sequences import place_of_queries
from heedful.kernels.common.tile_range import key_tile, key_tiles
from heedful.kernels.portable.forward.kernel import main_columns, raw_scores, store_finished
from heedful.kernels.portable.shared.order import head_of


class Merged(NamedTuple):
    """Parts merged so far: their largest log-sum-exp in two numbers, the sum of their weights by
    that, and their weighted outputs (M, E)."""

    lse: Any
    rest: Any
    total: Any
    out: Any


@triton.jit
def none_merged(place, params):
    """`Merged` before any part: the sink alone, if there is one."""
    M: tl.constexpr = params.tile.BLOCK_M
    out_ME = tl.zeros([M, params.tile.BLOCK_E], tl.float32)
    rest_M = tl.zeros([M], tl.float32)
    lse_M = tl.full([M], float("-inf"), tl.float32)
    total_M = tl.zeros([M], tl.float32)
    if params.mods.sink is not None:
        lse_M = rest_M + tl.load(params.mods.sink + place.h)
        total_M = tl.where(lse_M == float("-inf"), 0.0, 1.0)
    return Merged(lse_M, rest_M, total_M, out_ME)


@triton.jit
def with_part(merged, lse_M, rest_M, part_ME):
    """`merged` and one more part; one that saw no key has weight 0, whatever its output holds."""
    top_M, top_rest_M, old_M, new_M = part_weights(merged.lse, merged.rest, lse_M, rest_M)
    return Merged(
        top_M,
        top_rest_M,
        tl.fma(merged.total, old_M, new_M),
        plus_part(merged.out, old_M[:, None], part_ME, new_M[:, None]),
    )


@triton.jit
def store_merged(merged, factor, row0, place, io, params):
    """Stores out and lse of all parts. factor: of outputs."""
    rows_M = row0 + tl.arange(0, params.tile.BLOCK_M)
    lse_M, rest_M, total_M = all_parts(merged.lse, merged.rest, merged.total)
    out_ME = merged.out * (factor / total_M)[:, None]
    store_finished(out_ME, lse_M, rest_M, 0, rows_M, row0, place, io, params)


class Runs(NamedTuple):
    """The key tiles that a tile of queries visits: [begin, end), then [begin2, end2), in the order
    of positions."""

    begin: Any
    end: Any
    begin2: Any
    end2: Any


@triton.jit
def runs_of(tiles):
    """The `Runs` of a `TileRange`, whose first tiles may lie behind its others under key ranges."""
    first = tiles.first_begin <= tiles.begin
    return Runs(
        tl.where(first, tiles.first_begin, tiles.begin),
        tl.where(first, tiles.first_end, tiles.end),
        tl.where(first, tiles.begin, tiles.first_begin),
        tl.where(first, tiles.end, tiles.first_end),
    )


@triton.jit
def parts_of(runs, PART_TILES: tl.constexpr):
    """(first part with a visited tile, end of parts with one)."""
    begin = tl.where(runs.begin < runs.end, runs.begin, runs.begin2)
    return begin // PART_TILES, tl.cdiv(tl.maximum(runs.end, runs.end2), PART_TILES)


@triton.jit
def part_of_keys(
    part, runs, q_MD, q_MR, keys, values, row0, place, head, io, params, PART_TILES: tl.constexpr
):
    """(lse, its rest, output) of a tile of queries over a part of their keys."""
    M: tl.constexpr = params.tile.BLOCK_M
    E: tl.constexpr = params.tile.HEAD_DIM_V
    BLOCK_E: tl.constexpr = params.tile.BLOCK_E
    IS_ADJUSTED: tl.constexpr = params.mods.IS_ADJUSTED
    IS_EXACT: tl.constexpr = q_MD.dtype == tl.float32
    rows_M = row0 + tl.arange(0, M)
    begin = tl.maximum(runs.begin, part * PART_TILES)
    begin2 = tl.maximum(runs.begin2, part * PART_TILES)
    count = tl.maximum(tl.minimum(runs.end, (part + 1) * PART_TILES) - begin, 0)
    count2 = tl.maximum(tl.minimum(runs.end2, (part + 1) * PART_TILES) - begin2, 0)
    m_M = tl.full([M], float("-inf"), tl.float32)
    l_M = tl.zeros([M], tl.float32)
    acc_ME = tl.zeros([M, BLOCK_E], tl.float32)
    for visit in range(0, count + count2):
        block = tl.where(visit < count, begin + visit, begin2 + (visit - count))
        col0, mods = key_tile(block, row0, place, head, params, True)
        # S = Q K^T
        s_MN = raw_scores(q_MD, q_MR, keys, col0, io.k, params, True, IS_EXACT)
        s_MN = modified_scores(s_MN, rows_M, row0, col0, place, mods, params, IS_ADJUSTED, True)
        p_MN, m_M, l_M, alpha_M = softmax_step(s_MN, m_M, l_M, head.scale, IS_ADJUSTED, IS_EXACT)
        v_NE = load_keys(values, io.v, params.descales.v, params, col0, E, BLOCK_E, True)
        # O += P V
        acc_ME = plus_product(
            acc_ME * alpha_M[:, None],
            p_MN.to(q_MD.dtype),
            v_NE.to(q_MD.dtype),
            params.tile.PRECISION,
            IS_EXACT,
        )
    acc_ME *= (1.0 / tl.where(l_M == 0.0, 1.0, l_M))[:, None]
    lse_M, rest_M = log_sum_exp(m_M, l_M, not IS_ADJUSTED)
    return lse_M, rest_M, acc_ME


@triton.jit
def attention_in_parts(
    io: ForwardIO, params: PortableParams, PART_TILES: tl.constexpr, IS_SPLIT: tl.constexpr
):
    """Stores out (.., M, H, E) and lse (B, H, M); or, if IS_SPLIT, those of the part that is this
    program's, in float32, with a leading part."""
    M: tl.constexpr = params.tile.BLOCK_M
    D: tl.constexpr = main_columns(params.tile.HEAD_DIM, params.tile.BLOCK_D, params.tile.BLOCK_R)
    heads = params.shape.batch * params.shape.heads_q
    block, bh = head_of(tl.program_id(0), params.order, heads, params.mask.HAS_RIGHT)
    place = place_of_queries(
        bh, params.seqs, params.shape, params.mask, params.mods.bias.ptr is not None
    )
    row0 = block * M
    if not IS_SPLIT:
        clear_rows_outside(io, params)
    if row0 >= place.seq.stored_q:
        return
    runs = runs_of(key_tiles(row0, place, params.mask, params.tile))
    q = row_base(io.q, place.b, place.h, place.seq.token_q)
    stride_n, len_q = io.q.stride_n, place.seq.len_q
    q_MD = load_rows(q, stride_n, row0, len_q, D, M, params.tile.BLOCK_D, True)
    q_MR = q_MD
    if params.tile.BLOCK_R > 0:
        REST: tl.constexpr = params.tile.HEAD_DIM - D
        q_MR = load_rows(q + D, stride_n, row0, len_q, REST, M, params.tile.BLOCK_R, True)
    keys = keys_at_place(io.k, params.descales.k, place, params)
    values = keys_at_place(io.v, params.descales.v, place, params)
    scale, factor = with_descales(params.mods.scale, 1.0, place, params.descales)
    head = head_mods(scale, place.b, place.h, params)
    if IS_SPLIT:
        part = tl.program_id(1)
        lse_M, rest_M, acc_ME = part_of_keys(
            part, runs, q_MD, q_MR, keys, values, row0, place, head, io, params, PART_TILES
        )
        rows_M = row0 + tl.arange(0, M)
        store_finished(acc_ME, lse_M, rest_M, part, rows_M, row0, place, io, params)
    else:
        merged = none_merged(place, params)
        first, end = parts_of(runs, PART_TILES)
        for part in range(first, end):
            lse_M, rest_M, acc_ME = part_of_keys(
                part, runs, q_MD, q_MR, keys, values, row0, place, head, io, params, PART_TILES
            )
            merged = with_part(merged, lse_M, rest_M, acc_ME)
        store_merged(merged, factor, row0, place, io, params)


@triton.jit
def merge_parts(
    io: MergePartsIO, params: PortableParams, PART_KEYS: tl.constexpr, LAST_FIRST: tl.constexpr
):
    """Stores out (.., M, H, E) and lse (B, H, M) of the parts that `attention_in_parts`, or the
    Hopper forward, stored. LAST_FIRST: parts are merged from the last to the first, in the order in
    which the Hopper forward visits keys."""
    M: tl.constexpr = params.tile.BLOCK_M
    E: tl.constexpr = params.tile.HEAD_DIM_V
    heads = params.shape.batch * params.shape.heads_q
    block, bh = head_of(tl.program_id(0), params.order, heads, params.mask.HAS_RIGHT)
    place = place_of_queries(
        bh, params.seqs, params.shape, params.mask, params.mods.bias.ptr is not None
    )
    row0 = block * M
    clear_rows_outside(io, params)
    if row0 >= place.seq.stored_q:
        return
    rows_M = row0 + tl.arange(0, M)
    exists_M = rows_M < place.seq.stored_q
    merged = none_merged(place, params)
    parts = tl.minimum(tl.cdiv(place.seq.len_k, PART_KEYS), params.order.splits)
    for merged_before in range(0, parts):
        part = merged_before
        if LAST_FIRST:
            part = parts - 1 - merged_before
        out = io.partial_out.ptr + (
            part * io.partial_out.stride_s
            + place.b * io.partial_out.stride_b
            + place.h * io.partial_out.stride_h
            + place.seq.token_q * io.partial_out.stride_n
        )
        part_ME = load_rows(
            out,
            io.partial_out.stride_n,
            row0,
            place.seq.stored_q,
            E,
            M,
            params.tile.BLOCK_E,
            True,
        )
        at_M = (
            part * io.partial_lse.stride_s
            + place.b * io.partial_lse.stride_b
            + place.h * io.partial_lse.stride_h
            + place.seq.token_q
            + wide(rows_M)
        )
        lse_M = tl.load(io.partial_lse.ptr + at_M, mask=exists_M, other=float("-inf"))
        # Where rows saw nothing, some kernels store no rest.
        rest_M = tl.load(io.partial_rest + at_M, mask=exists_M, other=0.0)
        rest_M = tl.where(lse_M == float("-inf"), 0.0, rest_M)
        merged = with_part(merged, lse_M, rest_M, part_ME)
    _scale, factor = with_descales(1.0, 1.0, place, params.descales)
    store_merged(merged, factor, row0, place, io, params)


@triton.jit
def clear_rows_outside(io, params):
    """Clears this program's share of the rows that no packed sequence covers."""
    if params.seqs.cu_q is not None:
        clear_gaps(
            io.out,
            io.lse,
            0,
            params.seqs.cu_q,
            params.seqs.seqlen_q,
            params.shape.batch,
            params.shape.heads_q,
            tl.program_id(0),
            tl.num_programs(0),
            params.tile.HEAD_DIM_V,
            params.tile.BLOCK_E,
        )
