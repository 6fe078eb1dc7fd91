"""How the results of a piece of a decode leave, as portable/decode/merge.py has it: whole ones at
once, partial ones to scratch, from where the last to finish a part merges them, or all who have
one, each some rows.

Each consumer has its columns of the output to itself: slots, counts and merges of its own.

M query rows, P parts, E value columns of a consumer.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.common.constants import LN2, LOG2E
from heedful.kernels.common.gaps import GAP_ROWS, clear_block, gaps_of
from heedful.kernels.common.log_sum import log_sum_exp
from heedful.kernels.common.sequences import seqlens_of
from heedful.kernels.hopper.decode.share import look
from heedful.kernels.hopper.sm90.compat import inline_asm, opaque
from heedful.kernels.hopper.sm90.mma import ROWS, scale_output
from heedful.kernels.hopper.sm90.softmax import shift_of


@gluon.jit
def with_sink(params, head_M, m_M, l_M):
    """(maximum in base 2, sum, what results are to be multiplied by) of rows, with the sink as one
    more logit of each."""
    if params.sink is None:
        return m_M, l_M, gl.full(m_M.shape, 1.0, gl.float32, m_M.type.layout)
    else:
        logit_M = gl.load(params.sink + head_M)
        top_M = gl.maximum(m_M, logit_M * LOG2E)
        shift_M = shift_of(top_M)
        old_M = gl.exp2(m_M - shift_M)
        return top_M, l_M * old_M + gl.exp2(gl.fma(logit_M, LOG2E, -shift_M)), old_M


@gluon.jit
def store_whole(io, params, piece, row, x_ME, m_M, l_M, FIRST: gl.constexpr):
    """Writes columns from FIRST on of rows from `row` on, whose maxima are in base 2, with the
    sink, and beside the first column the log-sum-exp. Rows that are stored but not used are 0 and
    -inf."""
    layout: gl.constexpr = x_ME.type.layout
    group = params.shape.heads_q // params.shape.heads_k
    rows_M = row + gl.arange(0, x_ME.shape[0], layout=gl.SliceLayout(1, layout))
    dims_E = FIRST + gl.arange(0, x_ME.shape[1], layout=gl.SliceLayout(0, layout))
    pos_M = rows_M // group
    head_M = piece.g * group + rows_M % group
    used_M = pos_M < piece.seq.len_q
    m_M, l_M, times_M = with_sink(params, head_M, m_M, l_M)
    inverse_M = gl.where(used_M & (l_M != 0.0), times_M / l_M, 0.0)
    x_ME = gl.where(used_M[:, None], x_ME * inverse_M[:, None], 0.0)
    at_M = (piece.seq.token_q + pos_M) * io.out.stride_n + head_M * io.out.stride_h
    out = io.out.ptr + piece.b.to(gl.int64) * io.out.stride_b
    stored_M = pos_M < piece.seq.stored_q
    stored_ME = stored_M[:, None] & (dims_E < params.tile.HEAD_DIM_V)[None, :]
    values = x_ME.to(io.out.ptr.dtype.element_ty)
    gl.store(out + at_M[:, None] + dims_E[None, :], values, mask=stored_ME)
    if io.lse.ptr is not None and FIRST == 0:
        start = piece.b.to(gl.int64) * io.lse.stride_b + piece.seq.token_q
        if io.rest is None:
            lse_M = (m_M + gl.log2(l_M)) * LN2
        else:
            lse_M, rest_M = log_sum_exp(m_M, l_M, True)
            rest_M = gl.where(used_M, rest_M, 0.0)
            gl.store(io.rest + start + head_M * io.lse.stride_h + pos_M, rest_M, mask=stored_M)
        lse_M = gl.where(used_M, lse_M, float("-inf"))
        lse = io.lse.ptr + start
        gl.store(lse + head_M * io.lse.stride_h + pos_M, lse_M, mask=stored_M)


@gluon.jit
def store_parts(io, params, piece, row, acc, m_M, l_M, FIRST: gl.constexpr):
    """Writes a consumer's columns, from FIRST on."""
    for which in gl.static_range(len(acc)):
        store_whole(
            io, params, piece, row, acc[which], m_M, l_M, FIRST + which * acc[which].shape[1]
        )


@gluon.constexpr_function
def empty_layout(columns):
    """That of rows that get no results of products, four columns of a thread."""
    lanes = min(columns // 4, 32)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def store_gaps(io, params):
    """Writes out and lse of packed tokens before the first sequence and behind the last, each
    program a share."""
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
    """Writes out and lse of sequences without keys: of a KV head its programs' share of all rows,
    in tiles that lie across sequences."""
    E: gl.constexpr = params.tile.BLOCK_E
    layout: gl.constexpr = empty_layout(E)
    heads = params.shape.heads_k
    group = params.shape.heads_q // heads
    rows = params.seqs.seqlen_q * group
    g = gl.program_id(0) % heads
    tile_M = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    dims_E = gl.arange(0, E, layout=gl.SliceLayout(0, layout))
    zero_ME = gl.zeros([ROWS, E], io.out.ptr.dtype.element_ty, layout)
    first = gl.program_id(0) // heads * ROWS
    for row in range(first, params.shape.batch * rows, gl.num_programs(0) // heads * ROWS):
        row_M = row + tile_M
        exists_M = row_M < params.shape.batch * rows
        b_M = gl.minimum(row_M // rows, params.shape.batch - 1)
        pos_M = row_M % rows // group
        head_M = g * group + row_M % group
        seq = seqlens_of(b_M, params.seqs, params.mask)
        empty_M = exists_M & (seq.len_k <= 0)
        b_M = b_M.to(gl.int64)
        at_M = b_M * io.out.stride_b + pos_M * io.out.stride_n + head_M * io.out.stride_h
        ok_ME = empty_M[:, None] & (dims_E < params.tile.HEAD_DIM_V)[None, :]
        gl.store(io.out.ptr + at_M[:, None] + dims_E[None, :], zero_ME, mask=ok_ME)
        if io.lse.ptr is not None:
            lse_M = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
            if params.sink is not None:
                lse_M = gl.where(pos_M < seq.len_q, gl.load(params.sink + head_M), lse_M)
            at_M = b_M * io.lse.stride_b + head_M * io.lse.stride_h + pos_M
            gl.store(io.lse.ptr + at_M, lse_M, mask=empty_M)
            if io.rest is not None:
                gl.store(io.rest + at_M, gl.zeros_like(lse_M), mask=empty_M)


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
def rows_of_unit(params, piece):
    """Rows of a tile that scratch is used for: those that the piece's sequence has where packed
    ones may have few, else all."""
    ROWS_OF: gl.constexpr = params.tile.ROWS
    if params.seqs.cu_q is None:
        return ROWS_OF
    else:
        group = params.shape.heads_q // params.shape.heads_k
        return gl.minimum(piece.seq.stored_q * group - piece.row0, ROWS_OF)


@gluon.jit
def store_part(params, piece, acc, m_M, l_M, CONSUMER: gl.constexpr):
    """Writes a part's own normalised results, and the maximum and sum of its rows: apart, since a
    log-sum-exp that is far from 0 has no digits left for the sum."""
    E: gl.constexpr = params.tile.BLOCK_E
    layout: gl.constexpr = acc[0].type.layout
    rows_M = opaque(0) + gl.arange(0, acc[0].shape[0], layout=gl.SliceLayout(1, layout))
    COLUMNS: gl.constexpr = acc[0].shape[1]
    dims_E = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    acc = scale_output(acc, 1.0 / gl.where(l_M == 0.0, 1.0, l_M))
    first = slot_row(params, piece.work.slot, CONSUMER)
    kept_M = rows_M < rows_of_unit(params, piece)
    out = params.work.merge.partial_out + first * E
    for which in gl.static_range(len(acc)):
        at_ME = (rows_M * E)[:, None] + (which * COLUMNS + dims_E)[None, :]
        gl.store(out + at_ME, acc[which], mask=kept_M[:, None])
    sums = params.work.merge.partial_sums + 2 * first + 2 * rows_M
    gl.store(sums, m_M, mask=kept_M)
    gl.store(sums + 1, l_M, mask=kept_M)


@gluon.constexpr_function
def merge_layout(rows, columns):
    """That of (parts, rows, columns), four columns of a thread: warps have rows of their own, then
    columns, then parts."""
    lanes = min(columns // 4, 32)
    of_rows = min(rows, 4)
    of_columns = min(4 // of_rows, max(columns // 128, 1))
    of_parts = 4 // (of_rows * of_columns)
    return gl.BlockedLayout(
        [1, 1, 4], [32 // lanes, 1, lanes], [of_parts, of_rows, of_columns], [2, 1, 0]
    )


@gluon.jit
def load_sums(params, row_PM, exists_P1):
    """(maximum, sum) of rows in scratch; -inf and 0 of parts that do not exist."""
    sums_PM = params.work.merge.partial_sums + 2 * row_PM
    if params.seqs.cu_q is None:
        top_PM = gl.load(sums_PM, mask=exists_P1, other=float("-inf"), cache_modifier=".cg")
        sum_PM = gl.load(sums_PM + 1, mask=exists_P1, other=0.0, cache_modifier=".cg")
    else:
        # ptxas: one load of both, or kernels of packed queries spill; other kernels spill with it.
        both = params.work.merge.partial_sums.to(gl.pointer_type(gl.int64)) + row_PM
        pair_PM = gl.load(both, mask=exists_P1, other=0xFF800000, cache_modifier=".cg")
        top_PM = pair_PM.to(gl.int32).to(gl.float32, bitcast=True)
        sum_PM = (pair_PM >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    return top_PM, sum_PM


@gluon.jit
def merged(params, piece, row, M: gl.constexpr, P: gl.constexpr, CONSUMER: gl.constexpr):
    """(outputs, maximum in base 2, sum) of all parts of M rows from `row` on, in their order, P at
    a time."""
    E: gl.constexpr = params.tile.BLOCK_E
    layout: gl.constexpr = merge_layout(M, E)
    of_rows: gl.constexpr = gl.SliceLayout(2, layout)
    one: gl.constexpr = gl.SliceLayout(0, layout)
    rows_M = row + gl.arange(0, M, layout=gl.SliceLayout(0, of_rows))
    part_P = gl.arange(0, P, layout=gl.SliceLayout(1, of_rows))
    dims_E = gl.arange(0, E, layout=gl.SliceLayout(0, one))
    m_M = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, one))
    l_M = gl.zeros([M], gl.float32, gl.SliceLayout(1, one))
    acc = gl.zeros([M, E], gl.float32, one)
    work = piece.work
    for begin in range(0, work.parts, P):
        number_P = begin + part_P
        exists_P = number_P < work.parts
        slot_P = gl.where(number_P == 0, work.first, work.rest + work.step * number_P)
        row_PM = slot_row(params, slot_P, CONSUMER)[:, None] + rows_M[None, :]
        top_PM, sum_PM = load_sums(params, row_PM, exists_P[:, None])
        at_PME = gl.expand_dims(row_PM * E, 2) + gl.expand_dims(dims_E[None, :], 0)
        part_PME = gl.load(
            params.work.merge.partial_out + at_PME,
            mask=gl.expand_dims(exists_P[:, None], 2),
            other=0.0,
            cache_modifier=".cg",
        )
        new_M = gl.maximum(m_M, gl.convert_layout(gl.max(top_PM, 0), m_M.type.layout))
        shift_M = shift_of(new_M)
        shift_PM = gl.convert_layout(shift_M, rows_M.type.layout)
        old_M = gl.exp2(m_M - shift_M)
        weight_PM = gl.exp2(top_PM - shift_PM[None, :]) * sum_PM
        l_M = l_M * old_M + gl.convert_layout(gl.sum(weight_PM, 0), l_M.type.layout)
        acc = acc * old_M[:, None] + gl.sum(part_PME * gl.expand_dims(weight_PM, 2), 0)
        m_M = new_M
    return acc, m_M, l_M


@gluon.jit
def wait_for_parts(count, parts):
    """Waits until so many parts of a unit are in scratch."""
    inline_asm(
        "{ .reg .pred early; .reg .b32 n;\n"
        "AGAIN: ld.acquire.gpu.global.b32 n, [$0]; setp.lt.s32 early, n, $1;\n"
        "@early bra AGAIN; }",
        "l,r,~{memory}",
        [count, parts],
    )


@gluon.jit
def count_to_zero(count, last):
    """Counts one more, by a thread of a warpgroup, or after `last` begins at 0 again."""
    inline_asm(
        "{ .reg .pred first; .reg .b32 n; mov.b32 n, %tid.x; and.b32 n, n, 127;\n"
        "setp.eq.b32 first, n, 0; @first red.relaxed.gpu.global.inc.u32 [$0], $1; }",
        "l,r,~{memory}",
        [count, last],
    )


@gluon.jit
def merge_rows(io, params, piece, M: gl.constexpr, P: gl.constexpr, CONSUMER: gl.constexpr):
    """Merges every so many rows of a unit, as many as it has parts, from the number of this part
    on."""
    work = piece.work
    number = gl.where(work.slot == work.first, 0, (work.slot - work.rest) // work.step)
    for turn in range(number, gl.cdiv(rows_of_unit(params, piece), M), work.parts):
        row = turn * M
        out, top_M, sum_M = merged(params, piece, row, M, P, CONSUMER)
        FIRST: gl.constexpr = CONSUMER * params.tile.BLOCK_E
        store_whole(io, params, piece, piece.row0 + row, out, top_M, sum_M, FIRST)


@gluon.jit
def merge_share(io, params, share, CONSUMER: gl.constexpr):
    """Merges some rows of each unit that this share has a part of. All own parts are in scratch, or
    programs would wait for each other in a row."""
    ROWS_OF: gl.constexpr = params.tile.ROWS
    while share.x < share.end:
        piece, share = look(share, params)
        if (piece.start < piece.stop) & (piece.work.parts > 1):
            parts = piece.work.parts
            count = count_of(params, piece, CONSUMER)
            wait_for_parts(count, parts)
            # All threads have seen it before it goes on.
            gl.barrier()
            count_to_zero(count, 2 * parts - 1)
            # 128 values of a thread on their way at most, of few parts or of few rows.
            FEW: gl.constexpr = 1 if ROWS_OF <= 4 else 2
            if ROWS_OF > 16:
                if parts <= 8:
                    merge_rows(io, params, piece, 8, 8, CONSUMER)
                else:
                    merge_rows(io, params, piece, FEW, 32, CONSUMER)
            else:
                merge_rows(io, params, piece, FEW, 32, CONSUMER)


@gluon.jit
def count_of(params, piece, CONSUMER: gl.constexpr):
    """Where the parts of a unit are counted."""
    CONSUMERS: gl.constexpr = consumers_of(params.tile)
    return params.work.merge.counts + CONSUMERS * piece.work.index + CONSUMER


@gluon.jit
def merge_unit(
    io, params, piece, row0, rows, M: gl.constexpr, P: gl.constexpr, CONSUMER: gl.constexpr
):
    """Merges all rows of a unit."""
    for row in range(0, rows, M):
        out, top_M, sum_M = merged(params, piece, row, M, P, CONSUMER)
        FIRST: gl.constexpr = CONSUMER * params.tile.BLOCK_E
        store_whole(io, params, piece, row0 + row, out, top_M, sum_M, FIRST)


@gluon.jit
def finish_piece(io, params, piece, acc, m_M, l_M, CONSUMER: gl.constexpr, FEW: gl.constexpr = 16):
    """What becomes of a consumer's results of a piece. FEW: rows that some units are within, more
    parts of which are merged at once."""
    FIRST: gl.constexpr = CONSUMER * params.tile.BLOCK_E
    row0 = opaque(piece.row0)
    if params.work.merge.partial_out is None:  # noqa: SIM114  (known when compiling, and `or` is not)
        store_parts(io, params, piece, row0, acc, m_M, l_M, FIRST)
    elif piece.work.parts == 1:
        store_parts(io, params, piece, row0, acc, m_M, l_M, FIRST)
    else:
        store_part(params, piece, acc, m_M, l_M, CONSUMER)
        # All threads' results, before the count says that they are there.
        gl.barrier()
        count = count_of(params, piece, CONSUMER)
        done = gl.atomic_add(count, 1, sem="acq_rel", scope="gpu")
        if not params.tile.MERGE:  # noqa: SIM102  (known when compiling, and `and` is not)
            if done == piece.work.parts - 1:
                gl.barrier()
                # For the next launch: nobody else comes by any more.
                gl.store(count, 0)
                M: gl.constexpr = min(params.tile.ROWS, 16)
                P: gl.constexpr = params.work.merge.PARTS
                if FEW < M:
                    rows = rows_of_unit(params, piece)
                    if rows <= FEW:
                        merge_unit(io, params, piece, row0, rows, FEW, P * (M // FEW), CONSUMER)
                    else:
                        merge_unit(io, params, piece, row0, rows, M, P, CONSUMER)
                else:
                    # Spelled out: by a call MLA's kernels get other machine code.
                    for row in range(0, rows_of_unit(params, piece), M):
                        out, top_M, sum_M = merged(params, piece, row, M, P, CONSUMER)
                        store_whole(io, params, piece, row0 + row, out, top_M, sum_M, FIRST)
