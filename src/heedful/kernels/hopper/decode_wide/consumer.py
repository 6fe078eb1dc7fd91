"""The consumer warpgroup of the Hopper decode of wide heads: it has all columns of the output.

N keys of a tile, M query rows, E value columns of a box, L lanes (of warps) that share a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from heedful.kernels.common.key_range import key_bounds
from heedful.kernels.hopper.decode.consumer import load_query_rows
from heedful.kernels.hopper.decode.mask import masked_keys
from heedful.kernels.hopper.decode.results import (
    finish_segment,
    merge_share,
    store_empty,
    store_gaps,
)
from heedful.kernels.hopper.decode.share import look
from heedful.kernels.hopper.mla.swap_ab_consumer import (
    all_sums,
    lane_sums,
    rows_first,
    scale_columns,
    softmax_columns,
)
from heedful.kernels.hopper.sm90.mma import scores_layout
from heedful.kernels.hopper.sm90.pipeline import PipelineState
from heedful.kernels.split_kv.work import block_of

WIDTH: gl.constexpr = gl.constexpr(64)  # columns of a box


@gluon.jit
def multiply_values(v_NE, p, acc):
    """Adds a tile of values times probabilities to all boxes of the output."""
    out = ()
    # O^T += V^T P^T
    for box in gl.static_range(len(acc)):
        v_EN = v_NE.slice(box * WIDTH, WIDTH, dim=1).permute((1, 0))
        out = out + (warpgroup_mma(v_EN, p, acc[box], is_async=True),)
    acc = ()
    for box in gl.static_range(len(out)):
        acc = acc + (warpgroup_mma_wait(len(out) - 1 - box, deps=[out[box]]),)
    return acc


@gluon.jit
def stream_keys(q, p, ring, segment, state, params):
    """(outputs by boxes, maxima in base 2, sums of lanes, next pipeline state) of a segment."""
    M: gl.constexpr = params.tile.BLOCK_M
    N: gl.constexpr = params.tile.BLOCK_N
    BOXES: gl.constexpr = params.tile.BLOCK_E // WIDTH
    dtype: gl.constexpr = q.dtype
    layout: gl.constexpr = scores_layout(dtype, M)
    group = params.shape.heads_q // params.shape.heads_k
    seq = segment.seq
    last = gl.minimum((segment.row0 + M - 1) // group, seq.len_q - 1)
    bounds = key_bounds(segment.row0 // group, last, seq.off, seq.len_k, params.mask)
    acc = ()
    for _ in gl.static_range(BOXES):
        acc = acc + (gl.zeros([WIDTH, M], gl.float32, layout),)
    m_M = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
    l_LM = lane_sums(gl.zeros([N, M], gl.float32, layout))
    start = gl.minimum(segment.start, segment.span.visits)
    stop = gl.minimum(segment.stop, segment.span.visits)
    for visit in range(start, stop):
        col = block_of(visit, segment.span, params.mask) * N
        ring.consumer_wait(state)
        s_NM = gl.zeros([N, M], gl.float32, layout)
        # S^T = K Q^T
        s_NM = warpgroup_mma(
            ring.tile(state), q.permute((1, 0)), s_NM, use_acc=False, is_async=True
        )
        s_NM = warpgroup_mma_wait(0, deps=[s_NM])
        ring.consumer_release_after_mma(state)
        state = state.next()
        s_NM = masked_keys(s_NM, params, segment, bounds, col)
        p_NM, m_M, l_LM, alpha_M = softmax_columns(s_NM, m_M, l_LM, params.scale_log2)
        p.store(p_NM.to(dtype))
        fence_async_shared()
        gl.barrier()
        acc = scale_columns(acc, alpha_M)
        ring.consumer_wait(state)
        acc = multiply_values(ring.tile(state), p, acc)
        ring.consumer_release_after_mma(state)
        state = state.next()
    return acc, m_M, l_LM, state


@gluon.jit
def wide_consumer(io, q, p, ring, share, empty, params, append):
    """As `decode_consumer` of hopper/decode/consumer.py."""
    if params.seqs.cu_q is not None:
        store_gaps(io, params)
    if params.work.SKIPS_EMPTY:  # noqa: SIM102  (known when compiling, and `and` is not)
        if empty > 0:
            store_empty(io, params)
    state = PipelineState.start(params.tile.STAGES)
    whole = share
    FEW: gl.constexpr = params.tile.FEW_ROWS
    while share.x < share.end:
        segment, share = look(share, params)
        if segment.start < segment.stop:
            load_query_rows(io, q, params, segment, append)
            acc, m_M, l_LM, state = stream_keys(q, p, ring, segment, state, params)
            acc = rows_first(acc)
            rows: gl.constexpr = gl.SliceLayout(1, acc[0].type.layout)
            l_M = gl.convert_layout(all_sums(l_LM), rows)
            finish_segment(io, params, segment, acc, gl.convert_layout(m_M, rows), l_M, 0, FEW)
    if params.tile.MERGE and params.work.merge.partial_out is not None:
        merge_share(io, params, whole, 0)
