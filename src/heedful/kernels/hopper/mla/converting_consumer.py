"""The consumer of the MLA decode over latent vectors of 8 bits: one warpgroup, as that of few rows
(`swap_ab_consumer`).

Products are of float16. It holds e4m3 exactly, and queries once their row is times a power of two
(`load_scaled_queries`). Rows of bytes have a scale for each key and 128 columns. Scores of a group
of columns are multiplied by it. For values it belongs to the probabilities, of which each group has
its own. So that these are at most 2, and the greatest near 1, a key's score gets the exponent of
its largest scale; sums of rows lose it again.

N keys of a tile, M query rows, C pairs of value columns, L lanes (of warps) that share a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from heedful.kernels.common.key_range import key_bounds
from heedful.kernels.hopper.decode.results import finish_segment, merge_share, scale_of
from heedful.kernels.hopper.decode.share import look
from heedful.kernels.hopper.mla.boxes import KEYS, WIDTH
from heedful.kernels.hopper.mla.conversion import (
    COLUMNS,
    GROUPS,
    as_keys,
    as_values,
    pairs_of,
)
from heedful.kernels.hopper.mla.queries import load_dims, query_layout
from heedful.kernels.hopper.mla.swap_ab_consumer import (
    all_sums,
    lane_sums,
    masked_keys,
    rows_first,
    scale_columns,
    scale_sums,
)
from heedful.kernels.hopper.sm90 import barrier
from heedful.kernels.hopper.sm90.compat import aggregate, reinterpret
from heedful.kernels.hopper.sm90.mma import scores_layout
from heedful.kernels.hopper.sm90.pipeline import PipelineState
from heedful.kernels.hopper.sm90.softmax import shift_of

PAIRS: gl.constexpr = gl.constexpr(64)  # of columns, in a group
# An exponent of a scale is at least this.
LEAST_EXPONENT: gl.constexpr = gl.constexpr(-60)


@aggregate
class ConvertingShared:
    """q: queries beside the values, in boxes of 64 columns, two for each group. q_rest: the others:
    two boxes of 32 columns beside columns of 8 bits, one of 64 beside those of 16. p: probabilities
    of a tile of keys for each group; None without scales: then those for all groups lie where the
    rest of the keys was."""

    q: gl.shared_memory_descriptor
    q_rest: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor | gl.constexpr

    @gluon.jit
    def allocate(ROWS: gl.constexpr, of_rest: gl.constexpr, SCALED: gl.constexpr):
        dtype: gl.constexpr = gl.float16
        REST: gl.constexpr = WIDTH if SCALED else WIDTH // 2
        rest_dtype: gl.constexpr = of_rest if SCALED else dtype
        of_q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, PAIRS], dtype)
        of_q_rest: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, REST], rest_dtype)
        q = gl.allocate_shared_memory(dtype, [2 * GROUPS, ROWS, PAIRS], of_q)
        q_rest = gl.allocate_shared_memory(rest_dtype, [WIDTH // REST, ROWS, REST], of_q_rest)
        p = None
        if SCALED:
            of_p: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], dtype)
            p = gl.allocate_shared_memory(dtype, [GROUPS, KEYS, ROWS], of_p)
        return ConvertingShared(q, q_rest, p)

    @gluon.jit
    def probabilities(self, keys, block, GROUP: gl.constexpr):
        """The memory of a group's probabilities: (keys, rows)."""
        if self.p is not None:
            return self.p.index(GROUP)
        else:
            ROWS: gl.constexpr = self.q.shape[1]
            FIT: gl.constexpr = WIDTH // (2 * ROWS)
            layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], gl.float16)
            rest = keys.rest.boxes.index(block.index)
            return reinterpret(rest, gl.float16, [FIT, KEYS, ROWS], layout).index(0)


@gluon.jit
def query_factors(top_M):
    """Powers of two that bring rows with these maxima to 2^14 and more, and their reciprocals."""
    # Exponents of float32. Those of small rows are taken as -112, so that both powers are normal.
    exponent_M = gl.maximum(top_M.to(gl.int32, bitcast=True) >> 23, 15)
    factor_M = ((268 - exponent_M) << 23).to(gl.float32, bitcast=True)
    return factor_M, ((exponent_M - 14) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def query_box(io, params, segment, FIRST: gl.constexpr, BOX: gl.constexpr, WIDE: gl.constexpr):
    """Queries of a box of WIDE columns, in the order of the left operands beside them. FIRST: the
    first column of its group."""
    layout: gl.constexpr = query_layout(WIDE)
    place_D = gl.arange(0, WIDE, layout=gl.SliceLayout(0, layout))
    dims_D = FIRST + place_D // 2 * 4 + BOX * 2 + place_D % 2
    return load_dims(io, params, segment, dims_D, layout)


@gluon.jit
def row_tops(q_MD, layout: gl.constexpr):
    """The greatest size in each row."""
    return gl.convert_layout(gl.max(gl.abs(q_MD.to(gl.float32)), 1), gl.SliceLayout(1, layout))


@gluon.jit
def load_scaled_queries(io, shared, params, segment):
    """Loads the queries of a segment to shared memory, each row times a power of two with which it
    fits float16, and the sign of the keys' descale. Returns the factors of scores in base 2, one
    for each row; they are positive."""
    SCALED: gl.constexpr = io.scales is not None
    M: gl.constexpr = params.tile.BLOCK_M
    wide: gl.constexpr = query_layout(PAIRS)
    boxes = ()
    top_M = gl.zeros([M], gl.float32, gl.SliceLayout(1, wide))
    for box in gl.static_range(2 * GROUPS):
        q_MD = query_box(io, params, segment, box // 2 * COLUMNS, box % 2, PAIRS)
        boxes = boxes + (q_MD,)
        top_M = gl.maximum(top_M, row_tops(q_MD, wide))
    rest = ()
    FIRST: gl.constexpr = GROUPS * COLUMNS
    if SCALED:
        dims_D = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, wide))
        rest = (load_dims(io, params, segment, dims_D, wide),)
    else:
        for box in gl.static_range(2):
            rest = rest + (query_box(io, params, segment, FIRST, box, WIDTH // 2),)
    for box in gl.static_range(len(rest)):
        top_M = gl.maximum(top_M, row_tops(rest[box], wide))
    factor_M, back_M = query_factors(top_M)
    scale = gl.to_tensor(params.scale_log2)
    if io.k_descale.ptr is not None:
        descale = scale_of(io.k_descale, segment)
        factor_M = gl.where(descale < 0.0, -factor_M, factor_M)
        scale *= gl.abs(descale)
    # All warps have finished their products with the queries of the segment before.
    gl.barrier()
    for box in gl.static_range(2 * GROUPS):
        store_scaled(shared.q.index(box), boxes[box], factor_M)
    for box in gl.static_range(len(rest)):
        store_scaled(shared.q_rest.index(box), rest[box], factor_M)
    fence_async_shared()
    gl.barrier()
    # A masked score, an infinity, times 0 would be NaN.
    scale_M = gl.maximum(back_M * scale, 1e-37)
    return gl.convert_layout(scale_M, gl.SliceLayout(0, scores_layout(shared.q.dtype, M)))


@gluon.jit
def store_scaled(memory, q_MD, factor_M):
    """Stores a box of queries, times the factors of its rows."""
    factor_M = gl.convert_layout(factor_M, gl.SliceLayout(1, q_MD.type.layout))
    memory.store((q_MD.to(gl.float32) * factor_M[:, None]).to(memory.dtype))


@gluon.jit
def multiply_converted(box, q, FIRST: gl.constexpr, s_NM, use_acc: gl.constexpr):
    """Starts adding the product of a box of keys of 8 bits with the queries beside it, boxes FIRST
    and FIRST + 1 of `q`."""
    layout: gl.constexpr = gl.DotOperandLayout(0, scores_layout(q.dtype, q.shape[1]), 2)
    first, second = as_keys(pairs_of(box).load(layout))
    s_NM = warpgroup_mma(
        first, q.index(FIRST).permute((1, 0)), s_NM, use_acc=use_acc, is_async=True
    )
    return warpgroup_mma(second, q.index(FIRST + 1).permute((1, 0)), s_NM, is_async=True)


@gluon.jit
def no_scores(shared):
    """Scores of a block, all 0."""
    M: gl.constexpr = shared.q.shape[1]
    return gl.zeros([KEYS, M], gl.float32, scores_layout(shared.q.dtype, M))


@gluon.jit
def scores(shared, keys, block):
    """k q^T of a tile of keys, box by box as each is loaded."""
    s_NM = no_scores(shared)
    for group in gl.static_range(GROUPS):
        at = block.index * GROUPS + group
        barrier.wait(keys.values.full.index(at), block.phase)
        box = keys.values.boxes.index(at)
        s_NM = multiply_converted(box, shared.q, 2 * group, s_NM, group > 0)
        # The registers of the products before these are free.
        s_NM = warpgroup_mma_wait(2, deps=[s_NM])
    barrier.wait(keys.rest.full.index(block.index), block.phase)
    box = keys.rest.boxes.index(block.index)
    s_NM = multiply_converted(box, shared.q_rest, 0, s_NM, True)
    return warpgroup_mma_wait(0, deps=[s_NM])


@gluon.jit
def scaled_scores(shared, keys, block):
    """The same over rows of bytes. Returns the scales, too: (keys, 1) of each group."""
    layout: gl.constexpr = scores_layout(shared.q.dtype, shared.q.shape[1])
    barrier.wait(keys.rest.full.index(block.index), block.phase)
    q_DM = shared.q_rest.index(0).permute((1, 0))
    k_ND = keys.rest.boxes.index(block.index)
    s_NM = warpgroup_mma(k_ND, q_DM, no_scores(shared), use_acc=False, is_async=True)
    by_group, factors = (), ()
    for group in gl.static_range(GROUPS):
        scale = keys.scales.index(block.index).slice(group, 1, dim=1).load(layout)
        factors = factors + (scale,)
    for group in gl.static_range(GROUPS):
        at = block.index * GROUPS + group
        barrier.wait(keys.values.full.index(at), block.phase)
        of_group = multiply_converted(
            keys.values.boxes.index(at), shared.q, 2 * group, no_scores(shared), False
        )
        by_group = by_group + (of_group,)
        if group == 0:
            s_NM = warpgroup_mma_wait(2, deps=[s_NM])
        else:
            s_NM += warpgroup_mma_wait(2, deps=[by_group[group - 1]]) * factors[group - 1]
    s_NM += warpgroup_mma_wait(0, deps=[by_group[GROUPS - 1]]) * factors[GROUPS - 1]
    barrier.arrive_each_warp(keys.rest.empty.index(block.index))
    return s_NM, factors


@gluon.jit
def largest_exponents(factors):
    """The exponent of each key's largest scale, in an int32 tensor (keys, 1)."""
    top_N1 = gl.abs(factors[0])
    for group in gl.static_range(1, GROUPS):
        top_N1 = gl.maximum(top_N1, gl.abs(factors[group]))
    exponent_N1 = (top_N1.to(gl.int32, bitcast=True) >> 23) - 127
    return gl.maximum(exponent_N1, LEAST_EXPONENT)


@gluon.jit
def power_of_two(exponent):
    return ((exponent + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def softmax_columns(s_NM, m_M, l_LM, exponent_N1):
    """(p, new maxima in base 2, new sums of lanes, factor for the sums and the output so far) after
    one more tile. exponent_N1: of keys, to add to their scores for all but the sums; or None."""
    if exponent_N1 is not None:
        s_NM += exponent_N1.to(gl.float32)
    top_M = gl.maximum(m_M, gl.max(s_NM, 0))
    shift_M = shift_of(top_M)
    p_NM = gl.exp2(s_NM - shift_M[None, :])
    alpha_M = gl.exp2(m_M - shift_M)
    if exponent_N1 is None:
        new_LM = lane_sums(p_NM)
    else:
        new_LM = lane_sums(p_NM * power_of_two(-exponent_N1))
    return p_NM, top_M, scale_sums(l_LM, alpha_M) + new_LM, alpha_M


@gluon.jit
def store_probabilities(shared, keys, block, p_NM, factors, exponent_N1):
    """Stores the probabilities of a tile; if there are scales, those of each group times its
    scales."""
    if exponent_N1 is None:
        shared.probabilities(keys, block, 0).store(p_NM.to(gl.float16))
    else:
        p_NM = p_NM * power_of_two(-exponent_N1)
        for group in gl.static_range(GROUPS):
            p = shared.probabilities(keys, block, group)
            p.store((p_NM * factors[group]).to(gl.float16))
    fence_async_shared()
    gl.barrier()


@gluon.jit
def add_values(shared, keys, block, acc):
    """O^T += V^T P^T, group by group; releases the values."""
    layout: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)
    out, done = (), ()
    for group in gl.static_range(GROUPS):
        at = block.index * GROUPS + group
        pairs_CN = pairs_of(keys.values.boxes.index(at)).permute((1, 0)).load(layout)
        barrier.arrive_each_warp(keys.values.empty.index(at))
        even, odd = as_values(pairs_CN)
        p_NM = shared.probabilities(keys, block, group)
        out = out + (warpgroup_mma(even, p_NM, acc[2 * group], is_async=True),)
        out = out + (warpgroup_mma(odd, p_NM, acc[2 * group + 1], is_async=True),)
        if group > 0:
            done = done + warpgroup_mma_wait(2, deps=[out[2 * group - 2], out[2 * group - 1]])
    return done + warpgroup_mma_wait(0, deps=[out[2 * GROUPS - 2], out[2 * GROUPS - 1]])


@gluon.jit
def stream_stored(shared, keys, segment, block, scale_M, params):
    """(outputs of even and odd columns of each group, maxima in base 2, sums of lanes, next block)
    of a segment."""
    M: gl.constexpr = params.tile.BLOCK_M
    layout: gl.constexpr = scores_layout(shared.q.dtype, M)
    group = params.shape.heads_q // params.shape.heads_k
    row = segment.row0 // group
    bounds = key_bounds(row, row, segment.seq.off, segment.seq.len_k, params.mask)
    acc = ()
    for _ in gl.static_range(2 * GROUPS):
        acc = acc + (gl.zeros([PAIRS, M], gl.float32, layout),)
    m_M = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
    l_LM = lane_sums(gl.zeros([KEYS, M], gl.float32, layout))
    for number in range(segment.start, segment.stop):
        if keys.scales is None:
            s_NM, factors, exponent_N1 = scores(shared, keys, block), None, None
        else:
            s_NM, factors = scaled_scores(shared, keys, block)
            exponent_N1 = largest_exponents(factors)
        s_NM = masked_keys(s_NM, params, segment, bounds, number * KEYS)
        p_NM, m_M, l_LM, alpha_M = softmax_columns(s_NM * scale_M[None, :], m_M, l_LM, exponent_N1)
        store_probabilities(shared, keys, block, p_NM, factors, exponent_N1)
        acc = add_values(shared, keys, block, scale_columns(acc, alpha_M))
        if keys.scales is None:
            barrier.arrive_each_warp(keys.rest.empty.index(block.index))
        block = block.next()
    return acc, m_M, l_LM, block


@gluon.jit
def output_rows(acc):
    """The output as (rows, columns), of which each tensor has 128."""
    acc = rows_first(acc)
    out = ()
    for group in gl.static_range(len(acc) // 2):
        both = gl.join(acc[2 * group], acc[2 * group + 1])
        out = out + (gl.reshape(both, [both.shape[0], COLUMNS]),)
    return out


@gluon.jit
def converting_consumer(io, shared, keys, share, params):
    """Computes the rows of all segments of this program."""
    block = PipelineState.start(params.tile.STAGES)
    whole = share
    while share.x < share.end:
        segment, share = look(share, params)
        if segment.start < segment.stop:
            scale_M = load_scaled_queries(io, shared, params, segment)
            acc, m_M, l_LM, block = stream_stored(shared, keys, segment, block, scale_M, params)
            out = output_rows(acc)
            rows: gl.constexpr = gl.SliceLayout(1, out[0].type.layout)
            l_M = gl.convert_layout(all_sums(l_LM), rows)
            m_M = gl.convert_layout(m_M, rows)
            finish_segment(io, params, segment, out, m_M, l_M, 0, descale=io.v_descale)
    if params.tile.MERGE and params.work.merge.partial_out is not None:
        merge_share(io, params, whole, 0, io.v_descale)
