"""The consumer warpgroup of the Hopper decode: it computes scores, softmax and output of all rows
of a tile. A product always has 64 rows. Rows without a query are idle, which costs nothing, because
the products wait for memory.

M query rows, N keys of a tile, D qk dim, E v dim, L lanes that share a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from heedful.kernels.common.key_range import key_bounds
from heedful.kernels.hopper.decode.mask import masked
from heedful.kernels.hopper.decode.results import (
    finish_segment,
    merge_share,
    store_empty,
    store_gaps,
)
from heedful.kernels.hopper.decode.share import look
from heedful.kernels.hopper.sm90.mma import ROWS, scale_output, scores_layout
from heedful.kernels.hopper.sm90.pipeline import PipelineState
from heedful.kernels.hopper.sm90.softmax import lane_sums, softmax_threshold, threshold_limit
from heedful.kernels.portable.cache.rotary import rotated
from heedful.kernels.split_kv.work import block_of


@gluon.constexpr_function
def query_rows(rows):
    """Rows of queries that are loaded, for a tile of at most `rows` rows: at least the 16 rows that
    a warp has in a product. The other rows stay zero."""
    return max(rows, 16)


@gluon.constexpr_function
def query_layout(columns):
    """The register layout of queries while they are loaded."""
    lanes = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def clear_queries(q, params):
    """Stores zeros once, in rows that get no queries."""
    if query_rows(params.tile.ROWS) < ROWS:
        D: gl.constexpr = params.tile.BLOCK_D
        q.store(gl.zeros([ROWS, D], q.dtype, query_layout(D)))


@gluon.jit
def load_query_rows(io, q, params, segment, append):
    """Loads the queries of a segment to shared memory, rotated if there are rotary tables. Rows
    that are not in use and columns past the last one become zero."""
    D: gl.constexpr = params.tile.BLOCK_D
    M: gl.constexpr = query_rows(params.tile.ROWS)
    layout: gl.constexpr = query_layout(D)
    group = params.shape.heads_q // params.shape.heads_k
    rows_M = segment.row0 + gl.arange(0, M, layout=gl.SliceLayout(1, layout))
    dims_D = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    pos_M = rows_M // group
    head_M = segment.g * group + rows_M % group
    row_M = io.q.ptr + segment.b.to(gl.int64) * io.q.stride_b
    row_M += (segment.seq.token_q + pos_M) * io.q.stride_n + head_M * io.q.stride_h
    ok_MD = (pos_M < segment.seq.len_q)[:, None] & (dims_D < params.tile.HEAD_DIM)[None, :]
    if append.rotary.cos is None:
        q_MD = gl.load(row_M[:, None] + dims_D[None, :], mask=ok_MD, other=0.0)
    else:
        place_M = gl.load(append.io.cache_seqlens + segment.b) + append.advance * pos_M
        # Rotated rows are rounded to their own dtype, as if they had been rotated before the call.
        q_MD = rotated(row_M, dims_D, ok_MD, place_M, append.rotary).to(q.dtype)
    # All warps have finished their products with the queries of the segment before.
    gl.barrier()
    q.slice(0, M).store(q_MD)
    fence_async_shared()
    gl.barrier()


@gluon.jit
def queue_tile_scores(q, k, state, N: gl.constexpr):
    """Starts q k^T of one tile of keys."""
    s_MN = gl.zeros([ROWS, N], gl.float32, scores_layout(q.dtype, N))
    k_DN = k.tile(state).permute((1, 0))
    return warpgroup_mma(q, k_DN, s_MN, use_acc=False, is_async=True)


@gluon.jit
def stream_keys(q, k, v, segment, state, params):
    """(outputs, references, sums [M, L], next pipeline state) of a segment."""
    N: gl.constexpr = params.tile.BLOCK_N
    E: gl.constexpr = params.tile.BLOCK_E
    dtype: gl.constexpr = q.dtype
    s_layout: gl.constexpr = scores_layout(dtype, N)
    o_layout: gl.constexpr = scores_layout(dtype, E)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    group = params.shape.heads_q // params.shape.heads_k
    seq = segment.seq
    last = gl.minimum((segment.row0 + ROWS - 1) // group, seq.len_q - 1)
    bounds = key_bounds(segment.row0 // group, last, seq.off, seq.len_k, params.mask)
    acc = (gl.zeros([ROWS, E], gl.float32, o_layout),)
    m_M = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    l_ML = lane_sums(gl.zeros([ROWS, N], gl.float32, s_layout))
    start = gl.minimum(segment.start, segment.span.visits)
    stop = gl.minimum(segment.stop, segment.span.visits)
    for visit in range(start, stop):
        col = block_of(visit, segment.span, params.mask) * N
        k.consumer_wait(state)
        # S = Q K^T
        s_MN = queue_tile_scores(q, k, state, N)
        s_MN = warpgroup_mma_wait(0, deps=[s_MN])
        k.consumer_release_after_mma(state)
        s_MN = masked(s_MN, params, segment, bounds, col)
        p_MN, m_M, l_ML, alpha_M, must_rescale = softmax_threshold(
            s_MN, m_M, l_ML, params.scale_log2, threshold_limit(dtype), True
        )
        l_ML = l_ML + lane_sums(p_MN)
        if must_rescale != 0:
            acc = scale_output(acc, alpha_M)
        p = gl.convert_layout(p_MN.to(dtype), p_layout)
        v.consumer_wait(state)
        # O += P V
        out = warpgroup_mma(p, v.tile(state), acc[0], is_async=True)
        acc = (warpgroup_mma_wait(0, deps=[out]),)
        v.consumer_release_after_mma(state)
        state = state.next()
    return acc, m_M, l_ML, state


@gluon.jit
def decode_consumer(io, q, k, v, share, empty, params, append):
    """Computes the rows of all segments of this program."""
    if params.seqs.cu_q is not None:  # noqa: SIM102  (known when compiling, and `and` is not)
        # If another kernel handles the long sequences, that kernel clears uncovered rows.
        if params.work.short_q is None:
            store_gaps(io, params)
    if params.work.SKIPS_EMPTY:  # noqa: SIM102  (known when compiling, and `and` is not)
        if empty > 0:
            store_empty(io, params)
    clear_queries(q, params)
    state = PipelineState.start(params.tile.STAGES)
    whole = share
    FEW: gl.constexpr = params.tile.FEW_ROWS
    while share.x < share.end:
        segment, share = look(share, params)
        if segment.start < segment.stop:
            load_query_rows(io, q, params, segment, append)
            acc, m_M, l_ML, state = stream_keys(q, k, v, segment, state, params)
            rows: gl.constexpr = gl.SliceLayout(1, acc[0].type.layout)
            l_M = gl.convert_layout(gl.sum(l_ML, 1), rows)
            finish_segment(io, params, segment, acc, gl.convert_layout(m_M, rows), l_M, 0, FEW)
    if params.tile.MERGE and params.work.merge.partial_out is not None:
        merge_share(io, params, whole, 0)
