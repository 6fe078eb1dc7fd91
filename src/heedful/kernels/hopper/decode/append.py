"""Appends new rows in the Hopper decode (split_kv/append.py): the warp that loads keys writes new
ones first.

TMA loads go through another proxy than the stores of threads, and see them only after a fence.

N: one row. D columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.sm90.compat import inline_asm
from heedful.kernels.portable.cache.rotary import rotated
from heedful.kernels.split_kv.append import NewRows, new_rows
from heedful.kernels.split_kv.work import visit_of


@gluon.jit
def rows_of_segment(segment, params, append):
    """The new rows that belong to a segment, in 32 bits."""
    new = new_rows(segment, append.io.cache_seqlens + segment.b, params)
    first, stop = new.first.to(gl.int32), new.stop.to(gl.int32)
    # A negative length stands for an entry without a sequence.
    stop = gl.where(new.start >= 0, stop, first)
    return NewRows(first, stop, new.start, new.low, new.high)


@gluon.jit
def first_visit(new, segment, start, stop, params):
    """The first of visits [start, stop) whose keys may include new rows, or the last visit; `stop`
    if there are no visits or no new rows."""
    row = gl.maximum(new.start + new.first - segment.seq.token_k, 0).to(gl.int32)
    visit = visit_of(row // params.tile.BLOCK_N, segment.span)
    visit = gl.maximum(gl.minimum(visit, stop - 1), start)
    return gl.where((start < stop) & (new.first < new.stop), visit, stop)


@gluon.jit
def write_row(
    new,
    x,
    row,
    at_N,
    ok_N,
    place_N,
    rotary,
    segment,
    DIM: gl.constexpr,
    BLOCK: gl.constexpr,
    ROTATES: gl.constexpr,
):
    """Copies a row of a segment's sequence and KV head from `new` to offset at_N of x. ROTATES:
    with rotary positions place_N."""
    layout: gl.constexpr = at_N.type.layout.parent
    dims_D = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))
    ok_ND = ok_N[:, None] & (dims_D < DIM)[None, :]
    base = new.ptr + segment.b.to(gl.int64) * new.stride_b + segment.g.to(gl.int64) * new.stride_h
    row_N = base + row.to(gl.int64) * new.stride_n + 0 * at_N
    if ROTATES:
        # Rotated rows are rounded to their own dtype, as if they had been rotated before the call.
        x_ND = rotated(row_N, dims_D, ok_ND, place_N, rotary).to(new.ptr.dtype.element_ty)
    else:
        x_ND = gl.load(row_N[:, None] + dims_D[None, :], mask=ok_ND, other=0.0)
    head = x.ptr + segment.g.to(gl.int64) * x.stride_h
    gl.store(head + at_N[:, None] + dims_D[None, :], x_ND, mask=ok_ND)


@gluon.jit
def append_rows(new, segment, params, append):
    """Writes new rows [first, stop) into the cache, one by one, for the TMA loads that follow."""
    COLUMNS: gl.constexpr = max(params.tile.BLOCK_D, params.tile.BLOCK_E)
    LANES: gl.constexpr = min(COLUMNS // 4, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [1, 1], [1, 0])
    io = append.io
    one_N = gl.arange(0, 1, layout=gl.SliceLayout(1, layout))
    for row in range(new.first, new.stop):
        place_N = new.start + row + one_N
        line_N = place_N.to(gl.int64)
        entry_N = segment.b + 0 * line_N
        if params.kv.table is not None:
            table = params.kv.table + segment.b.to(gl.int64) * params.kv.stride_tableb
            entry_N = gl.load(table + place_N // params.kv.page_size).to(gl.int64)
            line_N = (place_N % params.kv.page_size).to(gl.int64)
        elif params.kv.batch_idx is not None:
            entry_N = gl.load(params.kv.batch_idx + segment.b) + 0 * line_N
        ok_N = (entry_N >= 0) & (entry_N < params.kv.entries)
        at_N = entry_N * io.k.stride_b + line_N * io.k.stride_n
        D: gl.constexpr = params.tile.BLOCK_D
        DIM: gl.constexpr = params.tile.HEAD_DIM
        ROTATES: gl.constexpr = append.rotary.cos is not None
        write_row(io.k_new, io.k, row, at_N, ok_N, place_N, append.rotary, segment, DIM, D, ROTATES)
        at_N = entry_N * io.v.stride_b + line_N * io.v.stride_n
        E: gl.constexpr = params.tile.BLOCK_E
        DIM_V: gl.constexpr = params.tile.HEAD_DIM_V
        write_row(io.v_new, io.v, row, at_N, ok_N, place_N, append.rotary, segment, DIM_V, E, False)
    # The fence covers each thread's own stores; the barrier is for the thread that issues the
    # loads.
    inline_asm("fence.proxy.async.global; bar.warp.sync 0xffffffff;", "r,~{memory}", [new.first])
