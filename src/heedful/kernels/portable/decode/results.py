"""Stores the results of a segment of the portable decode (split_kv/results.py). Results of a whole
work tile are stored at once. Partial ones go to scratch memory, and the program that finishes the
work tile's last segment merges them.

Shapes: M rows, P segments, W words.
"""

import triton
import triton.language as tl

from heedful.kernels.args.shared import ForwardIO
from heedful.kernels.common.constants import LOG2E
from heedful.kernels.common.rows import wide
from heedful.kernels.common.scores import finite_or_zero
from heedful.kernels.split_kv.results import (
    load_sums,
    store_empty_rows,
    store_lse,
    store_sums,
    with_sink,
)

# Rows that are merged at once, at most.
MERGE_ROWS = tl.constexpr(8)


@triton.jit
def store_whole(
    m_M, l_M, acc, factor, row0, group, place, io: ForwardIO, params, ROWS: tl.constexpr
):
    """Stores out and lse of `ROWS` rows from `row0` on, with the sink. factor: of outputs. Rows
    that are stored but not in use get 0 and -inf."""
    IS_NATURAL: tl.constexpr = params.mods.IS_ADJUSTED
    BLOCK_E: tl.constexpr = params.tile.BLOCK_E
    VALUES: tl.constexpr = params.tile.VALUES
    rows_M = row0 + tl.arange(0, ROWS)
    pos_M = rows_M // group
    head_M = place.g * group + rows_M % group
    stored_M = pos_M < place.seq.stored_q
    used_M = pos_M < place.seq.len_q
    m_M, l_M, old_M = with_sink(params.mods.sink, head_M, m_M, l_M, IS_NATURAL)
    inverse_M = old_M * factor / tl.where(l_M == 0.0, 1.0, l_M)
    at_M = place.b * io.out.stride_b + (place.seq.token_q + pos_M) * io.out.stride_n
    out = io.out.ptr + (at_M + head_M * io.out.stride_h)[:, None]
    for s in tl.static_range(params.tile.SLICES_E):
        for i in tl.static_range(VALUES):
            dims = (s * BLOCK_E + tl.arange(0, BLOCK_E)) * VALUES + i
            part = acc[s * VALUES + i] * inverse_M[:, None]
            part = tl.where(used_M[:, None], part, 0.0).to(io.out.ptr.dtype.element_ty)
            ok_MW = stored_M[:, None] & (dims < params.tile.HEAD_DIM_V)[None, :]
            tl.store(out + dims[None, :], part, mask=ok_MW)
    if io.lse.ptr is not None:
        start = place.b * io.lse.stride_b + place.seq.token_q
        store_lse(io, start, head_M, pos_M, m_M, l_M, used_M, stored_M, IS_NATURAL)


@triton.constexpr_function
def columns_of_rows(block, values, slices):
    """A power of two, at least the columns of a row of results. There may be three slices."""
    return 1 << (block * values * slices - 1).bit_length()


@triton.jit
def store_empty(g, number, count, io: ForwardIO, params):
    """Stores out and lse of KV head g of sequences without keys. The rows of all sequences are cut
    into tiles, which `count` programs divide among them; this is program `number`."""
    M: tl.constexpr = params.tile.BLOCK_M
    COLUMNS: tl.constexpr = columns_of_rows(
        params.tile.BLOCK_E, params.tile.VALUES, params.tile.SLICES_E
    )
    rows = params.seqs.seqlen_q * (params.shape.heads_q // params.shape.heads_k)
    dims_E = tl.arange(0, COLUMNS)
    for row0 in range(number * M, params.shape.batch * rows, count * M):
        row_M = row0 + tl.arange(0, M)
        store_empty_rows(row_M, dims_E, g, io, params.mods.sink, params)


@triton.jit
def load_partials(partial_out, row_PM, exists_P, params):
    """The segments' results of one word of the columns, [P, M, W]."""
    COLUMNS: tl.constexpr = params.tile.SLICES_E * params.tile.VALUES * params.tile.BLOCK_E
    words = tl.arange(0, params.tile.BLOCK_E)
    return tl.load(
        partial_out + (row_PM * COLUMNS)[:, :, None] + words[None, None, :],
        mask=exists_P[:, None, None],
        other=0.0,
        cache_modifier=".cg",
    )


@triton.jit
def merged(partials, row, M: tl.constexpr, params):
    """(maximum, sum, outputs) of M rows from `row` on of a work tile, over all its segments in
    order."""
    UNIT: tl.constexpr = LOG2E if params.mods.IS_ADJUSTED else 1.0
    PARTS: tl.constexpr = params.work.merge.PARTS
    BLOCK_M: tl.constexpr = params.tile.BLOCK_M
    BLOCK_E: tl.constexpr = params.tile.BLOCK_E
    WORDS: tl.constexpr = params.tile.SLICES_E * params.tile.VALUES
    COLUMNS: tl.constexpr = WORDS * BLOCK_E
    # With few words, values are loaded before the weights, which exchange numbers between threads.
    # With more words there are too few registers.
    AHEAD: tl.constexpr = WORDS <= 2
    rows = row + tl.arange(0, M)
    m_M = tl.full([M], float("-inf"), tl.float32)
    l_M = tl.zeros([M], tl.float32)
    acc = ()
    for _ in tl.static_range(WORDS):
        acc = acc + (tl.zeros([M, BLOCK_E], tl.float32),)
    # Segments are near each other, so that 32-bit offsets from the first one are enough.
    first = wide(partials.rest) * BLOCK_M
    partial_sums = params.work.merge.partial_sums + 2 * first
    partial_out = params.work.merge.partial_out + first * COLUMNS
    for begin in tl.range(0, partials.count, PARTS, num_stages=params.work.merge.STAGES):
        turn_P = begin + tl.arange(0, PARTS)
        exists_P = turn_P < partials.count
        slot_P = partials.step * turn_P + tl.where(turn_P == 0, partials.first - partials.rest, 0)
        row_PM = slot_P[:, None] * BLOCK_M + rows[None, :]
        sums_PM = partial_sums + 2 * row_PM
        top_PM, sum_PM = load_sums(sums_PM, exists_P[:, None])
        loaded = ()
        if AHEAD:
            for j in tl.static_range(WORDS):
                partial_PMW = load_partials(partial_out + j * BLOCK_E, row_PM, exists_P, params)
                loaded = loaded + (partial_PMW,)
        new_M = tl.maximum(m_M, tl.max(top_PM, 0))
        base_M = finite_or_zero(new_M)
        old_M = tl.exp2((m_M - base_M) * UNIT)
        # An explicit fma rounds the weight. Else a sum might take a thread's own product unrounded
        # and those of others rounded, and threads that compute the same sum would get different
        # bits.
        weight_PM = tl.fma(tl.exp2((top_PM - base_M[None, :]) * UNIT), sum_PM, 0.0)
        l_M = l_M * old_M + tl.sum(weight_PM, 0)
        m_M = new_M
        more = ()
        for j in tl.static_range(WORDS):
            if AHEAD:
                partial_PMW = loaded[j]
            else:
                partial_PMW = load_partials(partial_out + j * BLOCK_E, row_PM, exists_P, params)
            total_MW = tl.sum(partial_PMW * weight_PM[:, :, None], 0)
            more = more + (acc[j] * old_M[:, None] + total_MW,)
        acc = more
    return m_M, l_M, acc


@triton.jit
def store_partial(m_M, l_M, acc, slot, params):
    """Stores a segment's normalised results, and the maximum and sum of its rows."""
    BLOCK_E: tl.constexpr = params.tile.BLOCK_E
    WORDS: tl.constexpr = params.tile.SLICES_E * params.tile.VALUES
    rows = tl.arange(0, params.tile.BLOCK_M)
    words = tl.arange(0, BLOCK_E)
    row_M = wide(slot) * params.tile.BLOCK_M + rows
    inverse_M = 1.0 / tl.where(l_M == 0.0, 1.0, l_M)
    kept_M = rows < params.tile.ROWS
    for j in tl.static_range(WORDS):
        at_MW = (row_M * (WORDS * BLOCK_E) + j * BLOCK_E)[:, None] + words[None, :]
        tl.store(
            params.work.merge.partial_out + at_MW, acc[j] * inverse_M[:, None], mask=kept_M[:, None]
        )
    sums = params.work.merge.partial_sums + 2 * row_M
    store_sums(sums, m_M, l_M, kept_M)


@triton.jit
def await_stores():
    """Waits until the thread's own stores have reached the cache that all programs share. CDNA
    needs this: neither a barrier nor the release by one wave waits for the stores of another wave.
    RDNA had the same fault, and its barriers wait since:
    https://github.com/llvm/llvm-project/pull/161638"""
    tl.inline_asm_elementwise(
        "s_waitcnt vmcnt(0)",
        "=v,0,~{memory}",
        [tl.program_id(0)],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def finish_segment(m_M, l_M, acc, factor, segment, group, place, io: ForwardIO, params):
    """Stores a segment's results; if it is the last of its work tile to finish, merges all of them.
    factor: of outputs."""
    row0, partials = segment.row0, segment.partials
    BLOCK_M: tl.constexpr = params.tile.BLOCK_M
    ROWS: tl.constexpr = params.tile.ROWS
    if params.work.merge.partial_out is None:  # noqa: SIM114  (known when compiling, and `or` is not)
        store_whole(m_M, l_M, acc, factor, row0, group, place, io, params, BLOCK_M)
    elif partials.count == 1:
        store_whole(m_M, l_M, acc, factor, row0, group, place, io, params, BLOCK_M)
    else:
        store_partial(m_M, l_M, acc, partials.slot, params)
        if params.work.merge.AWAITS_STORES:
            await_stores()
        # All threads have stored their results before the count says so.
        tl.debug_barrier()
        counter = params.work.merge.counts + partials.tile
        done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if done == partials.count - 1:
            tl.debug_barrier()
            # The count is 0 again for the next launch: no other program uses it any more.
            tl.store(counter, 0)
            M: tl.constexpr = ROWS if ROWS < MERGE_ROWS else MERGE_ROWS
            for row in range(0, ROWS, M):
                top_M, sum_M, out = merged(partials, row, M, params)
                first = row0 + row
                store_whole(top_M, sum_M, out, factor, first, group, place, io, params, M)
