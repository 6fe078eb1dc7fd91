"""The consumer of the MLA decode with few rows: one warpgroup that has all columns of the output.

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
from heedful.kernels.hopper.decode.mask import masked_keys
from heedful.kernels.hopper.decode.results import finish_segment, merge_share
from heedful.kernels.hopper.decode.share import look
from heedful.kernels.hopper.mla.boxes import BOXES, HALF, KEYS, VALUE_BOXES, WIDTH
from heedful.kernels.hopper.mla.queries import allocate_queries, load_columns, query_box
from heedful.kernels.hopper.sm90 import barrier
from heedful.kernels.hopper.sm90.compat import aggregate
from heedful.kernels.hopper.sm90.mma import scores_layout
from heedful.kernels.hopper.sm90.pipeline import PipelineState
from heedful.kernels.hopper.sm90.softmax import shift_of


@aggregate
class SwapShared:
    """q, q_rest: queries, two halves of 256 columns and the ninth box. p: probabilities of a tile
    of keys."""

    q: gl.shared_memory_descriptor
    q_rest: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor

    @gluon.jit
    def allocate(dtype: gl.constexpr, ROWS: gl.constexpr):
        of_p: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], dtype)
        q, q_rest = allocate_queries(dtype, ROWS)
        return SwapShared(q, q_rest, gl.allocate_shared_memory(dtype, [1, KEYS, ROWS], of_p))


@gluon.jit
def box_at(block, BOX: gl.constexpr):
    """The index of a block's box in the ring of boxes."""
    return block.index * BOXES + BOX


@gluon.jit
def load_few_queries(io, shared, params, segment):
    """Loads the queries of a segment to shared memory."""
    # All warps have finished their products with the queries of the segment before.
    gl.barrier()
    for half in gl.static_range(2):
        shared.q.index(half).store(load_columns(io, params, segment, half * HALF, HALF))
    shared.q_rest.index(0).store(load_columns(io, params, segment, 2 * HALF, WIDTH))
    fence_async_shared()
    gl.barrier()


@gluon.jit
def multiply_queries(shared, ring, block, M: gl.constexpr):
    """k q^T of a tile of keys, box by box as each is loaded."""
    dtype: gl.constexpr = shared.q.dtype
    s_NM = gl.zeros([KEYS, M], gl.float32, scores_layout(dtype, M))
    for box in gl.static_range(BOXES):
        at = box_at(block, box)
        barrier.wait(ring.full.index(at), block.phase)
        q_DM = query_box(shared, box).permute((1, 0))
        s_NM = warpgroup_mma(ring.boxes.index(at), q_DM, s_NM, use_acc=box > 0, is_async=True)
    return warpgroup_mma_wait(0, deps=[s_NM])


@gluon.jit
def lane_sums(p_NM):
    """Sums over the keys that one lane holds: (N, M) -> (N / 16, 8, M).

    In a WGMMA accumulator a lane has two keys of every sixteen of its warp. Sums over lanes and
    warps are taken after the last tile.
    """
    N: gl.constexpr = p_NM.shape[0]
    M: gl.constexpr = p_NM.shape[1]
    return gl.sum(p_NM.reshape([N // 16, 2, 8, M]), 1)


@gluon.jit
def all_sums(l_LM):
    """Sums over all lanes of all warps: (warps, lanes, M) -> (M,)."""
    return gl.sum(gl.sum(l_LM, 0), 0)


@gluon.jit
def scale_sums(l_LM, alpha_M):
    """Multiplies the sums of row m by alpha_M[m]."""
    inner: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, l_LM.type.layout))
    alpha_M = gl.convert_layout(alpha_M, inner)
    return l_LM * gl.expand_dims(gl.expand_dims(alpha_M, 0), 0)


@gluon.jit
def softmax_columns(s_NM, m_M, l_LM, scale_log2):
    """(p, new maxima in base 2, new sums of lanes, factor for the sums and the output so far) after
    one more tile."""
    top_M = gl.maximum(m_M, gl.max(s_NM, 0) * scale_log2)
    shift_M = shift_of(top_M)
    p_NM = gl.exp2(s_NM * scale_log2 - shift_M[None, :])
    alpha_M = gl.exp2(m_M - shift_M)
    return p_NM, top_M, scale_sums(l_LM, alpha_M) + lane_sums(p_NM), alpha_M


@gluon.jit
def scale_columns(acc, alpha_M):
    """Multiplies the output of row m by alpha_M[m]."""
    out = ()
    for which in gl.static_range(len(acc)):
        out = out + (acc[which] * alpha_M[None, :],)
    return out


@gluon.jit
def stream_keys(shared, ring, segment, block, params):
    """(outputs by boxes, maxima in base 2, sums of lanes, next block) of a segment."""
    M: gl.constexpr = params.tile.BLOCK_M
    dtype: gl.constexpr = shared.q.dtype
    layout: gl.constexpr = scores_layout(dtype, M)
    group = params.shape.heads_q // params.shape.heads_k
    row = segment.row0 // group
    bounds = key_bounds(row, row, segment.seq.off, segment.seq.len_k, params.mask)
    acc = ()
    for _ in gl.static_range(VALUE_BOXES):
        acc = acc + (gl.zeros([WIDTH, M], gl.float32, layout),)
    m_M = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
    l_LM = lane_sums(gl.zeros([KEYS, M], gl.float32, layout))
    for number in range(segment.start, segment.stop):
        # S^T = K Q^T
        s_NM = multiply_queries(shared, ring, block, M)
        # The last box is used only as key.
        barrier.arrive_after_mma(ring.empty.index(box_at(block, VALUE_BOXES)))
        s_NM = masked_keys(s_NM, params, segment, bounds, number * KEYS)
        p_NM, m_M, l_LM, alpha_M = softmax_columns(s_NM, m_M, l_LM, params.scale_log2)
        shared.p.index(0).store(p_NM.to(dtype))
        fence_async_shared()
        gl.barrier()
        acc = scale_columns(acc, alpha_M)
        out = ()
        # O^T += V^T P^T
        for box in gl.static_range(VALUE_BOXES):
            v_EN = ring.boxes.index(box_at(block, box)).permute((1, 0))
            out = out + (warpgroup_mma(v_EN, shared.p.index(0), acc[box], is_async=True),)
        acc = ()
        for box in gl.static_range(VALUE_BOXES):
            acc = acc + (warpgroup_mma_wait(VALUE_BOXES - 1 - box, deps=[out[box]]),)
            barrier.arrive_after_mma(ring.empty.index(box_at(block, box)))
        block = block.next()
    return acc, m_M, l_LM, block


@gluon.jit
def rows_first(acc):
    """The output as (rows, columns)."""
    out = ()
    for which in gl.static_range(len(acc)):
        out = out + (gl.permute(acc[which], (1, 0)),)
    return out


@gluon.jit
def swap_ab_consumer(io, shared, ring, share, params):
    """Computes the rows of all segments of this program."""
    block = PipelineState.start(params.tile.STAGES)
    whole = share
    while share.x < share.end:
        segment, share = look(share, params)
        if segment.start < segment.stop:
            load_few_queries(io, shared, params, segment)
            acc, m_M, l_LM, block = stream_keys(shared, ring, segment, block, params)
            acc = rows_first(acc)
            rows: gl.constexpr = gl.SliceLayout(1, acc[0].type.layout)
            l_M = gl.convert_layout(all_sums(l_LM), rows)
            finish_segment(io, params, segment, acc, gl.convert_layout(m_M, rows), l_M, 0)
    if params.tile.MERGE and params.work.merge.partial_out is not None:
        merge_share(io, params, whole, 0)
