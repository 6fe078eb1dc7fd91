"""Partial results in the order of threads: scratch memory has numbers of a thread beside each other
as they lie in its registers. So a segment is stored, and some rows of all segments are merged, by
few instructions. An instruction that runs once takes ten cycles or more, as it comes from memory.

A turn of a merge has some rows with all columns of a consumer: 128 places of V numbers. If rows of
the output are rows of products these are a thread's two rows, of four float32. If they are columns
of products (SWAPPED), these are four rows, of eight numbers.

M query rows, E columns, P segments, W turns at once, T places, V numbers of a place.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.decode.results import (
    count_segment,
    counter_of,
    scale_of,
    slot_row,
    store_columns,
    store_whole,
    wait_for_tile,
)
from heedful.kernels.hopper.decode.share import look
from heedful.kernels.hopper.mla.converting_consumer import output_rows
from heedful.kernels.hopper.sm90.compat import opaque
from heedful.kernels.hopper.sm90.mma import ROWS
from heedful.kernels.hopper.sm90.softmax import shift_of
from heedful.kernels.split_kv.results import store_sums

PLACES: gl.constexpr = gl.constexpr(128)  # of a turn
COLUMNS: gl.constexpr = gl.constexpr(256)  # of a consumer
OF_ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])


@gluon.constexpr_function
def is_in_thread_order(merge):
    """Whether MERGE of `MlaTile` says that partial results lie in the order of threads."""
    return merge >= 2


@gluon.constexpr_function
def do_all_merge(merge):
    """Whether it says that all programs merge some of the rows."""
    return merge % 2 == 1


@gluon.jit
def in_thread_order(acc, SWAPPED: gl.constexpr):
    """An output as one tensor (turns, places, numbers), or as two with every second 32 places."""
    if SWAPPED:
        out = ()
        for half in gl.static_range(2):
            # Even and odd columns. Pair: warp, half, lane. Row: turn (eight, two), place, number.
            both = gl.join(acc[2 * half], acc[2 * half + 1])
            bits = both.reshape([4, 2, 8, 8, 2, 2, 2, 2])
            bits = bits.permute((3, 4, 5, 0, 2, 1, 6, 7))
            out = out + (bits.reshape([16, PLACES // 2, 8]),)
        return out
    else:
        # Row: warp, half, lane. Column: eight neighbours, lane, number.
        bits = acc[0].reshape([4, 2, 8, 32, 4, 2])
        return (bits.permute((0, 2, 3, 4, 1, 5)).reshape([32, PLACES, 4]),)


@gluon.jit
def in_rows(x_PWTV, SWAPPED: gl.constexpr):
    """Numbers of W turns, of P segments, as (segments, rows, columns)."""
    P: gl.constexpr = x_PWTV.shape[0]
    W: gl.constexpr = x_PWTV.shape[1]
    if SWAPPED:
        bits = x_PWTV.reshape([P, W, 2, 2, 4, 8, 2, 2, 2])
        return bits.permute((0, 1, 2, 7, 3, 4, 6, 5, 8)).reshape([P, 4 * W, COLUMNS])
    else:
        bits = x_PWTV.reshape([P, W, 32, 4, 2, 2])
        return bits.permute((0, 4, 1, 2, 3, 5)).reshape([P, 2 * W, COLUMNS])


@gluon.jit
def rows_of_turn(turn, rows_M, W: gl.constexpr, SWAPPED: gl.constexpr):
    """The rows of a tile that are rows 0 and so on of `in_rows`, for turns from `turn` on."""
    if SWAPPED:
        return 4 * turn + rows_M
    else:
        # A thread of a product has rows that are eight apart.
        return turn // 8 * 16 + turn % 8 + rows_M // W * 8 + rows_M % W


@gluon.jit
def reciprocal(x):
    """1 / x by one instruction."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def power_of_two(x):
    """2^x by one instruction; what is below the least normal number is 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def normalised(acc, l_M, SWAPPED: gl.constexpr):
    """Outputs over sums of rows, which lie as OF_ROWS."""
    layout: gl.constexpr = gl.SliceLayout(0 if SWAPPED else 1, acc[0].type.layout)
    times_M = gl.convert_layout(reciprocal(gl.where(l_M == 0.0, 1.0, l_M)), layout)
    out = ()
    for part in gl.static_range(len(acc)):
        if SWAPPED:
            out = out + (acc[part] * times_M[None, :],)
        else:
            out = out + (acc[part] * times_M[:, None],)
    return out


@gluon.jit
def store_segment(params, segment, parts, m_M, l_M, CONSUMER: gl.constexpr):
    """Stores a segment's normalised results in the order of threads, and the maximum and sum of its
    rows, which lie as OF_ROWS."""
    V: gl.constexpr = parts[0].shape[2]
    layout: gl.constexpr = parts[0].type.layout
    of_T: gl.constexpr = gl.SliceLayout(2, layout)
    turn_W = gl.arange(0, parts[0].shape[0], layout=gl.SliceLayout(1, of_T))
    place_T = gl.arange(0, parts[0].shape[1], layout=gl.SliceLayout(0, of_T))
    if len(parts) == 2:
        place_T = place_T // 32 * 64 + place_T % 32
    number_V = gl.arange(0, V, layout=gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    at_WT = turn_W[:, None] * (PLACES * V) + place_T[None, :] * V
    at_WTV = gl.expand_dims(at_WT, 2) + gl.expand_dims(number_V[None, :], 0)
    first = slot_row(params, segment.partials.slot, CONSUMER)
    out = params.work.merge.partial_out + first * params.tile.BLOCK_E
    for part in gl.static_range(len(parts)):
        gl.store(out + part * 32 * V + at_WTV, parts[part].to(out.dtype.element_ty))
    rows_M = gl.arange(0, ROWS, layout=OF_ROWS)
    sums = params.work.merge.partial_sums + 2 * (first + rows_M)
    store_sums(sums, m_M, l_M, rows_M < ROWS)


@gluon.jit
def load_pairs_at_once(params, row_PM, exists_P1):
    """(maximum, sum) of rows in scratch, by one load; -inf and 0 for segments that do not exist."""
    both = params.work.merge.partial_sums.to(gl.pointer_type(gl.int64)) + row_PM
    pair_PM = gl.load(both, mask=exists_P1, other=0xFF800000, cache_modifier=".cg")
    top_PM = pair_PM.to(gl.int32).to(gl.float32, bitcast=True)
    return top_PM, (pair_PM >> 32).to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def slots_of(partials, number_P):
    """The slots of a work tile's segments."""
    return gl.where(number_P == 0, partials.first, partials.rest + partials.step * number_P)


@gluon.jit
def merge_turns(
    io,
    params,
    segment,
    turn,
    W: gl.constexpr,
    P: gl.constexpr,
    CONSUMER: gl.constexpr,
    SWAPPED: gl.constexpr,
    scale,
):
    """Merges W turns of a work tile from `turn` on, over all segments in order, P at a time, and
    stores their results."""
    V: gl.constexpr = 8 if SWAPPED else 4
    raw: gl.constexpr = gl.BlockedLayout([1, 1, 1, V], [1, 1, 32, 1], [1, 1, 4, 1], [3, 2, 1, 0])
    of_T: gl.constexpr = gl.SliceLayout(3, raw)
    of_W: gl.constexpr = gl.SliceLayout(2, of_T)
    own_P = gl.arange(0, P, layout=gl.SliceLayout(1, of_W))
    turn_W = turn + gl.arange(0, W, layout=gl.SliceLayout(0, of_W))
    place_T = gl.arange(0, PLACES, layout=gl.SliceLayout(0, gl.SliceLayout(0, of_T)))
    of_V: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, raw)))
    number_V = gl.arange(0, V, layout=of_V)
    inside_W = turn_W * (PLACES * V)
    inside_T = gl.expand_dims(gl.expand_dims(place_T * V, 0), 0)
    inside_V = gl.expand_dims(gl.expand_dims(gl.expand_dims(number_V, 0), 0), 0)
    example = in_rows(gl.zeros([P, W, PLACES, V], gl.float32, raw), SWAPPED)
    layout: gl.constexpr = example.type.layout
    R: gl.constexpr = example.shape[1]
    of_rows: gl.constexpr = gl.SliceLayout(2, layout)
    one: gl.constexpr = gl.SliceLayout(0, layout)
    rows_M = gl.arange(0, R, layout=gl.SliceLayout(0, of_rows))
    rows_M = rows_of_turn(turn, rows_M, W, SWAPPED)
    turn_P = gl.arange(0, P, layout=gl.SliceLayout(1, of_rows))
    m_M = gl.full([R], float("-inf"), gl.float32, gl.SliceLayout(1, one))
    l_M = gl.zeros([R], gl.float32, gl.SliceLayout(1, one))
    acc = gl.zeros([R, COLUMNS], gl.float32, one)
    partials = segment.partials
    for begin in range(0, partials.count, P):
        first_P = slot_row(params, slots_of(partials, begin + turn_P), CONSUMER)
        exists_P = begin + turn_P < partials.count
        row_PM = first_P[:, None] + rows_M[None, :]
        top_PM, sum_PM = load_pairs_at_once(params, row_PM, exists_P[:, None])
        from_P = slot_row(params, slots_of(partials, begin + own_P), CONSUMER)
        at_PW = (from_P * params.tile.BLOCK_E)[:, None] + inside_W[None, :]
        at_PWTV = gl.expand_dims(gl.expand_dims(at_PW, 2) + inside_T, 3) + inside_V
        ok_P = (begin + own_P < partials.count)[:, None]
        x_PWTV = gl.load(
            params.work.merge.partial_out + at_PWTV,
            mask=gl.expand_dims(gl.expand_dims(ok_P, 2), 3),
            other=0.0,
            cache_modifier=".cg",
        )
        partial_PME = in_rows(x_PWTV.to(gl.float32), SWAPPED)
        new_M = gl.maximum(m_M, gl.convert_layout(gl.max(top_PM, 0), m_M.type.layout))
        shift_M = shift_of(new_M)
        shift_PM = gl.convert_layout(shift_M, rows_M.type.layout)
        old_M = power_of_two(m_M - shift_M)
        weight_PM = power_of_two(top_PM - shift_PM[None, :]) * sum_PM
        l_M = l_M * old_M + gl.convert_layout(gl.sum(weight_PM, 0), l_M.type.layout)
        acc = acc * old_M[:, None] + gl.sum(partial_PME * gl.expand_dims(weight_PM, 2), 0)
        m_M = new_M
    own_M = gl.arange(0, R, layout=gl.SliceLayout(1, one))
    rows_M = segment.row0 + rows_of_turn(turn, own_M, W, SWAPPED)
    FIRST: gl.constexpr = CONSUMER * params.tile.BLOCK_E
    store_whole(io, params, segment, 0, acc, m_M, l_M, FIRST, scale, rows_M)


@gluon.jit
def merge_tile_by_turns(
    io, params, segment, number, step, CONSUMER: gl.constexpr, SWAPPED: gl.constexpr, scale
):
    """Merges a share of a work tile's turns: share `number` of `step`."""
    TURNS: gl.constexpr = 16 if SWAPPED else 32
    # A thread loads 64 numbers at a time, or 128 of float16.
    FEW: gl.constexpr = 2 if SWAPPED else 4
    SOME: gl.constexpr = 1 if SWAPPED else 2
    if segment.partials.count <= 4:
        for turn in range(number * FEW, TURNS, step * FEW):
            merge_turns(io, params, segment, turn, FEW, 4, CONSUMER, SWAPPED, scale)
    elif segment.partials.count <= 8:
        for turn in range(number * SOME, TURNS, step * SOME):
            merge_turns(io, params, segment, turn, SOME, 8, CONSUMER, SWAPPED, scale)
    else:
        for turn in range(number, TURNS, step):
            merge_turns(io, params, segment, turn, 1, 16, CONSUMER, SWAPPED, scale)


@gluon.jit
def store_rows(
    io, params, segment, acc, m_M, l_M, CONSUMER: gl.constexpr, SWAPPED: gl.constexpr, scale
):
    """Stores a consumer's results of a whole work tile."""
    out = acc
    if SWAPPED:
        out = output_rows(acc)
    rows: gl.constexpr = gl.SliceLayout(1, out[0].type.layout)
    m_M, l_M = gl.convert_layout(m_M, rows), gl.convert_layout(l_M, rows)
    FIRST: gl.constexpr = CONSUMER * params.tile.BLOCK_E
    store_columns(io, params, segment, opaque(segment.row0), out, m_M, l_M, FIRST, scale)


@gluon.jit
def finish_in_thread_order(
    io,
    params,
    segment,
    acc,
    m_M,
    l_M,
    CONSUMER: gl.constexpr,
    SWAPPED: gl.constexpr,
    descale=None,
):
    """As `results.finish_segment`, for partial results in the order of threads. m_M, l_M lie as
    OF_ROWS."""
    scale = scale_of(descale, segment)
    if params.work.merge.partial_out is None:  # noqa: SIM114  (known when compiling, and `or` is not)
        store_rows(io, params, segment, acc, m_M, l_M, CONSUMER, SWAPPED, scale)
    elif segment.partials.count == 1:
        store_rows(io, params, segment, acc, m_M, l_M, CONSUMER, SWAPPED, scale)
    else:
        parts = in_thread_order(normalised(acc, l_M, SWAPPED), SWAPPED)
        store_segment(params, segment, parts, m_M, l_M, CONSUMER)
        done = count_segment(params, segment, CONSUMER)
        if not do_all_merge(params.tile.MERGE):  # noqa: SIM102  (known when compiling, and `and` is not)
            if done == segment.partials.count - 1:
                gl.barrier()
                # The count is 0 again for the next launch: no other program uses it any more.
                gl.store(counter_of(params, segment, CONSUMER), 0)
                merge_tile_by_turns(io, params, segment, 0, 1, CONSUMER, SWAPPED, scale)


@gluon.jit
def merge_share_by_turns(
    io, params, share, CONSUMER: gl.constexpr, SWAPPED: gl.constexpr, descale=None
):
    """As `results.merge_share`, of results in the order of threads."""
    while share.x < share.end:
        segment, share = look(share, params)
        partials = segment.partials
        if (segment.start < segment.stop) & (partials.count > 1):
            wait_for_tile(params, segment, CONSUMER)
            scale = scale_of(descale, segment)
            number = (partials.slot - partials.rest) // partials.step
            number = gl.where(partials.slot == partials.first, 0, number)
            merge_tile_by_turns(
                io, params, segment, number, partials.count, CONSUMER, SWAPPED, scale
            )
