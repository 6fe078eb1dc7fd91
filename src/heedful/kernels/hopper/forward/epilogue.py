"""Stores the rows of one consumer: normalised rows through TMA, or split-KV partials in float32.

M query rows, E v dim.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from heedful.kernels.common.constants import LN2, LOG2E
from heedful.kernels.common.log_sum import log_sum_exp, rounded_log_sum_exp
from heedful.kernels.common.parts import all_parts, part_weights, plus_part
from heedful.kernels.hopper.sm90.compat import aggregate, reinterpret, tma_store
from heedful.kernels.hopper.sm90.mma import ROWS, scale_output
from heedful.kernels.hopper.sm90.pipeline import allocate_boxes, pair_of_boxes
from heedful.kernels.hopper.sm90.promotion import allocate_sums
from heedful.kernels.hopper.sm90.sequences import queries_at, query_position
from heedful.kernels.hopper.sm90.softmax import powers, shift_of


@aggregate
class Outputs:
    """Where results go. desc: the tensor map of out, None for float32 results. lse may be None.

    boxes, tails: shared memory that results pass through, in boxes of `desc`. sums: float32 sums of
    every fp8 consumer; if they exist, results pass through them, and there are no boxes.
    """

    desc: tma.tensor_descriptor | gl.constexpr
    lse: gl.tensor | gl.constexpr
    boxes: gl.shared_memory_descriptor | gl.constexpr = None
    tails: gl.shared_memory_descriptor | gl.constexpr = None
    sums: gl.shared_memory_descriptor | gl.constexpr = None

    @gluon.jit
    def allocate(io, q, kv, params):
        CONSUMERS: gl.constexpr = params.tile.CONSUMERS
        TAIL_E: gl.constexpr = params.tile.TAIL_E
        boxes = None
        tails = None
        sums = None
        if params.tile.V_TRANSPOSED:
            KEPT: gl.constexpr = io.out.dtype if params.fp8.SUMS_IN_REGS else gl.float32
            sums = allocate_sums(CONSUMERS, kv.v.rows, KEPT)
        elif params.tile.OUT_IN_Q:
            boxes = q.boxes
            if TAIL_E:
                tails = q.tails
        elif io.out is not None and params.split.partials is None:
            EACH: gl.constexpr = kv.v.dim // io.out.block_type.shape[-1]
            boxes = allocate_boxes(io.out, EACH * CONSUMERS)
            if TAIL_E:
                tails = allocate_boxes(io.out, CONSUMERS)
        return Outputs(io.out, io.lse, boxes, tails, sums)

    @gluon.jit
    def box(self, place):
        """The shared memory of one consumer's rows."""
        if self.sums is None:
            return self.boxes.index(place)
        else:
            shape: gl.constexpr = self.desc.block_type.shape
            return reinterpret(self.sums.index(place), self.desc.dtype, shape, self.desc.layout)


@gluon.jit
def entry_of(params, tile, split):
    """The batch entry of a work tile in dense results. All packed sequences together are one entry,
    and the entries of each split follow those of the split before."""
    if params.split.partials is not None:
        if params.seqs.cu_q is not None:
            return split
        else:
            return split * params.split.batch + tile.batch
    elif params.seqs.cu_q is not None:
        return gl.to_tensor(0)
    else:
        return tile.batch


@gluon.jit
def all_heads(params):
    """Query heads of the call."""
    if params.gqa.PACK_GQA == 1:
        return params.gqa.heads
    else:
        return params.gqa.heads * params.gqa.packed_heads


@gluon.jit
def head_of(params, tile, row, layout: gl.constexpr):
    """The query head of rows from `row` on. It is one number or, with packed heads, one for each
    row, clamped to the heads that exist."""
    if params.gqa.PACK_GQA == 1:
        return tile.head
    else:
        within_M = (row + gl.arange(0, ROWS, layout=layout)) % params.gqa.PACK_GQA
        return tile.head * params.gqa.packed_heads + gl.minimum(
            within_M, params.gqa.packed_heads - 1
        )


@gluon.jit
def is_row(params, row, end, layout: gl.constexpr):
    """Which rows from `row` on are a query before `end`, of a head that exists."""
    rows_M = row + gl.arange(0, ROWS, layout=layout)
    if params.gqa.PACK_GQA == 1:
        return rows_M < end
    else:
        return (rows_M // params.gqa.PACK_GQA < end) & (
            rows_M % params.gqa.PACK_GQA < params.gqa.packed_heads
        )


@gluon.jit
def store_lse(lse, lse_M, tile, row, split, params, UNUSED: gl.constexpr):
    """Stores the log-sum-exp of rows from `row` on, or another number for each row, at `lse`.
    UNUSED: the number for rows that are not in use."""
    layout: gl.constexpr = lse_M.type.layout
    place_M = query_position(params, row + gl.arange(0, ROWS, layout=layout))
    head = head_of(params, tile, row, layout)
    entry = entry_of(params, tile, split)
    if params.order.entry_rows is not None:
        # Dense results, of which the sequence is a piece.
        entry = tile.seq.token_q // params.order.entry_rows
        base = (entry * all_heads(params) + head).to(gl.int64) * params.order.entry_rows
        base += tile.seq.token_q - entry * params.order.entry_rows
    else:
        base = (entry * all_heads(params) + head).to(gl.int64) * params.seqs.seqlen_q
        if params.seqs.cu_q is not None:
            base += tile.seq.token_q
    if params.seqs.used_q is not None:
        lse_M = gl.where(place_M < tile.seq.len_q, lse_M, UNUSED)
    mask_M = is_row(params, row, tile.seq.stored_q, layout)
    gl.store(lse + base + place_M, lse_M, mask=mask_M)


@gluon.jit
def store_max_scores(peaks_M, acc, tile, row, params):
    """Stores the largest score of each row of one consumer, in natural units."""
    peaks_M = gl.convert_layout(peaks_M, gl.SliceLayout(1, acc[0].type.layout))
    store_lse(params.split.max_scores, peaks_M, tile, row, gl.to_tensor(0), params, float("-inf"))


@gluon.jit
def store_partial(acc_ME, tile, row, split, params, first: gl.constexpr):
    """Stores one split's normalised rows in float32, columns from `first` on."""
    layout: gl.constexpr = gl.SliceLayout(1, acc_ME.type.layout)
    dims_E = first + gl.arange(0, acc_ME.shape[1], layout=gl.SliceLayout(0, acc_ME.type.layout))
    heads = all_heads(params)
    token = entry_of(params, tile, split).to(gl.int64) * params.seqs.seqlen_q
    if params.seqs.cu_q is not None:
        token += tile.seq.token_q
    base = (
        params.split.partials + (token + query_position(params, row)) * heads * params.split.dim_v
    )
    place_M = query_position(params, gl.arange(0, ROWS, layout=layout))
    row_M = place_M * (heads * params.split.dim_v)
    row_M += head_of(params, tile, row, layout) * params.split.dim_v
    mask_M = is_row(params, row, tile.seq.len_q, layout)
    mask_ME = mask_M[:, None] & (dims_E < params.split.dim_v)[None, :]
    gl.store(base + row_M[:, None] + dims_E[None, :], acc_ME, mask=mask_ME)


@gluon.jit
def store_exact(acc_ME, tile, row, params, first: gl.constexpr):
    """Stores one consumer's rows in float32, columns from `first` on."""
    layout: gl.constexpr = gl.SliceLayout(1, acc_ME.type.layout)
    dims_E = first + gl.arange(0, acc_ME.shape[1], layout=gl.SliceLayout(0, acc_ME.type.layout))
    base = params.split.exact.ptr + tile.batch.to(gl.int64) * params.split.exact.stride_b
    token_M = query_position(params, row + gl.arange(0, ROWS, layout=layout)).to(gl.int64)
    if params.seqs.cu_q is not None:
        base = params.split.exact.ptr
        token_M += tile.seq.token_q
    head = head_of(params, tile, row, layout)
    row_M = token_M * params.split.exact.stride_n + head * params.split.exact.stride_h
    mask_M = is_row(params, row, tile.seq.stored_q, layout)
    mask_ME = mask_M[:, None] & (dims_E < params.split.dim_v)[None, :]
    gl.store(base + row_M[:, None] + dims_E[None, :], acc_ME, mask=mask_ME)


@gluon.jit
def keep_rows(out, used_M):
    """Each part of an output, with zeros in rows that are not used."""
    kept = (gl.where(rows_of(used_M, out[0]), out[0], 0.0),)
    if len(out) > 1:
        kept = kept + (gl.where(rows_of(used_M, out[1]), out[1], 0.0),)
    return kept


@gluon.jit
def rows_of(mask_M, x_ME):
    """A mask of rows, in the layout of one part of an output."""
    return gl.convert_layout(mask_M, gl.SliceLayout(1, x_ME.type.layout))[:, None]


@gluon.jit
def write_rows(outputs, out, coordinates, place):
    """Writes the parts of one consumer's rows to its shared memory, and from there by TMA."""
    desc = outputs.desc
    dtype: gl.constexpr = desc.dtype
    WIDTH: gl.constexpr = desc.block_type.shape[-1]
    E: gl.constexpr = out[0].shape[1]
    tma.store_wait(0)
    if outputs.sums is not None:
        # The output replaces the sums, which other threads may still be reading.
        gl.barrier()
    if WIDTH == E:
        box = outputs.box(place)
        box.store(out[0].to(dtype).reshape(box.shape))
        fence_async_shared()
        tma_store(desc, coordinates, box)
    else:
        pair_of_boxes(outputs.boxes, place, ROWS, E).store(out[0].to(dtype))
        if len(out) > 1:
            tail = outputs.tails.index(place)
            tail.store(out[1].to(dtype).reshape(tail.shape))
        fence_async_shared()
        tma_store(desc, coordinates, outputs.boxes.index(2 * place))
        tma_store(desc, coordinates[:-1] + [WIDTH], outputs.boxes.index(2 * place + 1))
        if len(out) > 1:
            tma_store(desc, coordinates[:-1] + [2 * WIDTH], tail)


@gluon.jit
def put_rows(outputs, out, tile, row, params, place):
    """Stores one consumer's rows where the results of all keys go. Rows in storage that are not in
    use may hold anything, even NaN: they become zeros."""
    if params.seqs.used_q is not None:
        layout: gl.constexpr = gl.SliceLayout(1, out[0].type.layout)
        out = keep_rows(out, is_row(params, row, tile.seq.len_q, layout))
    if params.split.exact.ptr is not None:
        store_exact(out[0], tile, row, params, 0)
        if len(out) > 1:
            store_exact(out[1], tile, row, params, out[0].shape[1])
    else:
        write_rows(outputs, out, queries_at(params, tile, row), place)


@gluon.jit
def with_sink(m_M, l_M, tile, row, split, params):
    """(maximum, sum, factor of the outputs so far) of rows, with the sink's logit."""
    IS_NATURAL: gl.constexpr = params.mods.unit is not None
    layout: gl.constexpr = l_M.type.layout
    factor_M = gl.full(l_M.shape, 1.0, gl.float32, layout)
    if params.mods.sink is not None:
        head = head_of(params, tile, row, layout)
        sink = gl.load(params.mods.sink + head)
        if params.split.partials is not None or params.split.held is not None:
            # The sink enters one split only.
            sink = gl.where(split == 0, sink, float("-inf"))
        top_M = gl.maximum(m_M, sink if IS_NATURAL else sink * LOG2E)
        shift_M = shift_of(top_M)
        factor_M = powers(m_M - shift_M, IS_NATURAL)
        # One rounding, as for scores.
        sink_M = sink - shift_M if IS_NATURAL else gl.fma(sink, LOG2E, -shift_M)
        l_M = l_M * factor_M + powers(sink_M, IS_NATURAL)
        m_M = top_M
    return m_M, l_M, factor_M


@gluon.jit
def by_threads(x_ME):
    """A tile as one line, in which each thread has four values side by side, so that it stores them
    at once: those of two rows and two columns."""
    M: gl.constexpr = x_ME.shape[0]
    E: gl.constexpr = x_ME.shape[1]
    # Warps, rows of a thread, lanes; columns: of all threads, lanes, of a thread.
    x = x_ME.reshape([M // 16, 2, 8, E // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([M * E])
    return gl.convert_layout(x, gl.BlockedLayout([4], [32], [4], [0]))


@gluon.jit
def of_threads(at, layout: gl.constexpr, E: gl.constexpr):
    """The tile of E columns that was stored at `at` as `by_threads` lays it."""
    line: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    x = gl.load(at + gl.arange(0, ROWS * E, layout=line))
    x = x.reshape([E // 8, ROWS // 16, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([ROWS, E])
    return gl.convert_layout(x, layout)


@gluon.jit
def hold(at, x_ME):
    """Stores a tile for `of_threads`: each thread reads what it has written itself."""
    line: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    gl.store(at + gl.arange(0, x_ME.shape[0] * x_ME.shape[1], layout=line), by_threads(x_ME))


# The columns of a tile in which each thread has the number of each of its rows.
HELD: gl.constexpr = gl.constexpr(8)


@gluon.jit
def hold_rows(at, x_M):
    """Stores a number of each row."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HELD, 16])
    every_MN = gl.full([ROWS, HELD], 1, gl.int1, layout)
    x_M = gl.convert_layout(x_M, gl.SliceLayout(1, layout))
    hold(at, gl.where(every_MN, x_M[:, None], 0.0))


@gluon.jit
def held_rows(at, layout: gl.constexpr):
    """The numbers that `hold_rows` stored."""
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HELD, 16])
    return gl.convert_layout(gl.max(of_threads(at, wide, HELD), 1), layout)


@gluon.jit
def with_held(params, out, lse_M, rest_M, turn, CONSUMER: gl.constexpr):
    """(output, log-sum-exp in two numbers) of one consumer's rows over this part of their keys and
    those that the program took before. Unless this is the last, it holds them in memory of its
    program: outputs, then their largest log-sum-exp in two numbers and their sums of weights."""
    layout: gl.constexpr = lse_M.type.layout
    E: gl.constexpr = out[0].shape[1] + (out[1].shape[1] if len(out) > 1 else 0)
    EACH: gl.constexpr = ROWS * (E + 3 * HELD)
    held = params.split.held + gl.program_id(0) * (params.tile.CONSUMERS * EACH) + CONSUMER * EACH
    numbers = held + ROWS * E
    old_lse_M = gl.full([ROWS], float("-inf"), gl.float32, layout)
    old_rest_M = gl.zeros([ROWS], gl.float32, layout)
    total_M = gl.zeros([ROWS], gl.float32, layout)
    if turn.number > 0:
        old_lse_M = held_rows(numbers, layout)
        old_rest_M = held_rows(numbers + ROWS * HELD, layout)
        total_M = held_rows(numbers + 2 * ROWS * HELD, layout)
    top_M, top_rest_M, old_M, new_M = part_weights(old_lse_M, old_rest_M, lse_M, rest_M)
    total_M = gl.fma(total_M, old_M, new_M)
    merged = (plus_held(held, out[0], old_M, new_M, turn),)
    if len(out) > 1:
        merged = merged + (plus_held(held + ROWS * out[0].shape[1], out[1], old_M, new_M, turn),)
    if not turn.is_last:
        hold_rows(numbers, top_M)
        hold_rows(numbers + ROWS * HELD, top_rest_M)
        hold_rows(numbers + 2 * ROWS * HELD, total_M)
    lse_M, rest_M, total_M = all_parts(top_M, top_rest_M, total_M)
    return scale_output(merged, 1.0 / total_M), lse_M, rest_M


@gluon.jit
def plus_held(at, x_ME, old_M, new_M, turn):
    """An output, or its last columns, weighted, with those held at `at` so far, which they replace
    unless this is the last part."""
    M: gl.constexpr = x_ME.shape[0]
    E: gl.constexpr = x_ME.shape[1]
    if E <= 128:
        return plus_held_columns(at, x_ME, old_M, new_M, turn)
    else:
        # ptxas: all columns at once, beside those held, would take more registers than there are.
        first, last = x_ME.reshape([M, 2, E // 2]).permute([0, 2, 1]).split()
        first = plus_held_columns(at, first, old_M, new_M, turn)
        last = plus_held_columns(at + M * (E // 2), last, old_M, new_M, turn)
        x = gl.join(first, last).permute([0, 2, 1]).reshape([M, E])
        return gl.convert_layout(x, x_ME.type.layout)


@gluon.jit
def plus_held_columns(at, x_ME, old_M, new_M, turn):
    """`plus_held` of so few columns that registers hold them twice."""
    layout: gl.constexpr = x_ME.type.layout
    old_ME = gl.zeros(x_ME.shape, gl.float32, layout)
    if turn.number > 0:
        old_ME = of_threads(at, layout, x_ME.shape[1])
    x_ME = plus_part(old_ME, rows_of(old_M, x_ME), x_ME, rows_of(new_M, x_ME))
    if not turn.is_last:
        hold(at, x_ME)
    return x_ME


@gluon.jit
def normalised(acc, m_M, l_M, tile, row, split, params, v_factor):
    """(output, maximum, sum, which rows saw a key) of one consumer's rows, with the sink."""
    m_M, l_M, factor_M = with_sink(m_M, l_M, tile, row, split, params)
    # A sum of NaN counts as seen, whatever the maximum is: the result is NaN, not 0.
    seen_M = l_M != 0.0
    if params.tile.V_TRANSPOSED:
        seen_M = ((l_M > 0.0) & (m_M > float("-inf"))) | (l_M != l_M)
    inverse_M = gl.where(seen_M, factor_M / l_M, 0.0)
    if params.fp8 is not None:
        inverse_M *= v_factor
    if params.dropout.IS_ON:
        inverse_M *= params.dropout.inverse_keep
    return scale_output(acc, inverse_M), m_M, l_M, seen_M


@gluon.jit
def store_log_sums(outputs, m_M, l_M, seen_M, tile, row, split, params):
    """Stores the log-sum-exp of rows, if there is a place for it."""
    IS_NATURAL: gl.constexpr = params.mods.unit is not None
    if outputs.lse is not None:
        if params.split.PART_TILES is not None:
            lse_M, rest_M = rounded_log_sum_exp(m_M, l_M, not IS_NATURAL)
            if params.split.rest is not None:
                store_lse(params.split.rest, rest_M, tile, row, split, params, 0.0)
        elif params.split.rest is not None:
            lse_M, rest_M = log_sum_exp(m_M, l_M, not IS_NATURAL)
            store_lse(params.split.rest, rest_M, tile, row, split, params, 0.0)
        elif IS_NATURAL:
            lse_M = m_M + gl.log2(l_M) * LN2
        else:
            lse_M = (m_M + gl.log2(l_M)) * LN2
        lse_M = gl.where(seen_M, lse_M, float("-inf"))
        store_lse(outputs.lse, lse_M, tile, row, split, params, float("-inf"))


@gluon.jit
def store_rows(
    outputs,
    acc,
    m_M,
    l_M,
    tile,
    row,
    split,
    params,
    place,
    v_factor,
    turn,
    CONSUMER: gl.constexpr,
):
    """Normalises one consumer's rows, and stores them and their log-sum-exp. v_factor: descale of
    values of 8 bits. turn: of parts that a program takes in turn, else None."""
    out, m_M, l_M, seen_M = normalised(acc, m_M, l_M, tile, row, split, params, v_factor)
    if params.split.held is not None:
        lse_M, rest_M = rounded_log_sum_exp(m_M, l_M, params.mods.unit is None)
        lse_M = gl.where(seen_M, lse_M, float("-inf"))
        out, lse_M, rest_M = with_held(params, out, lse_M, rest_M, turn, CONSUMER)
        if turn.is_last:
            put_rows(outputs, out, tile, row, params, place)
            if outputs.lse is not None:
                store_lse(outputs.lse, lse_M, tile, row, split, params, float("-inf"))
    elif params.split.partials is not None:
        store_partial(out[0], tile, row, split, params, 0)
        if len(out) > 1:
            store_partial(out[1], tile, row, split, params, out[0].shape[1])
    else:
        put_rows(outputs, out, tile, row, params, place)
    if params.split.held is None:
        store_log_sums(outputs, m_M, l_M, seen_M, tile, row, split, params)


@gluon.jit
def store_empty(
    outputs, acc, tile, row, split, params, place, v_factor, turn, CONSUMER: gl.constexpr
):
    """Stores the results of rows that saw no key: `acc`, which is zero, and a log-sum-exp of -inf
    or of the sink."""
    row_layout: gl.constexpr = gl.SliceLayout(1, acc[0].type.layout)
    none_M = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    if params.split.max_scores is not None:
        store_lse(params.split.max_scores, none_M, tile, row, split, params, float("-inf"))
    if params.split.partials is not None and params.mods.sink is None:
        # The merge gives such a partial no weight, whatever its output holds.
        store_lse(outputs.lse, none_M, tile, row, split, params, float("-inf"))
        if params.split.rest is not None:
            zero_M = gl.zeros([ROWS], gl.float32, row_layout)
            store_lse(params.split.rest, zero_M, tile, row, split, params, 0.0)
    else:
        zero_M = gl.zeros([ROWS], gl.float32, row_layout)
        store_rows(
            outputs, acc, none_M, zero_M, tile, row, split, params, place, v_factor, turn, CONSUMER
        )
