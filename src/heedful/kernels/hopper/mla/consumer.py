"""The two consumers of the MLA decode. A step has two blocks of 64 keys. Each consumer computes the
probabilities of one block, and adds the values of both blocks to its 256 of the output's 512
columns.

    consumer 0   S0          softmax 0   P0 V0 left               P1 V1 left
    consumer 1         S1                P0 V0 right  softmax 1   P1 V1 right
    matrix unit  S0    S1                P0 V0                    P1 V1

So the first block's keys are released while the second block's are still in use, and are loaded
again when those are done. References of rows pass from block to block with the probabilities.

Arguments named kept are boxes of queries that stay in registers over a segment.

M query rows, N keys of a block, E value columns of a consumer, L lanes that share a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from heedful.kernels.common.key_range import key_bounds
from heedful.kernels.hopper.decode.mask import masked
from heedful.kernels.hopper.decode.results import finish_segment, merge_share
from heedful.kernels.hopper.decode.share import look
from heedful.kernels.hopper.mla.boxes import BOXES, HALF, KEYS, VALUE_BOXES, WIDTH, boxes_of
from heedful.kernels.hopper.mla.queries import fetch_box, kept_boxes, load_columns, query_box
from heedful.kernels.hopper.mla.shared import REST, box_in_turn
from heedful.kernels.hopper.mla.thread_order import (
    OF_ROWS,
    do_all_merge,
    finish_in_thread_order,
    is_in_thread_order,
    merge_share_by_turns,
)
from heedful.kernels.hopper.sm90 import barrier
from heedful.kernels.hopper.sm90.barrier import FIRST_NAMED, arrive_named, sync_named
from heedful.kernels.hopper.sm90.compat import opaque
from heedful.kernels.hopper.sm90.mma import ROWS, scores_layout
from heedful.kernels.hopper.sm90.softmax import (
    lane_sums,
    scale_rows,
    softmax_threshold,
    threshold_limit,
    vote_above,
)

# Named barriers: the first block's scores are queued; the second consumer's product of its own
# block is queued.
TURN_BARRIER: gl.constexpr = FIRST_NAMED
ORDER_BARRIER: gl.constexpr = gl.constexpr(FIRST_NAMED.value + 1)


@gluon.jit
def load_query_half(io, shared, params, segment, segments, CONSUMER: gl.constexpr):
    """Loads the queries of a segment to shared memory. Each consumer loads a part of them."""
    phase = segments & 1
    if io.q_map is not None:
        barrier.wait(shared.q_empty.index(0), phase ^ 1)
        full = shared.q_full.index(0)
        FIRST: gl.constexpr = CONSUMER * VALUE_BOXES // 2
        BYTES: gl.constexpr = ROWS * WIDTH * 2
        mbarrier.expect(full, BYTES * (VALUE_BOXES // 2 + 1 - CONSUMER))
        for i in gl.static_range(VALUE_BOXES // 2):
            box = boxes_of(shared.q).index(FIRST + i)
            fetch_box(io, box, full, params, segment, FIRST + i)
        if CONSUMER == 0:
            fetch_box(io, shared.q_rest.index(0), full, params, segment, VALUE_BOXES)
        barrier.wait(full, phase)
    else:
        store_query_half(io, shared, params, segment, phase, CONSUMER)


@gluon.jit
def store_query_half(io, shared, params, segment, phase, CONSUMER: gl.constexpr):
    """The same without a tensor map."""
    q_ME = load_columns(io, params, segment, CONSUMER * HALF, HALF)
    barrier.wait(shared.q_empty.index(0), phase ^ 1)
    shared.q.index(CONSUMER).store(q_ME)
    if CONSUMER == 0:
        rest = load_columns(io, params, segment, VALUE_BOXES * WIDTH, WIDTH)
        shared.q_rest.index(0).store(rest)
    fence_async_shared()
    barrier.arrive_each_warp(shared.q_full.index(0))
    barrier.wait(shared.q_full.index(0), phase)


@gluon.jit
def queue_box(shared, kept, phase, zero, s_MN, BLOCK: gl.constexpr, TURN: gl.constexpr):
    """Starts adding the product with one box of keys to its block's scores, once the box is
    loaded."""
    BOX: gl.constexpr = box_in_turn(BLOCK, TURN)
    barrier.wait(shared.full(BLOCK, BOX), phase)
    k_DN = shared.k_box(BLOCK, BOX, zero).permute((1, 0))
    if len(kept) > BOXES - 1 - BOX:
        q_MD = kept[BOXES - 1 - BOX]
    else:
        q_MD = query_box(shared, BOX, zero)
    return warpgroup_mma(q_MD, k_DN, s_MN, use_acc=TURN > 0, is_async=True)


@gluon.jit
def no_scores(dtype: gl.constexpr):
    """Scores of a block, all 0."""
    return gl.zeros([ROWS, KEYS], gl.float32, scores_layout(dtype, KEYS))


@gluon.jit
def queue_boxes(
    shared, kept, phase, zero, s_MN, BLOCK: gl.constexpr, FIRST: gl.constexpr, END: gl.constexpr
):
    """Starts q k^T of a block's boxes [FIRST, END), in the order of `box_in_turn`."""
    for turn in gl.static_range(FIRST, END):
        s_MN = queue_box(shared, kept, phase, zero, s_MN, BLOCK, turn)
    return s_MN


@gluon.jit
def queue_block_scores(shared, kept, phase, zero, BLOCK: gl.constexpr):
    """Starts q k^T of a block, box by box."""
    return queue_boxes(shared, kept, phase, zero, no_scores(shared.q.dtype), BLOCK, 0, BOXES)


@gluon.jit
def follow(acc_ME, m_M, l_ML, top):
    """(output, references, sums) of a consumer, after it has taken the references of the other
    consumer's block, which are never lower."""
    top_M = top.load(m_M.type.layout)
    must_rescale = vote_above(top_M - m_M, 0)
    if must_rescale != 0:
        # A row without a reference has nothing to be scaled.
        alpha_M = gl.where(m_M == float("-inf"), 1.0, gl.exp2(m_M - top_M))
        acc_ME = scale_rows(acc_ME, alpha_M)
        l_ML = scale_rows(l_ML, alpha_M)
    return acc_ME, top_M, l_ML


@gluon.jit
def publish(shared, p_MN, m_M, BLOCK: gl.constexpr):
    """Stores a block's probabilities and references for the other consumer."""
    shared.probabilities(BLOCK).store(p_MN)
    shared.top.index(BLOCK).store(m_M)
    fence_async_shared()
    barrier.arrive_each_warp(shared.p_full.index(BLOCK))


@gluon.jit
def queue_values(shared, zero, p, acc_ME, BLOCK: gl.constexpr, CONSUMER: gl.constexpr):
    """Starts adding p times a consumer's half of a block's values."""
    return warpgroup_mma(p, shared.half(BLOCK, CONSUMER, zero), acc_ME, is_async=True)


@gluon.jit
def finish_values(
    shared, acc_ME, BLOCK: gl.constexpr, CONSUMER: gl.constexpr, BEHIND: gl.constexpr = 0
):
    """The output after a half of a block was added; releases that half. BEHIND: products that were
    queued since."""
    acc_ME = warpgroup_mma_wait(BEHIND, deps=[acc_ME])
    barrier.arrive_after_mma(shared.empty(BLOCK, 0 if BLOCK == CONSUMER else 1))
    return acc_ME


@gluon.jit
def first_scores(shared, kept, phase, zero, s_MN, DONE: gl.constexpr):
    """The first block's scores, of which DONE boxes are already queued. Those of the second block
    may be queued after them."""
    # S0 = Q K0^T
    s_MN = queue_boxes(shared, kept, phase, zero, s_MN, 0, DONE, BOXES)
    arrive_named(TURN_BARRIER)
    s_MN = warpgroup_mma_wait(0, deps=[s_MN])
    barrier.arrive_after_mma(shared.empty(0, REST))
    return s_MN


@gluon.jit
def first_step(
    shared,
    kept,
    params,
    segment,
    bounds,
    col,
    phase,
    s_MN,
    acc_ME,
    m_M,
    l_ML,
    AHEAD: gl.constexpr,
):
    """Consumer 0's part of a step, from the first block's scores on. AHEAD: boxes of the next step
    that are queued before it waits for its last product; 0 if there is no next step, or if it is
    not begun here."""
    dtype: gl.constexpr = shared.q.dtype
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_ME.type.layout, 2)
    zero = opaque(0)
    s_MN = masked(s_MN, params, segment, bounds, col)
    p_MN, m_M, l_ML, alpha_M, must_rescale = softmax_threshold(
        s_MN, m_M, l_ML, params.scale_log2, threshold_limit(dtype), True
    )
    l_ML = l_ML + lane_sums(p_MN)
    p_MN = p_MN.to(dtype)
    publish(shared, p_MN, m_M, 0)
    if must_rescale != 0:
        acc_ME = scale_rows(acc_ME, alpha_M)
    # O += P0 V0
    acc_ME = queue_values(shared, zero, gl.convert_layout(p_MN, p_layout), acc_ME, 0, 0)
    acc_ME = finish_values(shared, acc_ME, 0, 0)
    barrier.wait(shared.p_full.index(1), phase)
    acc_ME, m_M, l_ML = follow(acc_ME, m_M, l_ML, shared.top.index(1))
    if params.tile.IN_ORDER:
        sync_named(ORDER_BARRIER)
    # O += P1 V1
    acc_ME = queue_values(shared, zero, shared.probabilities(1, zero), acc_ME, 1, 0)
    if AHEAD > 0:
        # The matrix unit computes these while the boxes of values are released.
        s_MN = queue_boxes(shared, kept, phase ^ 1, zero, no_scores(dtype), 0, 0, AHEAD)
        acc_ME = finish_values(shared, acc_ME, 1, 0, AHEAD)
        s_MN = first_scores(shared, kept, phase ^ 1, zero, s_MN, AHEAD)
    else:
        acc_ME = finish_values(shared, acc_ME, 1, 0)
    return s_MN, acc_ME, m_M, l_ML


@gluon.jit
def second_step(shared, kept, params, segment, bounds, col, phase, acc_ME, m_M, l_ML):
    """Consumer 1's part of a step."""
    dtype: gl.constexpr = shared.q.dtype
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_ME.type.layout, 2)
    # Without this wait, the matrix unit would alternate between both blocks' scores, and be idle
    # during the first softmax.
    sync_named(TURN_BARRIER)
    zero = opaque(0)
    # S1 = Q K1^T
    s_MN = queue_block_scores(shared, kept, phase, zero, 1)
    barrier.wait(shared.p_full.index(0), phase)
    acc_ME, m_M, l_ML = follow(acc_ME, m_M, l_ML, shared.top.index(0))
    # O += P0 V0
    acc_ME = queue_values(shared, zero, shared.probabilities(0, zero), acc_ME, 0, 1)
    s_MN = warpgroup_mma_wait(1, deps=[s_MN])
    s_MN = masked(s_MN, params, segment, bounds, col + KEYS)
    p_MN, m_M, l_ML, alpha_M, must_rescale = softmax_threshold(
        s_MN, m_M, l_ML, params.scale_log2, threshold_limit(dtype), True
    )
    l_ML = l_ML + lane_sums(p_MN)
    p_MN = p_MN.to(dtype)
    publish(shared, p_MN, m_M, 1)
    acc_ME = finish_values(shared, acc_ME, 0, 1)
    if must_rescale != 0:
        acc_ME = scale_rows(acc_ME, alpha_M)
    # O += P1 V1
    acc_ME = queue_values(shared, zero, gl.convert_layout(p_MN, p_layout), acc_ME, 1, 1)
    if params.tile.IN_ORDER:
        arrive_named(ORDER_BARRIER)
    acc_ME = finish_values(shared, acc_ME, 1, 1)
    return acc_ME, m_M, l_ML


@gluon.jit
def no_output(dtype: gl.constexpr):
    """A consumer's half of an output, all 0."""
    return gl.zeros([ROWS, HALF], gl.float32, scores_layout(dtype, HALF))


@gluon.jit
def first_steps(shared, kept, params, segment, bounds, visit, acc_ME, m_M, l_ML):
    """A segment of consumer 0, step by step."""
    dtype: gl.constexpr = shared.q.dtype
    for number in range(segment.start, segment.stop):
        col = number * params.tile.BLOCK_N
        phase = visit & 1
        s_MN = first_scores(shared, kept, phase, opaque(0), no_scores(dtype), 0)
        _s, acc_ME, m_M, l_ML = first_step(
            shared, kept, params, segment, bounds, col, phase, s_MN, acc_ME, m_M, l_ML, 0
        )
        visit += 1
    return visit, acc_ME, m_M, l_ML


@gluon.jit
def first_steps_ahead(shared, kept, params, segment, bounds, visit, acc_ME, m_M, l_ML):
    """A segment of consumer 0, where each step begins the scores of the next one."""
    AHEAD: gl.constexpr = params.tile.AHEAD
    dtype: gl.constexpr = shared.q.dtype
    first, last = visit, segment.stop - 1
    s_MN = first_scores(shared, kept, visit & 1, opaque(0), no_scores(dtype), 0)
    for number in range(segment.start, last):
        col = number * params.tile.BLOCK_N
        s_MN, acc_ME, m_M, l_ML = first_step(
            shared, kept, params, segment, bounds, col, visit & 1, s_MN, acc_ME, m_M, l_ML, AHEAD
        )
        visit += 1
    col = last * params.tile.BLOCK_N
    _s, acc_ME, m_M, l_ML = first_step(
        shared, kept, params, segment, bounds, col, visit & 1, s_MN, acc_ME, m_M, l_ML, 0
    )
    return first + (segment.stop - segment.start), acc_ME, m_M, l_ML


@gluon.jit
def second_steps(shared, kept, params, segment, bounds, visit, acc_ME, m_M, l_ML):
    """A segment of consumer 1."""
    for number in range(segment.start, segment.stop):
        col = number * params.tile.BLOCK_N
        phase = visit & 1
        acc_ME, m_M, l_ML = second_step(
            shared, kept, params, segment, bounds, col, phase, acc_ME, m_M, l_ML
        )
        visit += 1
    return visit, acc_ME, m_M, l_ML


@gluon.jit
def all_sums(shared, l_ML, segments, layout: gl.constexpr, CONSUMER: gl.constexpr):
    """Sums of rows over the blocks of both consumers, whose references are equal by now."""
    l_M = gl.convert_layout(gl.sum(l_ML, 1), layout)
    shared.sums.index(CONSUMER).store(l_M)
    barrier.arrive_each_warp(shared.sums_full.index(0))
    barrier.wait(shared.sums_full.index(0), segments & 1)
    return l_M + shared.sums.index(1 - CONSUMER).load(layout)


@gluon.jit
def mla_consumer(io, shared, share, params, CONSUMER: gl.constexpr):
    """Computes columns [256 CONSUMER, 256 CONSUMER + 256) of all segments of this program."""
    dtype: gl.constexpr = shared.q.dtype
    s_layout: gl.constexpr = scores_layout(dtype, KEYS)
    visit = gl.to_tensor(0)
    segments = gl.to_tensor(0)
    whole = share
    while share.x < share.end:
        segment, share = look(share, params)
        if segment.start < segment.stop:
            load_query_half(io, shared, params, segment, segments, CONSUMER)
            operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
            kept = kept_boxes(shared, params.tile.QUERY_BOXES, operand)
            group = params.shape.heads_q // params.shape.heads_k
            row = segment.row0 // group
            bounds = key_bounds(row, row, segment.seq.off, segment.seq.len_k, params.mask)
            acc_ME = no_output(dtype)
            m_M = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
            l_ML = lane_sums(gl.zeros([ROWS, KEYS], gl.float32, s_layout))
            if CONSUMER == 1:
                visit, acc_ME, m_M, l_ML = second_steps(
                    shared, kept, params, segment, bounds, visit, acc_ME, m_M, l_ML
                )
            elif params.tile.AHEAD > 0:
                visit, acc_ME, m_M, l_ML = first_steps_ahead(
                    shared, kept, params, segment, bounds, visit, acc_ME, m_M, l_ML
                )
            else:
                visit, acc_ME, m_M, l_ML = first_steps(
                    shared, kept, params, segment, bounds, visit, acc_ME, m_M, l_ML
                )
            barrier.arrive_after_mma(shared.q_empty.index(0))
            if is_in_thread_order(params.tile.MERGE):
                l_M = all_sums(shared, l_ML, segments, OF_ROWS, CONSUMER)
                m_M = gl.convert_layout(m_M, OF_ROWS)
                finish_in_thread_order(io, params, segment, (acc_ME,), m_M, l_M, CONSUMER, False)
            else:
                rows: gl.constexpr = gl.SliceLayout(1, acc_ME.type.layout)
                l_M = all_sums(shared, l_ML, segments, rows, CONSUMER)
                m_M = gl.convert_layout(m_M, rows)
                finish_segment(io, params, segment, (acc_ME,), m_M, l_M, CONSUMER)
            segments += 1
    if do_all_merge(params.tile.MERGE) and params.work.merge.partial_out is not None:
        if is_in_thread_order(params.tile.MERGE):
            merge_share_by_turns(io, params, whole, CONSUMER, False)
        else:
            merge_share(io, params, whole, CONSUMER)
