"""The portable decode: attention of few queries over many keys.

The kernel is `decode`, launched by `launch/bind/decode.py`. A program reads the keys of a KV head
once, for all query heads and positions that share it. Programs share the keys of the call evenly:
split_kv/work.py says how. Each program streams its segments' keys through an online softmax.
queries.py loads the queries, append.py appends new keys, cache.py loads keys and values, and
results.py stores and merges results.

Shapes: B batch, H query heads, G KV heads, M rows (position, head of the KV head), N key rows, D qk
dim, E v dim, W words of 16 bits.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from heedful.kernels.args.decode import DecodeAppend, DecodeTile, DecodeWork
from heedful.kernels.args.shared import (
    Descales,
    ForwardIO,
    KVLayout,
    Mask,
    ScoreMods,
    Sequences,
    Shape,
)
from heedful.kernels.common.constants import LN2, LOG2E
from heedful.kernels.common.gaps import clear_gaps
from heedful.kernels.common.rows import wide
from heedful.kernels.common.scores import adjust_scores, finite_or_zero, in_window, tree_visible
from heedful.kernels.common.sequences import Place, seqlens_of
from heedful.kernels.portable.decode.append import append_segment
from heedful.kernels.portable.decode.cache import (
    dequantized,
    fetch_tile,
    group_values,
    holds_rows,
    is_float16,
    key_rows,
    load_words,
    operand_type,
    rest_words,
    unit_of,
    value_of_words,
)
from heedful.kernels.portable.decode.queries import head_of, load_query_parts
from heedful.kernels.portable.decode.results import columns_of_rows, finish_segment, store_empty
from heedful.kernels.split_kv.walk import Share, line_of, segment_at, share_of, with_span
from heedful.kernels.split_kv.work import (
    SplitKVParams,
    block_of,
    sequence_length,
    tile_at,
    visit_of,
)


@triton.constexpr_function
def keys_lead(block_m):
    """Whether products have keys as their rows and query rows as their columns. A matrix unit takes
    at least 16 rows but only 8 columns, so few query rows waste less as columns. Outputs then have
    their columns first."""
    return block_m < 16


@triton.jit
def scores_of(q_MW, k_NW, s_MN, KEYS_LEAD: tl.constexpr):
    """s + q k^T."""
    if KEYS_LEAD:
        return tl.trans(tl.dot(k_NW, tl.trans(q_MW), tl.trans(s_MN)))
    else:
        return tl.dot(q_MW, tl.trans(k_NW), s_MN)


@triton.jit
def raw_scores(
    q,
    shared,
    sums,
    io: ForwardIO,
    descales: Descales,
    keys,
    tile,
):
    """q k^T of a tile of keys. shared: words of the tile that are values too, or None. sums: the
    sum of each slice of the queries, which shifts multiply; empty without shifts."""
    BY_SLICE: tl.constexpr = descales.KV_GROUP > 0 and (
        descales.KV_GROUP * tile.SLICES_D == tile.HEAD_DIM
    )
    STORED: tl.constexpr = io.k.ptr.dtype.element_ty
    DTYPE: tl.constexpr = q[0].dtype
    UNIT: tl.constexpr = unit_of(tile.VALUES, STORED, DTYPE, tile.CONVERSION)
    KEYS_LEAD: tl.constexpr = keys_lead(tile.BLOCK_M)
    s_MN = tl.zeros([tile.BLOCK_M, tile.BLOCK_N], tl.float32)
    for s in tl.static_range(tile.SLICES_D):
        words = shared
        if shared is None:
            words = load_words(
                io.k,
                keys,
                s * tile.BLOCK_D,
                tile.HEAD_DIM,
                tile.BLOCK_D,
                tile.VALUES,
            )
        part_MN = tl.zeros([tile.BLOCK_M, tile.BLOCK_N], tl.float32)
        for i in tl.static_range(tile.VALUES):
            k_NW = value_of_words(words, tile.VALUES, STORED, DTYPE, tile.CONVERSION, i)
            if descales.KV_GROUP > 0 and not BY_SLICE:
                k_NW = dequantized(
                    k_NW,
                    descales.k,
                    keys,
                    i,
                    descales.KV_GROUP,
                    tile.HEAD_DIM,
                    tile.VALUES,
                    UNIT,
                )
            part_MN = scores_of(q[s * tile.VALUES + i], k_NW, part_MN, KEYS_LEAD)
        if BY_SLICE:
            scale_N = group_values(descales.k.ptr, descales.k, keys, s)
            part_MN *= scale_N[None, :]
            if descales.k.shift is not None:
                shift_N = group_values(descales.k.shift, descales.k, keys, s)
                part_MN += sums[s][:, None] * shift_N[None, :]
            s_MN += part_MN
        else:
            s_MN = part_MN
    REST: tl.constexpr = rest_words(tile.V_IN_K, tile.HEAD_DIM, tile.HEAD_DIM_V, tile.VALUES)
    if REST > 0:
        words = load_words(io.k, keys, tile.BLOCK_D, tile.HEAD_DIM, REST, tile.VALUES)
        for i in tl.static_range(tile.VALUES):
            k_NW = value_of_words(words, tile.VALUES, STORED, DTYPE, tile.CONVERSION, i)
            s_MN = scores_of(q[tile.VALUES + i], k_NW, s_MN, KEYS_LEAD)
    return s_MN


@triton.jit
def add_values(
    acc,
    shared,
    shifted,
    p_MN,
    alpha_M,
    scale_N,
    io: ForwardIO,
    descales: Descales,
    keys,
    tile,
    DTYPE: tl.constexpr,
):
    """(acc * alpha + p v, shifted * alpha + p shift) with a tile of values.

    shared: words of the tile that are keys too, or None. scale_N: scales of rows, or None if they
    are not loaded yet. shifted: for each slice, p times the shifts [M, N], to be summed over N at
    the end.
    """
    BY_SLICE: tl.constexpr = descales.KV_GROUP > 0 and (
        descales.KV_GROUP * tile.SLICES_E == tile.HEAD_DIM_V
    )
    STORED: tl.constexpr = io.v.ptr.dtype.element_ty
    UNIT: tl.constexpr = unit_of(tile.VALUES, STORED, DTYPE, tile.CONVERSION)
    KEYS_LEAD: tl.constexpr = keys_lead(tile.BLOCK_M)
    # Words are transposed at the product if they have scales of their own, or if they are keys too.
    ACROSS: tl.constexpr = KEYS_LEAD and shared is None and (descales.KV_GROUP == 0 or BY_SLICE)
    more = ()
    more_shifted = ()
    for s in tl.static_range(tile.SLICES_E):
        words = shared
        if shared is None:
            words = load_words(
                io.v,
                keys,
                s * tile.BLOCK_E,
                tile.HEAD_DIM_V,
                tile.BLOCK_E,
                tile.VALUES,
                ACROSS,
            )
        scaled_MN = p_MN
        if BY_SLICE:
            own_N = scale_N
            if scale_N is None:
                own_N = group_values(descales.v.ptr, descales.v, keys, s)
            scaled_MN = p_MN * own_N[None, :]
            if descales.v.shift is not None:
                shift_N = group_values(descales.v.shift, descales.v, keys, s)
                total_MN = shifted[s] * alpha_M[:, None] + p_MN * shift_N[None, :]
                more_shifted = more_shifted + (total_MN,)
        for i in tl.static_range(tile.VALUES):
            v_NW = value_of_words(words, tile.VALUES, STORED, DTYPE, tile.CONVERSION, i)
            if descales.KV_GROUP > 0 and not BY_SLICE:
                v_NW = dequantized(
                    v_NW,
                    descales.v,
                    keys,
                    i,
                    descales.KV_GROUP,
                    tile.HEAD_DIM_V,
                    tile.VALUES,
                    UNIT,
                )
            old = acc[s * tile.VALUES + i]
            if KEYS_LEAD:
                old *= alpha_M[None, :]
                if not ACROSS:
                    v_NW = tl.trans(v_NW)
                more = more + (tl.dot(v_NW, tl.trans(scaled_MN.to(DTYPE)), old),)
            else:
                old *= alpha_M[:, None]
                more = more + (tl.dot(scaled_MN.to(DTYPE), v_NW, old),)
    return more, more_shifted


@triton.jit
def softmax_step(s_MN, m_M, scale, size_N, IS_ADJUSTED: tl.constexpr):
    """(probabilities, new reference, factor for earlier sums).

    If IS_ADJUSTED, scores and reference are in natural units, and the reference is subtracted
    before anything is scaled. Else scores are raw and the reference is in base 2. scale: a number,
    or one for each row [M, 1]. size_N: base 2 logarithms of factors that probabilities will be
    multiplied by, or None. The reference is the maximum of scores plus size_N, so that these
    products are at most about 1.
    """
    if IS_ADJUSTED:
        if size_N is not None:
            top_M = tl.max(s_MN + (size_N * LN2)[None, :], 1)
        else:
            top_M = tl.max(s_MN, 1)
        new_M = tl.maximum(m_M, top_M)
        base_M = finite_or_zero(new_M)
        p_MN = tl.exp2((s_MN - base_M[:, None]) * LOG2E)
        return p_MN, new_M, tl.exp2((m_M - base_M) * LOG2E)
    else:
        return raw_step(s_MN, m_M, scale * LOG2E, size_N)


@triton.jit
def raw_step(s_MN, m_M, unit, size_N):
    """`softmax_step` of raw scores, which `unit` converts to base 2."""
    if size_N is not None:
        top_M = tl.max(s_MN * unit + size_N[None, :], 1)
    elif unit.type.is_block():
        top_M = tl.reshape(tl.max(s_MN, 1)[:, None] * unit, m_M.shape)
    else:
        top_M = tl.max(s_MN, 1) * unit
    new_M = tl.maximum(m_M, top_M)
    base_M = finite_or_zero(new_M)
    return tl.exp2(tl.fma(s_MN, unit, -base_M[:, None])), new_M, tl.exp2(m_M - base_M)


@triton.jit
def log2_size(scale_N):
    """About the base 2 logarithm of the magnitude of scales, too low by at most 0.09: exponent and
    mantissa of a float32, read as one integer. It is at least -100, so that probabilities over a
    scale, and their sums, are finite."""
    bits_N = scale_N.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.maximum(bits_N.to(tl.float32) * (1.0 / (1 << 23)) - 127.0, -100.0)


@triton.jit
def tree_visit(span, place, tile: DecodeTile):
    """The first visit of a key tile that the tree mask may cover. The mask covers the last keys."""
    return visit_of(tl.maximum(place.seq.len_k - place.seq.len_q, 0) // tile.BLOCK_N, span)


@triton.jit
def outputs_of(acc, shifted, UNIT: tl.constexpr, SHIFTS: tl.constexpr, tile: DecodeTile):
    """The outputs with rows first and, if SHIFTS, with what the shifts of values add."""
    if keys_lead(tile.BLOCK_M):
        rows = ()
        for n in tl.static_range(tile.SLICES_E * tile.VALUES):
            rows = rows + (tl.trans(acc[n]),)
        acc = rows
    if SHIFTS:
        moved = ()
        for s in tl.static_range(tile.SLICES_E):
            for i in tl.static_range(tile.VALUES):
                total_M = tl.sum(shifted[s], 1) / UNIT
                moved = moved + (acc[s * tile.VALUES + i] + total_M[:, None],)
        acc = moved
    return acc


@triton.jit
def stream_keys(
    q,
    segment,
    pos_M,
    place,
    head,
    io: ForwardIO,
    mask: Mask,
    mods: ScoreMods,
    cache: KVLayout,
    descales: Descales,
    heads_k,
    tile: DecodeTile,
    DTYPE: tl.constexpr,
    FETCH_AHEAD: tl.constexpr,
):
    """(maximum, sum, outputs) over the visits of a segment; the maximum is the reference of
    `softmax_step`."""
    span = segment.span
    start, stop = tl.minimum(segment.start, span.visits), tl.minimum(segment.stop, span.visits)
    STORED: tl.constexpr = io.k.ptr.dtype.element_ty
    UNIT: tl.constexpr = unit_of(tile.VALUES, STORED, DTYPE, tile.CONVERSION)
    # The scale of each row enters the reference, so that products with it are in float16's range.
    FITS_VALUES: tl.constexpr = (
        descales.KV_GROUP > 0
        and is_float16(tile.VALUES, io.v.ptr.dtype.element_ty, tile.CONVERSION)
        and descales.KV_GROUP == tile.HEAD_DIM_V
        and tile.SLICES_E == 1
    )
    HAS_SCALES: tl.constexpr = descales.KV_GROUP > 0 and not FITS_VALUES
    OF_VALUES: tl.constexpr = operand_type(
        tile.VALUES, io.v.ptr.dtype.element_ty, DTYPE, tile.CONVERSION, HAS_SCALES
    )
    HOLDS: tl.constexpr = holds_rows(tile.BLOCK_M, tile.VALUES, STORED)
    SHIFTS_K: tl.constexpr = descales.k.shift is not None
    SHIFTS_V: tl.constexpr = descales.v.shift is not None and (
        descales.KV_GROUP * tile.SLICES_E == tile.HEAD_DIM_V
    )
    m_M = tl.full([tile.BLOCK_M], float("-inf"), tl.float32)
    # With few rows, warps divide the keys of a tile: sums over warps are taken once, at the end.
    SUMS_LATE: tl.constexpr = tile.BLOCK_M < 64
    l_M = tl.zeros([tile.BLOCK_M], tl.float32)
    l_MN = tl.zeros([tile.BLOCK_M, tile.BLOCK_N if SUMS_LATE else 1], tl.float32)
    acc = ()
    sums = ()
    shifted = ()
    KEYS_LEAD: tl.constexpr = keys_lead(tile.BLOCK_M)
    for _ in tl.static_range(tile.SLICES_E * tile.VALUES):
        if KEYS_LEAD:
            acc = acc + (tl.zeros([tile.BLOCK_E, tile.BLOCK_M], tl.float32),)
        else:
            acc = acc + (tl.zeros([tile.BLOCK_M, tile.BLOCK_E], tl.float32),)
    if SHIFTS_K:
        for s in tl.static_range(tile.SLICES_D):
            total_M = tl.zeros([tile.BLOCK_M], tl.float32)
            for i in tl.static_range(tile.VALUES):
                total_M += tl.sum(q[s * tile.VALUES + i].to(tl.float32), 1)
            sums = sums + (total_M / UNIT,)
    if SHIFTS_V:
        for _ in tl.static_range(tile.SLICES_E):
            shifted = shifted + (tl.zeros([tile.BLOCK_M, tile.BLOCK_N], tl.float32),)
    # Key tiles that the tree covers come last, so that only they look into it.
    first_tree = stop
    if mask.tree is not None:
        first_tree = tree_visit(span, place, tile)
    for in_tree in tl.static_range(1 if mask.tree is None else 2):
        visit_from = start
        visit_to = tl.minimum(stop, first_tree)
        if in_tree == 1:
            visit_from = tl.maximum(start, first_tree)
            visit_to = stop
        for visit in range(visit_from, visit_to):
            block = block_of(visit, span, mask)
            cols_N = block * tile.BLOCK_N + tl.arange(0, tile.BLOCK_N)
            exists_N = cols_N < place.seq.len_k
            if FETCH_AHEAD > 0:
                fetch_tile(io, block + FETCH_AHEAD, place, cache, heads_k, tile)
            keys = key_rows(block, exists_N, place, cache, HOLDS, tile.BLOCK_N)
            shared = None
            if tile.V_IN_K:
                # Values are the first columns of a row of keys.
                V: tl.constexpr = tile.HEAD_DIM_V
                shared = load_words(io.k, keys, 0, V, tile.BLOCK_D, tile.VALUES)
            # S = Q K^T
            s_MN = raw_scores(q, shared, sums, io, descales, keys, tile)
            distance_MN = cols_N[None, :] - (pos_M + place.seq.off)[:, None]
            if mods.IS_ADJUSTED:
                s_MN, _gate = adjust_scores(s_MN, distance_MN, 0.0, head, mods)
            ok_MN = in_window(cols_N[None, :], distance_MN, place, mask)
            if in_tree == 1:
                ok_MN &= tree_visible(pos_M[:, None], cols_N[None, :], place, head, mask)
            s_MN = tl.where(ok_MN, s_MN, float("-inf"))
            scale_N = None
            size_N = None
            if FITS_VALUES:
                scale_N = group_values(descales.v.ptr, descales.v, keys, 0)
                size_N = log2_size(scale_N)
            p_MN, m_M, alpha_M = softmax_step(s_MN, m_M, head.scale, size_N, mods.IS_ADJUSTED)
            if SUMS_LATE:
                l_MN = l_MN * alpha_M[:, None] + p_MN
            else:
                l_M = l_M * alpha_M + tl.sum(p_MN, 1)
            # O += P V
            acc, shifted = add_values(
                acc,
                shared,
                shifted,
                p_MN,
                alpha_M,
                scale_N,
                io,
                descales,
                keys,
                tile,
                OF_VALUES,
            )
    return m_M, l_M + tl.sum(l_MN, 1), outputs_of(acc, shifted, UNIT, SHIFTS_V, tile)


@triton.jit
def decode_segment(
    segment,
    group,
    io: ForwardIO,
    mods: ScoreMods,
    cache: KVLayout,
    descales: Descales,
    append: DecodeAppend,
    params,
    FETCH_AHEAD: tl.constexpr,
):
    """Computes the rows of one segment, after its new keys have gone into the cache."""
    IN: tl.constexpr = io.q.ptr.dtype.element_ty
    DTYPE: tl.constexpr = tl.bfloat16 if IN.is_fp8() else IN
    STORED: tl.constexpr = io.k.ptr.dtype.element_ty
    VALUES: tl.constexpr = params.tile.VALUES
    UNIT: tl.constexpr = unit_of(VALUES, STORED, DTYPE, params.tile.CONVERSION)
    # Scales of whole slices are applied after the products.
    HAS_SCALES: tl.constexpr = descales.KV_GROUP > 0 and (
        descales.KV_GROUP * params.tile.SLICES_D != params.tile.HEAD_DIM
    )
    KEYS: tl.constexpr = operand_type(VALUES, STORED, DTYPE, params.tile.CONVERSION, HAS_SCALES)
    # The place stands for all query heads of the KV head; `h` is not used.
    place = Place(wide(segment.b), wide(0), wide(segment.g), segment.seq)
    rows_M = segment.row0 + tl.arange(0, params.tile.BLOCK_M)
    pos_M = rows_M // group
    head_M = segment.g * group + rows_M % group
    segment = with_span(segment, params)
    if append.io.cache_seqlens is not None:
        append_segment(segment, place, cache, append, params)
    q, times = load_query_parts(io.q, pos_M, head_M, place, append, DTYPE, KEYS, params.tile)
    head, factor = head_of(times * UNIT, head_M, place, params.mask, mods, descales)
    m_M, l_M, acc = stream_keys(
        q,
        segment,
        pos_M,
        place,
        head,
        io,
        params.mask,
        mods,
        cache,
        descales,
        params.shape.heads_k,
        params.tile,
        DTYPE,
        FETCH_AHEAD,
    )
    finish_segment(
        m_M,
        l_M,
        acc,
        factor * UNIT,
        segment,
        group,
        place,
        io,
        mods.sink,
        params.work.merge,
        params.tile,
        mods.IS_ADJUSTED,
    )


@triton.jit
def decode_share(
    io: ForwardIO,
    mods: ScoreMods,
    cache: KVLayout,
    descales: Descales,
    append: DecodeAppend,
    params,
    FETCH_AHEAD: tl.constexpr,
):
    """Computes the rows of all segments of this program."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    group = params.shape.heads_q // params.shape.heads_k
    line = line_of(params)
    number, shares, heads = pid // line.lines, programs // line.lines, params.shape.heads_k
    first_B, looks_B = tl.arange(0, 1), tl.arange(0, params.work.LOOKS)
    share, empty = share_of(number, shares, first_B, looks_B, params)
    if params.work.SKIPS_EMPTY:  # noqa: SIM102  (known when compiling, and `and` is not)
        if empty > 0:
            store_empty(line.g, pid // heads, programs // heads, io, mods.sink, params)
    while share.x < share.end:
        seq = seqlens_of(share.b, params.seqs, params.mask)
        visits, length = sequence_length(seq, params)
        if share.x < share.base + length:
            row_tile, begin = tile_at(share.x, share.base, visits, params.work)
            if params.seqs.cu_q is None:
                row_tile = line.number // heads
            segment, x = segment_at(share, number, line, row_tile, begin, seq, visits, True, params)
            share = Share(x, share.end, share.each, share.b, share.base)
            if segment.start < segment.stop:
                decode_segment(
                    segment, group, io, mods, cache, descales, append, params, FETCH_AHEAD
                )
        else:
            share = Share(share.x, share.end, share.each, share.b + 1, share.base + length)


@triton.jit
def decode(
    io: ForwardIO,
    sequences: Sequences,
    shape: Shape,
    mask: Mask,
    mods: ScoreMods,
    cache: KVLayout,
    descales: Descales,
    work: DecodeWork,
    append: DecodeAppend,
    tile: DecodeTile,
    FETCH_AHEAD: tl.constexpr,
):
    """Stores out (.., M, H, E) and lse (B, H, M). append: new rows for the cache, or an absent
    group. FETCH_AHEAD: how many key tiles ahead rows are prefetched to the L2 cache; 0 for no
    prefetch."""
    if work.short_q is not None:
        # The kernel of the long sequences starts on the SMs of programs that have ended.
        cuda.gdc_launch_dependents()
    # If another kernel handles the long sequences, that kernel clears uncovered rows.
    CLEARS: tl.constexpr = sequences.cu_q is not None and work.short_q is None
    if CLEARS:
        clear_gaps(
            io.out,
            io.lse,
            0,
            sequences.cu_q,
            sequences.seqlen_q,
            shape.batch,
            shape.heads_q,
            tl.program_id(0),
            tl.num_programs(0),
            tile.HEAD_DIM_V,
            columns_of_rows(tile.BLOCK_E, tile.VALUES, tile.SLICES_E),
        )
    # A separate call: if a group is assigned to a name here, its constants become launch-time
    # numbers.
    decode_share(
        io,
        mods,
        cache,
        descales,
        append,
        SplitKVParams(sequences, shape, mask, work, tile),
        FETCH_AHEAD,
    )
