"""Stores the results of a segment in the Hopper and MLA decodes (split_kv/results.py). Results of a
whole work tile are stored at once. Partial ones go to scratch memory. There, either the program
that finishes the last segment merges them, or each program with a segment merges some of the rows
(MERGE).

Each consumer has its own columns of the output, and so its own slots, counts and merges.

M query rows, P segments, E value columns of a consumer.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.common.gaps import GAP_ROWS, clear_block, gaps_of
from heedful.kernels.hopper.decode.share import look
from heedful.kernels.hopper.sm90.compat import inline_asm, opaque
from heedful.kernels.hopper.sm90.mma import ROWS, scale_output
from heedful.kernels.hopper.sm90.softmax import shift_of
from heedful.kernels.split_kv.results import (
    load_sums,
    store_empty_rows,
    store_lse,
    store_sums,
    with_sink,
)


@gluon.jit
def scale_of(descale, segment):
    """The scale of a segment's values, None if there is none. descale: of their KV heads; None too
    if they have none."""
    if descale is None:  # noqa: SIM114  (known when compiling, and `or` is not)
        return None
    elif descale.ptr is None:
        return None
    else:
        return gl.load(descale.ptr + segment.b * descale.stride_b + segment.g * descale.stride_h)


@gluon.jit
def store_whole(
    io, params, segment, row, x_ME, m_M, l_M, FIRST: gl.constexpr, scale=None, rows_M=None
):
    """Stores columns from FIRST on of rows from `row` on, with the sink, and beside column 0 the
    log-sum-exp. Maxima are in base 2. Rows that are stored but not in use get 0 and -inf. scale: a
    factor of all values, or None. rows_M: the rows, if they are not those from `row` on."""
    layout: gl.constexpr = x_ME.type.layout
    group = params.shape.heads_q // params.shape.heads_k
    if rows_M is None:
        rows_M = row + gl.arange(0, x_ME.shape[0], layout=gl.SliceLayout(1, layout))
    dims_E = FIRST + gl.arange(0, x_ME.shape[1], layout=gl.SliceLayout(0, layout))
    pos_M = rows_M // group
    head_M = segment.g * group + rows_M % group
    used_M = pos_M < segment.seq.len_q
    m_M, l_M, times_M = with_sink(params.sink, head_M, m_M, l_M, False)
    inverse_M = gl.where(used_M & (l_M != 0.0), times_M / l_M, 0.0)
    if scale is not None:
        inverse_M *= scale
    x_ME = gl.where(used_M[:, None], x_ME * inverse_M[:, None], 0.0)
    at_M = (segment.seq.token_q + pos_M) * io.out.stride_n + head_M * io.out.stride_h
    out = io.out.ptr + segment.b.to(gl.int64) * io.out.stride_b
    stored_M = pos_M < segment.seq.stored_q
    stored_ME = stored_M[:, None] & (dims_E < params.tile.HEAD_DIM_V)[None, :]
    values = x_ME.to(io.out.ptr.dtype.element_ty)
    gl.store(out + at_M[:, None] + dims_E[None, :], values, mask=stored_ME)
    if io.lse.ptr is not None and FIRST == 0:
        start = segment.b.to(gl.int64) * io.lse.stride_b + segment.seq.token_q
        store_lse(io, start, head_M, pos_M, m_M, l_M, used_M, stored_M, False)


@gluon.jit
def store_columns(io, params, segment, row, acc, m_M, l_M, FIRST: gl.constexpr, scale=None):
    """Stores a consumer's columns, from FIRST on."""
    COLUMNS: gl.constexpr = acc[0].shape[1]
    for which in gl.static_range(len(acc)):
        x_ME = acc[which]
        store_whole(io, params, segment, row, x_ME, m_M, l_M, FIRST + which * COLUMNS, scale)


@gluon.constexpr_function
def empty_layout(columns):
    """The register layout of rows that do not come from a product: a thread has four columns."""
    lanes = min(columns // 4, 32)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def store_gaps(io, params):
    """Clears out and lse of packed tokens before the first sequence and after the last one.
    Programs divide these among them."""
    E: gl.constexpr = params.tile.BLOCK_E
    layout: gl.constexpr = empty_layout(E)
    own_M = gl.arange(0, GAP_ROWS, layout=gl.SliceLayout(1, layout))
    dims_E = gl.arange(0, E, layout=gl.SliceLayout(0, layout))
    heads = params.shape.heads_q
    before, behind, gaps = gaps_of(params.seqs.cu_q, params.seqs.seqlen_q, params.shape.batch)
    blocks = gl.cdiv(gaps, GAP_ROWS) * heads
    for block in range(gl.program_id(0), blocks, gl.num_programs(0)):
        DIM: gl.constexpr = params.tile.HEAD_DIM_V
        clear_block(block, own_M, dims_E, before, behind, gaps, io.out, io.lse, 0, heads, DIM)


@gluon.jit
def store_empty(io, params):
    """Stores out and lse of sequences without keys. The rows of all sequences are cut into tiles,
    which the programs of a KV head divide among them."""
    E: gl.constexpr = params.tile.BLOCK_E
    layout: gl.constexpr = empty_layout(E)
    heads = params.shape.heads_k
    rows = params.seqs.seqlen_q * (params.shape.heads_q // heads)
    g = gl.program_id(0) % heads
    tile_M = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    dims_E = gl.arange(0, E, layout=gl.SliceLayout(0, layout))
    first = gl.program_id(0) // heads * ROWS
    for row in range(first, params.shape.batch * rows, gl.num_programs(0) // heads * ROWS):
        store_empty_rows(row + tile_M, dims_E, g, io, params.sink, params)


@gluon.constexpr_function
def consumers_of(tile):
    """How many consumers share the columns of the output."""
    return -(-tile.HEAD_DIM_V // tile.BLOCK_E)


@gluon.jit
def slot_row(params, slot, CONSUMER: gl.constexpr):
    """The first row of a consumer's slot."""
    CONSUMERS: gl.constexpr = consumers_of(params.tile)
    return (slot.to(gl.int64) * CONSUMERS + CONSUMER) * params.tile.ROWS


@gluon.jit
def rows_of_tile(params, segment):
    """Rows of a work tile for which scratch is used: the rows of the segment's sequence if queries
    are packed, since it may have few; else all."""
    ROWS_OF: gl.constexpr = params.tile.ROWS
    if params.seqs.cu_q is None:
        return ROWS_OF
    else:
        group = params.shape.heads_q // params.shape.heads_k
        return gl.minimum(segment.seq.stored_q * group - segment.row0, ROWS_OF)


@gluon.jit
def store_partial(params, segment, acc, m_M, l_M, CONSUMER: gl.constexpr):
    """Stores a segment's normalised results, and the maximum and sum of its rows."""
    E: gl.constexpr = params.tile.BLOCK_E
    layout: gl.constexpr = acc[0].type.layout
    rows_M = opaque(0) + gl.arange(0, acc[0].shape[0], layout=gl.SliceLayout(1, layout))
    COLUMNS: gl.constexpr = acc[0].shape[1]
    dims_E = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    acc = scale_output(acc, 1.0 / gl.where(l_M == 0.0, 1.0, l_M))
    first = slot_row(params, segment.partials.slot, CONSUMER)
    kept_M = rows_M < rows_of_tile(params, segment)
    out = params.work.merge.partial_out + first * E
    for which in gl.static_range(len(acc)):
        at_ME = (rows_M * E)[:, None] + (which * COLUMNS + dims_E)[None, :]
        if params.seqs.cu_q is None and acc[0].shape[0] == params.tile.ROWS:
            # All rows of the tile are in scratch.
            gl.store(out + at_ME, acc[which].to(out.dtype.element_ty))
        else:
            x_ME = acc[which].to(out.dtype.element_ty)
            gl.store(out + at_ME, x_ME, mask=kept_M[:, None])
    sums = params.work.merge.partial_sums + 2 * first + 2 * rows_M
    store_sums(sums, m_M, l_M, kept_M)


@gluon.constexpr_function
def merge_layout(rows, columns):
    """The register layout of (segments, rows, columns). A thread has four columns; warps are spread
    over rows, then columns, then segments."""
    lanes = min(columns // 4, 32)
    of_rows = min(rows, 4)
    of_columns = min(4 // of_rows, max(columns // 128, 1))
    of_segments = 4 // (of_rows * of_columns)
    return gl.BlockedLayout(
        [1, 1, 4], [32 // lanes, 1, lanes], [of_segments, of_rows, of_columns], [2, 1, 0]
    )


@gluon.jit
def load_pairs(params, row_PM, exists_P1):
    """(maximum, sum) of rows in scratch; -inf and 0 for segments that do not exist."""
    if params.seqs.cu_q is None:
        return load_sums(params.work.merge.partial_sums + 2 * row_PM, exists_P1)
    else:
        # ptxas: one load for both. Without it, kernels of packed queries spill; with it, the others
        # do.
        both = params.work.merge.partial_sums.to(gl.pointer_type(gl.int64)) + row_PM
        pair_PM = gl.load(both, mask=exists_P1, other=0xFF800000, cache_modifier=".cg")
        top_PM = pair_PM.to(gl.int32).to(gl.float32, bitcast=True)
        return top_PM, (pair_PM >> 32).to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def merged(params, segment, row, M: gl.constexpr, P: gl.constexpr, CONSUMER: gl.constexpr):
    """(outputs, maximum in base 2, sum) of M rows from `row` on, over all segments in order, P at a
    time."""
    E: gl.constexpr = params.tile.BLOCK_E
    layout: gl.constexpr = merge_layout(M, E)
    of_rows: gl.constexpr = gl.SliceLayout(2, layout)
    one: gl.constexpr = gl.SliceLayout(0, layout)
    rows_M = row + gl.arange(0, M, layout=gl.SliceLayout(0, of_rows))
    turn_P = gl.arange(0, P, layout=gl.SliceLayout(1, of_rows))
    dims_E = gl.arange(0, E, layout=gl.SliceLayout(0, one))
    m_M = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, one))
    l_M = gl.zeros([M], gl.float32, gl.SliceLayout(1, one))
    acc = gl.zeros([M, E], gl.float32, one)
    partials = segment.partials
    for begin in range(0, partials.count, P):
        number_P = begin + turn_P
        exists_P = number_P < partials.count
        slot_P = gl.where(number_P == 0, partials.first, partials.rest + partials.step * number_P)
        row_PM = slot_row(params, slot_P, CONSUMER)[:, None] + rows_M[None, :]
        top_PM, sum_PM = load_pairs(params, row_PM, exists_P[:, None])
        at_PME = gl.expand_dims(row_PM * E, 2) + gl.expand_dims(dims_E[None, :], 0)
        partial_PME = gl.load(
            params.work.merge.partial_out + at_PME,
            mask=gl.expand_dims(exists_P[:, None], 2),
            other=0.0,
            cache_modifier=".cg",
        ).to(gl.float32)
        new_M = gl.maximum(m_M, gl.convert_layout(gl.max(top_PM, 0), m_M.type.layout))
        shift_M = shift_of(new_M)
        shift_PM = gl.convert_layout(shift_M, rows_M.type.layout)
        old_M = gl.exp2(m_M - shift_M)
        weight_PM = gl.exp2(top_PM - shift_PM[None, :]) * sum_PM
        l_M = l_M * old_M + gl.convert_layout(gl.sum(weight_PM, 0), l_M.type.layout)
        acc = acc * old_M[:, None] + gl.sum(partial_PME * gl.expand_dims(weight_PM, 2), 0)
        m_M = new_M
    return acc, m_M, l_M


@gluon.jit
def wait_for_partials(counter, count):
    """Waits until `count` segments of a work tile are in scratch."""
    inline_asm(
        "{ .reg .pred early; .reg .b32 n;\n"
        "AGAIN: ld.acquire.gpu.global.b32 n, [$0]; setp.lt.s32 early, n, $1;\n"
        "@early bra AGAIN; }",
        "l,r,~{memory}",
        [counter, count],
    )


@gluon.jit
def count_to_zero(counter, last):
    """One thread of a warpgroup adds 1 to the counter, or sets it to 0 if it is `last`."""
    inline_asm(
        "{ .reg .pred first; .reg .b32 n; mov.b32 n, %tid.x; and.b32 n, n, 127;\n"
        "setp.eq.b32 first, n, 0; @first red.relaxed.gpu.global.inc.u32 [$0], $1; }",
        "l,r,~{memory}",
        [counter, last],
    )


@gluon.jit
def merge_rows(
    io, params, segment, M: gl.constexpr, P: gl.constexpr, CONSUMER: gl.constexpr, scale=None
):
    """Merges some rows of a work tile. Programs with a segment take M rows at a time in turn,
    beginning with the first segment's program."""
    partials = segment.partials
    number = (partials.slot - partials.rest) // partials.step
    number = gl.where(partials.slot == partials.first, 0, number)
    for turn in range(number, gl.cdiv(rows_of_tile(params, segment), M), partials.count):
        row = turn * M
        out, top_M, sum_M = merged(params, segment, row, M, P, CONSUMER)
        FIRST: gl.constexpr = CONSUMER * params.tile.BLOCK_E
        store_whole(io, params, segment, segment.row0 + row, out, top_M, sum_M, FIRST, scale)


@gluon.jit
def wait_for_tile(params, segment, CONSUMER: gl.constexpr):
    """Waits until all segments of a work tile are in scratch. Its count is 0 again once all
    programs that merge it have waited."""
    count = segment.partials.count
    counter = counter_of(params, segment, CONSUMER)
    wait_for_partials(counter, count)
    # All threads have seen the count before it changes.
    gl.barrier()
    count_to_zero(counter, 2 * count - 1)


@gluon.jit
def merge_share(io, params, share, CONSUMER: gl.constexpr, descale=None):
    """Merges some rows of each work tile of which this share has a segment. All segments of this
    share must be in scratch before: otherwise programs would wait for each other in a chain.
    descale: as in `finish_segment`."""
    ROWS_OF: gl.constexpr = params.tile.ROWS
    while share.x < share.end:
        segment, share = look(share, params)
        if (segment.start < segment.stop) & (segment.partials.count > 1):
            count = segment.partials.count
            wait_for_tile(params, segment, CONSUMER)
            # A thread loads at most 128 values at a time: of few segments, or of few rows.
            FEW: gl.constexpr = 1 if ROWS_OF <= 4 else 2
            scale = scale_of(descale, segment)
            if ROWS_OF > 16:
                ALL_ROWS: gl.constexpr = scale is not None and ROWS_OF > 32
                if ALL_ROWS and count <= 4:
                    # One turn for each of four programs.
                    merge_rows(io, params, segment, 16, 4, CONSUMER, scale)
                elif count <= 8:
                    merge_rows(io, params, segment, 8, 8, CONSUMER, scale)
                else:
                    merge_rows(io, params, segment, FEW, 32, CONSUMER, scale)
            else:
                merge_rows(io, params, segment, FEW, 32, CONSUMER, scale)


@gluon.jit
def counter_of(params, segment, CONSUMER: gl.constexpr):
    """The address of the count of a work tile's segments."""
    CONSUMERS: gl.constexpr = consumers_of(params.tile)
    return params.work.merge.counts + CONSUMERS * segment.partials.tile + CONSUMER


@gluon.jit
def merge_tile(
    io,
    params,
    segment,
    row0,
    rows,
    M: gl.constexpr,
    P: gl.constexpr,
    CONSUMER: gl.constexpr,
    scale=None,
):
    """Merges all rows of a work tile."""
    for row in range(0, rows, M):
        out, top_M, sum_M = merged(params, segment, row, M, P, CONSUMER)
        FIRST: gl.constexpr = CONSUMER * params.tile.BLOCK_E
        store_whole(io, params, segment, row0 + row, out, top_M, sum_M, FIRST, scale)


@gluon.jit
def count_segment(params, segment, CONSUMER: gl.constexpr):
    """How many segments of the work tile were in scratch before this one."""
    # All threads have stored their results before the count says so.
    gl.barrier()
    counter = counter_of(params, segment, CONSUMER)
    return gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@gluon.jit
def finish_segment(
    io, params, segment, acc, m_M, l_M, CONSUMER: gl.constexpr, FEW: gl.constexpr = 16, descale=None
):
    """Stores a consumer's results of a segment; if it is the last of its work tile to finish,
    merges all of them, unless MERGE. FEW: work tiles of at most so many rows merge more segments at
    once. descale: the group of the values' scales, with which results are still to be multiplied;
    partial ones are not."""
    FIRST: gl.constexpr = CONSUMER * params.tile.BLOCK_E
    row0 = opaque(segment.row0)
    scale = scale_of(descale, segment)
    if params.work.merge.partial_out is None:  # noqa: SIM114  (known when compiling, and `or` is not)
        store_columns(io, params, segment, row0, acc, m_M, l_M, FIRST, scale)
    elif segment.partials.count == 1:
        store_columns(io, params, segment, row0, acc, m_M, l_M, FIRST, scale)
    else:
        store_partial(params, segment, acc, m_M, l_M, CONSUMER)
        done = count_segment(params, segment, CONSUMER)
        if not params.tile.MERGE:  # noqa: SIM102  (known when compiling, and `and` is not)
            if done == segment.partials.count - 1:
                gl.barrier()
                # The count is 0 again for the next launch: no other program uses it any more.
                gl.store(counter_of(params, segment, CONSUMER), 0)
                M: gl.constexpr = min(params.tile.ROWS, 16)
                P: gl.constexpr = params.work.merge.PARTS
                if FEW < M:
                    rows = rows_of_tile(params, segment)
                    if rows <= FEW:
                        merge_tile(
                            io, params, segment, row0, rows, FEW, P * (M // FEW), CONSUMER, scale
                        )
                    else:
                        merge_tile(io, params, segment, row0, rows, M, P, CONSUMER, scale)
                else:
                    # ptxas: this loop is written out. As a call, it changes the machine code of the
                    # MLA kernels.
                    for row in range(0, rows_of_tile(params, segment), M):
                        out, top_M, sum_M = merged(params, segment, row, M, P, CONSUMER)
                        store_whole(
                            io, params, segment, row0 + row, out, top_M, sum_M, FIRST, scale
                        )
