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

from heedful.kernels.args.decode import DecodeParams
from heedful.kernels.args.shared import ForwardIO
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
    has_own_scales,
    holds_rows,
    is_float16,
    key_rows,
    load_rest,
    load_words,
    operand_type,
    rest_words,
    slice_scales,
    stored_type,
    unit_of,
    value_of_words,
)
from heedful.kernels.portable.decode.queries import head_of, load_query_parts
from heedful.kernels.portable.decode.results import columns_of_rows, finish_segment, store_empty
from heedful.kernels.split_kv.walk import Share, line_of, segment_at, share_of, with_span
from heedful.kernels.split_kv.work import block_of, sequence_length, tile_at, visit_of


@triton.constexpr_function
def keys_lead(block_m):
    """Whether products have keys as their rows and query rows as their columns. A matrix unit takes
    at least 16 rows but only 8 columns, so few query rows waste less as columns. Outputs then have
    their columns first."""
    return block_m < 16


@triton.constexpr_function
def is_by_slice(kv_group, slices, dim):
    """Whether each slice of a row has one scale, which is then applied to its product."""
    return kv_group > 0 and kv_group * slices == dim


@triton.jit
def scores_of(q_MW, k_NW, s_MN, KEYS_LEAD: tl.constexpr):
    """s + q k^T."""
    if KEYS_LEAD:
        return tl.trans(tl.dot(k_NW, tl.trans(q_MW), tl.trans(s_MN)))
    else:
        return tl.dot(q_MW, tl.trans(k_NW), s_MN)


@triton.jit
def raw_scores(q, shared, sums, io: ForwardIO, keys, params):
    """q k^T of a tile of keys. shared: words of the tile that are values too, slice by slice, or
    None. sums: the sum of each slice of the queries, which shifts multiply; empty without shifts.
    """
    D: tl.constexpr = params.tile.HEAD_DIM
    BLOCK_D: tl.constexpr = params.tile.BLOCK_D
    VALUES: tl.constexpr = params.tile.VALUES
    CONVERSION: tl.constexpr = params.tile.CONVERSION
    KV_GROUP: tl.constexpr = params.descales.KV_GROUP
    OWNS: tl.constexpr = has_own_scales(params.tile.V_IN_K, KV_GROUP)
    BY_SLICE: tl.constexpr = OWNS or is_by_slice(KV_GROUP, params.tile.SLICES_D, D)
    STORED: tl.constexpr = stored_type(io.k.ptr.dtype.element_ty, OWNS)
    DTYPE: tl.constexpr = q[0].dtype
    UNIT: tl.constexpr = unit_of(VALUES, STORED, DTYPE, CONVERSION)
    KEYS_LEAD: tl.constexpr = keys_lead(params.tile.BLOCK_M)
    s_MN = tl.zeros([params.tile.BLOCK_M, params.tile.BLOCK_N], tl.float32)
    for s in tl.static_range(params.tile.SLICES_D):
        if shared is not None:
            words = shared[s]
        else:
            words = load_words(io.k, keys, s * BLOCK_D, D, BLOCK_D, VALUES)
        part_MN = tl.zeros([params.tile.BLOCK_M, params.tile.BLOCK_N], tl.float32)
        for i in tl.static_range(VALUES):
            k_NW = value_of_words(words, VALUES, STORED, DTYPE, CONVERSION, i)
            if KV_GROUP > 0 and not BY_SLICE:
                k_NW = dequantized(k_NW, params.descales.k, keys, i, D, UNIT, params)
            part_MN = scores_of(q[s * VALUES + i], k_NW, part_MN, KEYS_LEAD)
        if BY_SLICE:
            scale_N = slice_scales(io.k, params.descales.k, keys, s, params.tile.HEAD_DIM_V)
            part_MN *= scale_N[None, :]
            if params.descales.k.shift is not None:
                shift_N = group_values(params.descales.k.shift, params.descales.k, keys, s)
                part_MN += sums[s][:, None] * shift_N[None, :]
            s_MN += part_MN
        else:
            s_MN = part_MN
    E: tl.constexpr = params.tile.HEAD_DIM_V
    REST: tl.constexpr = rest_words(params.tile.V_IN_K, D, E, 1 if OWNS else VALUES)
    if REST > 0 and OWNS:
        k_NW = load_rest(io.k, keys, E + 4 * params.tile.SLICES_D, REST, DTYPE)
        s_MN = scores_of(q[params.tile.SLICES_D * VALUES], k_NW, s_MN, KEYS_LEAD)
    elif REST > 0:
        words = load_words(io.k, keys, BLOCK_D, D, REST, VALUES)
        for i in tl.static_range(VALUES):
            k_NW = value_of_words(words, VALUES, STORED, DTYPE, CONVERSION, i)
            s_MN = scores_of(q[VALUES + i], k_NW, s_MN, KEYS_LEAD)
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
    keys,
    params,
    DTYPE: tl.constexpr,
):
    """(acc * alpha + p v, shifted * alpha + p shift) with a tile of values.

    shared: words of the tile that are keys too, slice by slice, or None. scale_N: scales of rows,
    or None if they are not loaded yet. shifted: for each slice, p times the shifts [M, N], to be
    summed over N at the end.
    """
    E: tl.constexpr = params.tile.HEAD_DIM_V
    BLOCK_E: tl.constexpr = params.tile.BLOCK_E
    VALUES: tl.constexpr = params.tile.VALUES
    CONVERSION: tl.constexpr = params.tile.CONVERSION
    KV_GROUP: tl.constexpr = params.descales.KV_GROUP
    BY_SLICE: tl.constexpr = is_by_slice(KV_GROUP, params.tile.SLICES_E, E)
    OWNS: tl.constexpr = has_own_scales(params.tile.V_IN_K, KV_GROUP)
    STORED: tl.constexpr = stored_type(io.v.ptr.dtype.element_ty, OWNS)
    UNIT: tl.constexpr = unit_of(VALUES, STORED, DTYPE, CONVERSION)
    KEYS_LEAD: tl.constexpr = keys_lead(params.tile.BLOCK_M)
    # Words are transposed at the product if they have scales of their own, or if they are keys too.
    ACROSS: tl.constexpr = KEYS_LEAD and shared is None and (KV_GROUP == 0 or BY_SLICE)
    more = ()
    more_shifted = ()
    for s in tl.static_range(params.tile.SLICES_E):
        if shared is not None:
            words = shared[s]
        else:
            words = load_words(io.v, keys, s * BLOCK_E, E, BLOCK_E, VALUES, ACROSS)
        scaled_MN = p_MN
        if BY_SLICE:
            slice_N = scale_N
            if scale_N is None:
                slice_N = slice_scales(io.k, params.descales.v, keys, s, E)
            scaled_MN = p_MN * slice_N[None, :]
            if params.descales.v.shift is not None:
                shift_N = group_values(params.descales.v.shift, params.descales.v, keys, s)
                total_MN = shifted[s] * alpha_M[:, None] + p_MN * shift_N[None, :]
                more_shifted = more_shifted + (total_MN,)
        for i in tl.static_range(VALUES):
            v_NW = value_of_words(words, VALUES, STORED, DTYPE, CONVERSION, i)
            if KV_GROUP > 0 and not BY_SLICE:
                v_NW = dequantized(v_NW, params.descales.v, keys, i, E, UNIT, params)
            old = acc[s * VALUES + i]
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
def tree_visit(span, place, params):
    """The first visit of a key tile that the tree mask may cover. The mask covers the last keys."""
    block = tl.maximum(place.seq.len_k - place.seq.len_q, 0) // params.tile.BLOCK_N
    return visit_of(block, span)


@triton.jit
def outputs_of(acc, shifted, UNIT: tl.constexpr, SHIFTS: tl.constexpr, params):
    """The outputs with rows first and, if SHIFTS, with what the shifts of values add."""
    VALUES: tl.constexpr = params.tile.VALUES
    if keys_lead(params.tile.BLOCK_M):
        rows = ()
        for n in tl.static_range(params.tile.SLICES_E * VALUES):
            rows = rows + (tl.trans(acc[n]),)
        acc = rows
    if SHIFTS:
        moved = ()
        for s in tl.static_range(params.tile.SLICES_E):
            for i in tl.static_range(VALUES):
                total_M = tl.sum(shifted[s], 1) / UNIT
                moved = moved + (acc[s * VALUES + i] + total_M[:, None],)
        acc = moved
    return acc


@triton.jit
def stream_keys(q, segment, pos_M, place, head, io: ForwardIO, params, DTYPE: tl.constexpr):
    """(maximum, sum, outputs) over the visits of a segment; the maximum is the reference of
    `softmax_step`."""
    span = segment.span
    start, stop = tl.minimum(segment.start, span.visits), tl.minimum(segment.stop, span.visits)
    M: tl.constexpr = params.tile.BLOCK_M
    N: tl.constexpr = params.tile.BLOCK_N
    VALUES: tl.constexpr = params.tile.VALUES
    SLICES_E: tl.constexpr = params.tile.SLICES_E
    BLOCK_E: tl.constexpr = params.tile.BLOCK_E
    CONVERSION: tl.constexpr = params.tile.CONVERSION
    KV_GROUP: tl.constexpr = params.descales.KV_GROUP
    IS_ADJUSTED: tl.constexpr = params.mods.IS_ADJUSTED
    OWNS: tl.constexpr = has_own_scales(params.tile.V_IN_K, KV_GROUP)
    STORED: tl.constexpr = stored_type(io.k.ptr.dtype.element_ty, OWNS)
    STORED_V: tl.constexpr = stored_type(io.v.ptr.dtype.element_ty, OWNS)
    UNIT: tl.constexpr = unit_of(VALUES, STORED, DTYPE, CONVERSION)
    BY_SLICE: tl.constexpr = is_by_slice(KV_GROUP, SLICES_E, params.tile.HEAD_DIM_V)
    # The scale of each row enters the reference, so that products with it are in float16's range.
    FITS_VALUES: tl.constexpr = (
        is_float16(VALUES, STORED_V, CONVERSION) and BY_SLICE and SLICES_E == 1
    )
    HAS_SCALES: tl.constexpr = KV_GROUP > 0 and not FITS_VALUES
    OF_VALUES: tl.constexpr = operand_type(VALUES, STORED_V, DTYPE, CONVERSION, HAS_SCALES)
    HOLDS: tl.constexpr = holds_rows(M, VALUES, STORED)
    SHIFTS_V: tl.constexpr = params.descales.v.shift is not None and BY_SLICE
    m_M = tl.full([M], float("-inf"), tl.float32)
    # With few rows, warps divide the keys of a tile: sums over warps are taken once, at the end.
    SUMS_LATE: tl.constexpr = M < 64
    l_M = tl.zeros([M], tl.float32)
    l_MN = tl.zeros([M, N if SUMS_LATE else 1], tl.float32)
    acc = ()
    sums = ()
    shifted = ()
    KEYS_LEAD: tl.constexpr = keys_lead(M)
    for _ in tl.static_range(SLICES_E * VALUES):
        if KEYS_LEAD:
            acc = acc + (tl.zeros([BLOCK_E, M], tl.float32),)
        else:
            acc = acc + (tl.zeros([M, BLOCK_E], tl.float32),)
    if params.descales.k.shift is not None:
        for s in tl.static_range(params.tile.SLICES_D):
            total_M = tl.zeros([M], tl.float32)
            for i in tl.static_range(VALUES):
                total_M += tl.sum(q[s * VALUES + i].to(tl.float32), 1)
            sums = sums + (total_M / UNIT,)
    if SHIFTS_V:
        for _ in tl.static_range(SLICES_E):
            shifted = shifted + (tl.zeros([M, N], tl.float32),)
    # Key tiles that the tree covers come last, so that only they look into it.
    first_tree = stop
    if params.mask.tree.ptr is not None:
        first_tree = tree_visit(span, place, params)
    for in_tree in tl.static_range(1 if params.mask.tree.ptr is None else 2):
        visit_from = start
        visit_to = tl.minimum(stop, first_tree)
        if in_tree == 1:
            visit_from = tl.maximum(start, first_tree)
            visit_to = stop
        for visit in range(visit_from, visit_to):
            block = block_of(visit, span, params.mask)
            cols_N = block * N + tl.arange(0, N)
            if params.FETCH_AHEAD > 0:
                fetch_tile(io, block + params.FETCH_AHEAD, place, params)
            keys = key_rows(block, cols_N < place.seq.len_k, place, params, HOLDS)
            shared = None
            if params.tile.V_IN_K:
                # Values are the first columns of a row of keys.
                E: tl.constexpr = params.tile.HEAD_DIM_V
                BLOCK_D: tl.constexpr = params.tile.BLOCK_D
                shared = ()
                for s in tl.static_range(params.tile.SLICES_D):
                    shared = shared + (load_words(io.k, keys, s * BLOCK_D, E, BLOCK_D, VALUES),)
            # S = Q K^T
            s_MN = raw_scores(q, shared, sums, io, keys, params)
            distance_MN = cols_N[None, :] - (pos_M + place.seq.off)[:, None]
            if IS_ADJUSTED:
                s_MN, _gate = adjust_scores(s_MN, distance_MN, 0.0, head, params.mods)
            ok_MN = in_window(cols_N[None, :], distance_MN, place, params.mask)
            if in_tree == 1:
                rows = pos_M[:, None]
                ok_MN &= tree_visible(rows, cols_N[None, :], place, head, params.mask)
            s_MN = tl.where(ok_MN, s_MN, float("-inf"))
            scale_N = None
            size_N = None
            if FITS_VALUES:
                scale_N = group_values(params.descales.v.ptr, params.descales.v, keys, 0)
                size_N = log2_size(scale_N)
            p_MN, m_M, alpha_M = softmax_step(s_MN, m_M, head.scale, size_N, IS_ADJUSTED)
            if SUMS_LATE:
                l_MN = l_MN * alpha_M[:, None] + p_MN
            else:
                l_M = l_M * alpha_M + tl.sum(p_MN, 1)
            # O += P V
            acc, shifted = add_values(
                acc, shared, shifted, p_MN, alpha_M, scale_N, io, keys, params, OF_VALUES
            )
    return m_M, l_M + tl.sum(l_MN, 1), outputs_of(acc, shifted, UNIT, SHIFTS_V, params)


@triton.jit
def decode_segment(segment, group, io: ForwardIO, params):
    """Computes the rows of one segment, after its new keys have gone into the cache."""
    IN: tl.constexpr = io.q.ptr.dtype.element_ty
    DTYPE: tl.constexpr = tl.bfloat16 if IN.is_fp8() else IN
    VALUES: tl.constexpr = params.tile.VALUES
    CONVERSION: tl.constexpr = params.tile.CONVERSION
    KV_GROUP: tl.constexpr = params.descales.KV_GROUP
    OWNS: tl.constexpr = has_own_scales(params.tile.V_IN_K, KV_GROUP)
    STORED: tl.constexpr = stored_type(io.k.ptr.dtype.element_ty, OWNS)
    UNIT: tl.constexpr = unit_of(VALUES, STORED, DTYPE, CONVERSION)
    # Scales of whole slices are applied after the products.
    HAS_SCALES: tl.constexpr = KV_GROUP > 0 and not is_by_slice(
        KV_GROUP, params.tile.SLICES_D, params.tile.HEAD_DIM
    )
    KEYS: tl.constexpr = operand_type(VALUES, STORED, DTYPE, CONVERSION, HAS_SCALES)
    # The place stands for all query heads of the KV head; `h` is not used.
    place = Place(wide(segment.b), wide(0), wide(segment.g), segment.seq)
    rows_M = segment.row0 + tl.arange(0, params.tile.BLOCK_M)
    pos_M = rows_M // group
    head_M = segment.g * group + rows_M % group
    segment = with_span(segment, params)
    if params.append.io.cache_seqlens is not None:
        append_segment(segment, place, params)
    q, times = load_query_parts(io.q, pos_M, head_M, place, params, DTYPE, KEYS)
    head, factor = head_of(times * UNIT, head_M, place, params)
    m_M, l_M, acc = stream_keys(q, segment, pos_M, place, head, io, params, DTYPE)
    finish_segment(m_M, l_M, acc, factor * UNIT, segment, group, place, io, params)


@triton.jit
def decode(io: ForwardIO, params: DecodeParams):
    """Stores out (.., M, H, E) and lse (B, H, M), after new rows have gone into the cache."""
    if params.work.short_q is not None:
        # The kernel of the long sequences starts on the SMs of programs that have ended.
        cuda.gdc_launch_dependents()
    pid, programs = tl.program_id(0), tl.num_programs(0)
    # If another kernel handles the long sequences, that kernel clears uncovered rows.
    CLEARS: tl.constexpr = params.seqs.cu_q is not None and params.work.short_q is None
    if CLEARS:
        clear_gaps(
            io.out,
            io.lse,
            0,
            params.seqs.cu_q,
            params.seqs.seqlen_q,
            params.shape.batch,
            params.shape.heads_q,
            pid,
            programs,
            params.tile.HEAD_DIM_V,
            columns_of_rows(params.tile.BLOCK_E, params.tile.VALUES, params.tile.SLICES_E),
        )
    group = params.shape.heads_q // params.shape.heads_k
    line = line_of(params)
    number, shares, heads = pid // line.lines, programs // line.lines, params.shape.heads_k
    first_B, looks_B = tl.arange(0, 1), tl.arange(0, params.work.LOOKS)
    share, empty = share_of(number, shares, first_B, looks_B, params)
    if params.work.SKIPS_EMPTY:  # noqa: SIM102  (known when compiling, and `and` is not)
        if empty > 0:
            store_empty(line.g, pid // heads, programs // heads, io, params)
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
                decode_segment(segment, group, io, params)
        else:
            share = Share(share.x, share.end, share.each, share.b + 1, share.base + length)
