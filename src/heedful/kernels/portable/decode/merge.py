"""How the results of a piece leave: whole ones at once, partial ones to scratch, from where the
program that finishes a unit's last part merges them.

Shapes: M rows, P parts, W words.
"""

import triton
import triton.language as tl

from heedful.kernels.args.decode import DecodeMerge, DecodeTile
from heedful.kernels.args.shared import ForwardIO, Mask, Sequences, Shape
from heedful.kernels.common.constants import LN2, LOG2E
from heedful.kernels.common.log_sum import log_sum_exp
from heedful.kernels.common.rows import wide
from heedful.kernels.common.scores import finite_or_zero
from heedful.kernels.common.sequences import seqlens_of

# Rows that are merged at once, at most.
MERGE_ROWS = tl.constexpr(8)


@triton.jit
def store_whole(
    m_M,
    l_M,
    acc,
    factor,
    row0,
    group,
    place,
    io: ForwardIO,
    sink,
    ROWS: tl.constexpr,
    tile: DecodeTile,
    IS_NATURAL: tl.constexpr,
):
    """Writes out and lse of `ROWS` rows from `row0` on with the sink. IS_NATURAL: their maxima are
    in natural units, else in base 2. Rows that are stored but not used are 0 and -inf."""
    rows_M = row0 + tl.arange(0, ROWS)
    pos_M = rows_M // group
    head_M = place.g * group + rows_M % group
    stored_M = pos_M < place.seq.stored_q
    used_M = pos_M < place.seq.len_q
    old_M = tl.full([ROWS], 1.0, tl.float32)
    if sink is not None:
        logit_M = tl.load(sink + head_M)
        top_M = tl.maximum(m_M, logit_M if IS_NATURAL else logit_M * LOG2E)
        base_M = finite_or_zero(top_M)
        if IS_NATURAL:
            old_M = tl.exp2((m_M - base_M) * LOG2E)
            own_M = tl.exp2((logit_M - base_M) * LOG2E)
        else:
            old_M = tl.exp2(m_M - base_M)
            own_M = tl.exp2(tl.fma(logit_M, LOG2E, -base_M))
        l_M = l_M * old_M + own_M
        m_M = top_M
    inverse_M = old_M * factor / tl.where(l_M == 0.0, 1.0, l_M)
    at_M = place.b * io.out.stride_b + (place.seq.token_q + pos_M) * io.out.stride_n
    out = io.out.ptr + (at_M + head_M * io.out.stride_h)[:, None]
    for s in tl.static_range(tile.SLICES_E):
        for i in tl.static_range(tile.VALUES):
            dims = (s * tile.BLOCK_E + tl.arange(0, tile.BLOCK_E)) * tile.VALUES + i
            part = acc[s * tile.VALUES + i] * inverse_M[:, None]
            part = tl.where(used_M[:, None], part, 0.0).to(io.out.ptr.dtype.element_ty)
            tl.store(
                out + dims[None, :],
                part,
                mask=stored_M[:, None] & (dims < tile.HEAD_DIM_V)[None, :],
            )
    if io.lse.ptr is not None:
        start = place.b * io.lse.stride_b + place.seq.token_q
        if io.rest is None:
            lse_M = m_M + tl.log2(l_M) * LN2 if IS_NATURAL else (m_M + tl.log2(l_M)) * LN2
        else:
            lse_M, rest_M = log_sum_exp(m_M, l_M, not IS_NATURAL)
            rest = io.rest + start
            rest_M = tl.where(used_M, rest_M, 0.0)
            tl.store(rest + head_M * io.lse.stride_h + pos_M, rest_M, mask=stored_M)
        lse_M = tl.where(used_M, lse_M, float("-inf"))
        lse = io.lse.ptr + start
        tl.store(lse + head_M * io.lse.stride_h + pos_M, lse_M, mask=stored_M)


@triton.constexpr_function
def columns_of_rows(block, values, slices):
    """A power of two that the columns of a row of results are within, of which slices may be
    three."""
    return 1 << (block * values * slices - 1).bit_length()


@triton.jit
def store_empty(
    g,
    number,
    count,
    sequences: Sequences,
    shape: Shape,
    mask: Mask,
    io: ForwardIO,
    sink,
    tile: DecodeTile,
):
    """Writes out and lse of KV head g of sequences without keys: one of `count` shares of all rows,
    in tiles that lie across sequences."""
    COLUMNS: tl.constexpr = columns_of_rows(tile.BLOCK_E, tile.VALUES, tile.SLICES_E)
    group = shape.heads_q // shape.heads_k
    rows = sequences.seqlen_q * group
    dims = tl.arange(0, COLUMNS)
    for row0 in range(number * tile.BLOCK_M, shape.batch * rows, count * tile.BLOCK_M):
        row_M = row0 + tl.arange(0, tile.BLOCK_M)
        exists_M = row_M < shape.batch * rows
        b_M = tl.minimum(row_M // rows, shape.batch - 1)
        pos_M = row_M % rows // group
        head_M = g * group + row_M % group
        seq = seqlens_of(b_M, sequences, mask)
        empty_M = exists_M & (seq.len_k <= 0)
        b_M = b_M.to(tl.int64)
        at_M = b_M * io.out.stride_b + pos_M * io.out.stride_n + head_M * io.out.stride_h
        zero = tl.zeros([tile.BLOCK_M, COLUMNS], io.out.ptr.dtype.element_ty)
        ok = empty_M[:, None] & (dims < tile.HEAD_DIM_V)[None, :]
        tl.store(io.out.ptr + at_M[:, None] + dims[None, :], zero, mask=ok)
        if io.lse.ptr is not None:
            lse_M = tl.full([tile.BLOCK_M], float("-inf"), tl.float32)
            if sink is not None:
                lse_M = tl.where(pos_M < seq.len_q, tl.load(sink + head_M), lse_M)
            at_M = b_M * io.lse.stride_b + head_M * io.lse.stride_h + pos_M
            tl.store(io.lse.ptr + at_M, lse_M, mask=empty_M)
            if io.rest is not None:
                tl.store(io.rest + at_M, 0.0, mask=empty_M)


@triton.jit
def load_parts(partial_out, row_PM, exists_P, tile: DecodeTile):
    """[P, M, W] of the parts' results, of one word of the columns."""
    COLUMNS: tl.constexpr = tile.SLICES_E * tile.VALUES * tile.BLOCK_E
    words = tl.arange(0, tile.BLOCK_E)
    return tl.load(
        partial_out + (row_PM * COLUMNS)[:, :, None] + words[None, None, :],
        mask=exists_P[:, None, None],
        other=0.0,
        cache_modifier=".cg",
    )


@triton.jit
def merged(
    piece, row, M: tl.constexpr, merge: DecodeMerge, tile: DecodeTile, IS_NATURAL: tl.constexpr
):
    """(maximum, sum, outputs) of all parts of M rows from `row` on of a unit's, in their order."""
    UNIT: tl.constexpr = LOG2E if IS_NATURAL else 1.0
    WORDS: tl.constexpr = tile.SLICES_E * tile.VALUES
    COLUMNS: tl.constexpr = WORDS * tile.BLOCK_E
    # Values on their way ahead of the weights, whose exchange between threads they would wait for:
    # of words of more there are too few registers.
    AHEAD: tl.constexpr = WORDS <= 2
    rows = row + tl.arange(0, M)
    m_M = tl.full([M], float("-inf"), tl.float32)
    l_M = tl.zeros([M], tl.float32)
    acc = ()
    for _ in tl.static_range(WORDS):
        acc = acc + (tl.zeros([M, tile.BLOCK_E], tl.float32),)
    # Parts are near each other: 32 bits reach from the first.
    first = wide(piece.rest) * tile.BLOCK_M
    partial_sums = merge.partial_sums + 2 * first
    partial_out = merge.partial_out + first * COLUMNS
    for begin in tl.range(0, piece.parts, merge.PARTS, num_stages=merge.STAGES):
        part_P = begin + tl.arange(0, merge.PARTS)
        exists_P = part_P < piece.parts
        slot_P = piece.step * part_P + tl.where(part_P == 0, piece.first - piece.rest, 0)
        row_PM = slot_P[:, None] * tile.BLOCK_M + rows[None, :]
        sums_PM = partial_sums + 2 * row_PM
        top_PM = tl.load(sums_PM, mask=exists_P[:, None], other=float("-inf"), cache_modifier=".cg")
        sum_PM = tl.load(sums_PM + 1, mask=exists_P[:, None], other=0.0, cache_modifier=".cg")
        parts = ()
        if AHEAD:
            for j in tl.static_range(WORDS):
                part_PMW = load_parts(partial_out + j * tile.BLOCK_E, row_PM, exists_P, tile)
                parts = parts + (part_PMW,)
        new_M = tl.maximum(m_M, tl.max(top_PM, 0))
        base_M = finite_or_zero(new_M)
        old_M = tl.exp2((m_M - base_M) * UNIT)
        # Rounded by name: where a sum takes a thread's own product unrounded, and those of others
        # rounded, threads that add up the same have other bits.
        weight_PM = tl.fma(tl.exp2((top_PM - base_M[None, :]) * UNIT), sum_PM, 0.0)
        l_M = l_M * old_M + tl.sum(weight_PM, 0)
        m_M = new_M
        more = ()
        for j in tl.static_range(WORDS):
            if AHEAD:
                part_PMW = parts[j]
            else:
                part_PMW = load_parts(partial_out + j * tile.BLOCK_E, row_PM, exists_P, tile)
            total_MW = tl.sum(part_PMW * weight_PM[:, :, None], 0)
            more = more + (acc[j] * old_M[:, None] + total_MW,)
        acc = more
    return m_M, l_M, acc


@triton.jit
def store_part(m_M, l_M, acc, piece, merge: DecodeMerge, tile: DecodeTile):
    """Writes a part's own normalised results, and the maximum and sum of its rows: apart, since a
    log-sum-exp that is far from 0 has no digits left for the sum."""
    COLUMNS: tl.constexpr = tile.SLICES_E * tile.VALUES * tile.BLOCK_E
    rows = tl.arange(0, tile.BLOCK_M)
    words = tl.arange(0, tile.BLOCK_E)
    row_M = wide(piece.slot) * tile.BLOCK_M + rows
    inverse_M = 1.0 / tl.where(l_M == 0.0, 1.0, l_M)
    kept_M = rows < tile.ROWS
    for j in tl.static_range(tile.SLICES_E * tile.VALUES):
        at_MW = (row_M * COLUMNS + j * tile.BLOCK_E)[:, None] + words[None, :]
        tl.store(merge.partial_out + at_MW, acc[j] * inverse_M[:, None], mask=kept_M[:, None])
    sums = merge.partial_sums + 2 * row_M
    tl.store(sums, m_M, mask=kept_M)
    tl.store(sums + 1, l_M, mask=kept_M)


@triton.jit
def await_stores():
    """Waits until the thread's own stores have reached the cache that the GPU's programs share. For
    CDNA, where neither a barrier nor the release by one wave waits for those of another. What this
    breaks is told of RDNA, whose barriers wait since:
    https://github.com/llvm/llvm-project/pull/161638."""
    tl.inline_asm_elementwise(
        "s_waitcnt vmcnt(0)",
        "=v,0,~{memory}",
        [tl.program_id(0)],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def finish_piece(
    m_M,
    l_M,
    acc,
    factor,
    piece,
    row0,
    group,
    place,
    io: ForwardIO,
    sink,
    merge: DecodeMerge,
    tile: DecodeTile,
    IS_NATURAL: tl.constexpr,
):
    """What becomes of a piece's results. factor: of values. IS_NATURAL: maxima in natural units,
    else in base 2."""
    if merge.partial_out is None:  # noqa: SIM114  (known when compiling, and `or` is not)
        store_whole(
            m_M, l_M, acc, factor, row0, group, place, io, sink, tile.BLOCK_M, tile, IS_NATURAL
        )
    elif piece.parts == 1:
        store_whole(
            m_M, l_M, acc, factor, row0, group, place, io, sink, tile.BLOCK_M, tile, IS_NATURAL
        )
    else:
        store_part(m_M, l_M, acc, piece, merge, tile)
        if merge.AWAITS_STORES:
            await_stores()
        # All threads' results, before the count says that they are there.
        tl.debug_barrier()
        count = merge.counts + piece.index
        done = tl.atomic_add(count, 1, sem="acq_rel", scope="gpu")
        if done == piece.parts - 1:
            tl.debug_barrier()
            # For the next launch: nobody else comes by any more.
            tl.store(count, 0)
            M: tl.constexpr = tile.ROWS if tile.ROWS < MERGE_ROWS else MERGE_ROWS
            for row in range(0, tile.ROWS, M):
                top_M, sum_M, out = merged(piece, row, M, merge, tile, IS_NATURAL)
                store_whole(
                    top_M,
                    sum_M,
                    out,
                    factor,
                    row0 + row,
                    group,
                    place,
                    io,
                    sink,
                    M,
                    tile,
                    IS_NATURAL,
                )
