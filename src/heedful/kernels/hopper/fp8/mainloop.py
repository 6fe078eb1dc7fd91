"""The mainloop of one fp8 consumer: as forward/mainloop.py, with P in e4m3 and output sums that are
promoted to float32.

M query rows, N keys, D qk dim, E v dim, L lanes that share a row, C sums of a lane's row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from heedful.kernels.hopper.fp8.softmax import (
    E4M3_BITS,
    FINITE_BITS,
    LIMIT,
    from_words,
    part_sums,
    reference,
    to_words,
)
from heedful.kernels.hopper.sm90.block_range import (
    n_block_at,
    n_block_count,
    needs_mask,
    next_masked,
)
from heedful.kernels.hopper.sm90.mask import apply_mask
from heedful.kernels.hopper.sm90.mma import ROWS, queue_scores, scores_layout
from heedful.kernels.hopper.sm90.pingpong import pingpong_arrive, pingpong_sync
from heedful.kernels.hopper.sm90.promotion import cleared, store_sums, with_sums
from heedful.kernels.hopper.sm90.score_mods import apply_softcap
from heedful.kernels.hopper.sm90.softmax import (
    exponentials,
    scale_rows,
    shift_of,
    softmax_threshold,
    vote_above,
)
from heedful.kernels.hopper.sm90.speculative_softmax import (
    TOP_LOG2,
    rescale_from_probabilities,
    rescale_from_scores,
    rescore,
)


@gluon.jit
def apply_score_mods(s_MN, blocks, params, tile, row, j, factors, MAY_MASK: gl.constexpr):
    """Raw scores of key tile j with softcap and, if MAY_MASK, with unseen keys masked. factors: the
    result of `score_factors`."""
    softcap_scale, scale_log2 = factors
    if params.mods.HAS_SOFTCAP:
        s_MN = apply_softcap(s_MN, softcap_scale)
    if MAY_MASK:
        is_partial = needs_mask(blocks, j)
        if is_partial:
            # Masked scores get the infinity that the scale, which may be negative, turns into -inf.
            if scale_log2 < 0.0:
                s_MN = apply_mask(s_MN, blocks, params, tile, row, j, float("inf"))
            else:
                s_MN = apply_mask(s_MN, blocks, params, tile, row, j)
    return s_MN


@gluon.jit
def queue_output(words, v, kv_state, acc_ME, adds):
    """Starts p, packed in words, times one tile of values. It is added to the output, or replaces
    it."""
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_ME.type.layout, 4)
    p_MN = from_words(words, p_layout)
    v_NE = v.tile(kv_state).permute((1, 0))
    return warpgroup_mma(p_MN, v_NE, acc_ME, use_acc=adds, is_async=True)


@gluon.jit
def resolve_overflow(
    q, k, q_state, k_state, p_MN, sums_MCL, m_M, l_ML, blocks, params, tile, row, j, factors
):
    """Handles a warp's sums above the limit. Returns p, its sums, references, the sums before, and
    the factor of these and of the output so far. Scores are computed again only if p has become
    infinite."""
    MASKED: gl.constexpr = params.mask.HAS_RIGHT or params.mask.HAS_LEFT
    if vote_above(sums_MCL, FINITE_BITS) == 0:
        p_MN, m_M, l_ML, alpha_M = rescale_from_probabilities(p_MN, m_M, l_ML)
        sums_ML = gl.sum(part_sums(p_MN), 1)
    else:
        s_MN = rescore(q, k, q_state, k_state, params.tile.BLOCK_N)
        s_MN = apply_score_mods(s_MN, blocks, params, tile, row, j, factors, MASKED)
        _, scale_log2 = factors
        top_M = reference(s_MN, scale_log2)
        p_MN, m_M, l_ML, alpha_M = rescale_from_scores(s_MN, top_M, m_M, l_ML, scale_log2, True)
        sums_ML = gl.sum(part_sums(p_MN), 1)
    return p_MN, sums_ML, m_M, l_ML, alpha_M


@gluon.jit
def promote(sums, acc_ME, sum_ME, m_M, base_M, products, params):
    """After every PROMOTION_INTERVAL products, adds the accumulators to the float32 sums. Returns
    accumulators, sums in registers, and the reference of sums in shared memory."""
    if products % params.fp8.PROMOTION_INTERVAL == 0:
        if params.fp8.SUMS_IN_REGS:
            sum_ME = sum_ME + acc_ME
        else:
            # The first time there is nothing to add to, but the last output must have left the
            # memory.
            if products > params.fp8.PROMOTION_INTERVAL:
                acc_ME = with_sums(sums, acc_ME, m_M, base_M)
            else:
                tma.store_wait(0)
                gl.barrier()
            store_sums(sums, acc_ME)
            base_M = m_M
    return acc_ME, sum_ME, base_M


@gluon.jit
def first_scores(
    q, kv, q_state, kv_state, blocks, params, tile, row, j, factors, CONSUMER: gl.constexpr
):
    """Scores of the first key tile, j, masked."""
    kv.consumer_wait(kv_state)
    pingpong_sync(params, CONSUMER)
    # S = Q K^T
    s_MN = queue_scores(q, kv.k, q_state, kv_state.k, params.tile.BLOCK_N)
    pingpong_arrive(params, CONSUMER)
    s_MN = warpgroup_mma_wait(0, deps=[s_MN])
    kv.consumer_release_k(kv_state)
    # Without a mask, only the last tile can have keys past the end.
    return apply_score_mods(s_MN, blocks, params, tile, row, j, factors, True)


@gluon.jit
def cleared_output(v, params):
    """(accumulators, float32 sums in registers, if they are there), all 0."""
    layout: gl.constexpr = scores_layout(v.boxes.dtype, v.rows)
    acc_ME = cleared(ROWS, v.rows, layout)
    sum_ME = acc_ME
    if params.fp8.SUMS_IN_REGS:
        sum_ME = cleared(ROWS, v.rows, layout)
    return acc_ME, sum_ME


@gluon.jit
def queue_step(
    q, kv, q_state, kv_state, kv_before, words, acc_ME, adds, params, CONSUMER: gl.constexpr
):
    """(scores of one key tile, the running output of the tile before)."""
    pingpong_sync(params, CONSUMER)
    # S = Q K^T
    s_MN = queue_scores(q, kv.k, q_state, kv_state.k, params.tile.BLOCK_N)
    kv.consumer_wait_v(kv_state)
    # O += P V
    acc_ME = queue_output(words, kv.v, kv_state.values(), acc_ME, adds)
    pingpong_arrive(params, CONSUMER)
    s_MN = warpgroup_mma_wait(1, deps=[s_MN])
    kv.consumer_release_k(kv_state)
    # These scores exist only after every warp is done with the stage before.
    kv.consumer_release_kept_k(kv_before)
    return s_MN, acc_ME


@gluon.jit
def mainloop_fp8(
    q, kv, sums, q_state, kv_state, blocks, params, tile, row, factors, CONSUMER: gl.constexpr
):
    """As `mainloop`, but it returns while the last product runs: the inputs of `finish_fp8`,
    references, row sums, and the next KV state."""
    INTERVAL: gl.constexpr = params.fp8.PROMOTION_INTERVAL
    MASKED: gl.constexpr = params.mask.HAS_RIGHT or params.mask.HAS_LEFT
    # ptxas: promotion after the innermost loop and before masks and rescaling has fewer jumps.
    PROMOTES_NEARBY: gl.constexpr = params.fp8.SUMS_IN_REGS and MASKED
    SPECULATIVE: gl.constexpr = params.tile.RESCALE == "speculative"
    _, scale_log2 = factors
    k, v = kv.k, kv.v
    acc_ME, sum_ME = cleared_output(v, params)
    steps = n_block_count(params, blocks)
    j = n_block_at(params, blocks, 0)
    s_MN = first_scores(q, kv, q_state, kv_state, blocks, params, tile, row, j, factors, CONSUMER)
    m_M = reference(s_MN, scale_log2)
    base_M = m_M
    p_MN = exponentials(s_MN, shift_of(m_M), scale_log2)
    sums_MCL = part_sums(p_MN)
    l_ML = gl.sum(sums_MCL, 1)
    words = to_words(p_MN)
    before_ML = l_ML
    kv_before = kv_state
    kv_state = kv_state.after_keys()
    kv.consumer_wait(kv_state, steps > 1)
    must_rescale = gl.to_tensor(0)
    alpha_M = gl.full(m_M.shape, 1.0, gl.float32, m_M.type.layout)
    step = gl.to_tensor(1)
    while step < steps:
        # ptxas: code that few steps need is outside of the loop. A jump over it would cost every
        # step. So the loop ends at `last`, the next step that needs it.
        last = steps - 1
        if SPECULATIVE and MASKED:
            last = gl.minimum(last, next_masked(blocks, step))
        goes = step <= last
        while goes:
            counts = gl.to_tensor(True)
            while counts:
                if not SPECULATIVE:
                    words = to_words(p_MN)
                adds = (step - 1) % INTERVAL != 0
                s_MN, acc_ME = queue_step(
                    q, kv, q_state, kv_state, kv_before, words, acc_ME, adds, params, CONSUMER
                )
                j = blocks.end - 1 - step
                if SPECULATIVE:
                    s_MN = apply_score_mods(s_MN, blocks, params, tile, row, j, factors, False)
                    p_MN = exponentials(s_MN, m_M, scale_log2)
                    sums_MCL = part_sums(p_MN)
                    before_ML = l_ML
                    l_ML = l_ML + gl.sum(sums_MCL, 1)
                    if not params.fp8.VOTES_LAST:
                        must_rescale = vote_above(sums_MCL, E4M3_BITS)
                    words = to_words(p_MN)
                else:
                    s_MN = apply_score_mods(s_MN, blocks, params, tile, row, j, factors, MASKED)
                    p_MN, m_M, l_ML, alpha_M, must_rescale = softmax_threshold(
                        s_MN, m_M, l_ML, scale_log2, LIMIT, MASKED, TOP_LOG2, False, True
                    )
                    l_ML = l_ML + gl.sum(part_sums(p_MN), 1)
                kv_before = kv_state
                kv_state = kv_state.next()
                # ptxas: the wait's loop ends a basic block. Otherwise the wait is hoisted over
                # exponentials.
                kv.consumer_wait(kv_state, step + 1 < steps)
                acc_ME = warpgroup_mma_wait(0, deps=[acc_ME])
                if params.fp8.VOTES_LAST:
                    must_rescale = vote_above(sums_MCL, E4M3_BITS)
                kv.consumer_release_v(kv_before)
                counts = (must_rescale == 0) & (step < last) & (step % INTERVAL != 0)
                step += 1
            if PROMOTES_NEARBY:
                acc_ME, sum_ME, base_M = promote(
                    sums, acc_ME, sum_ME, m_M, base_M, step - 1, params
                )
                goes = (must_rescale == 0) & (step <= last)
            else:
                goes = gl.to_tensor(False)
        if SPECULATIVE:
            j = n_block_at(params, blocks, step - 1)
            if MASKED:  # noqa: SIM102  (known when compiling, and `and` is not)
                if needs_mask(blocks, j):
                    p_MN = apply_mask(p_MN, blocks, params, tile, row, j, 0.0)
                    sums_MCL, words = part_sums(p_MN), to_words(p_MN)
                    l_ML = before_ML + gl.sum(sums_MCL, 1)
                    must_rescale = vote_above(sums_MCL, E4M3_BITS)
            if must_rescale != 0:
                p_MN, sums_ML, m_M, before_ML, alpha_M = resolve_overflow(
                    q,
                    k,
                    q_state,
                    kv_before.k,
                    p_MN,
                    sums_MCL,
                    m_M,
                    before_ML,
                    blocks,
                    params,
                    tile,
                    row,
                    j,
                    factors,
                )
                l_ML = before_ML + sums_ML
                words = to_words(p_MN)
                acc_ME = scale_rows(acc_ME, alpha_M)
                if params.fp8.SUMS_IN_REGS:
                    sum_ME = scale_rows(sum_ME, alpha_M)
        elif must_rescale != 0:
            acc_ME = scale_rows(acc_ME, alpha_M)
        if not PROMOTES_NEARBY:
            acc_ME, sum_ME, base_M = promote(sums, acc_ME, sum_ME, m_M, base_M, step - 1, params)
    if not SPECULATIVE:
        words = to_words(p_MN)
    kv.consumer_wait_v(kv_state)
    adds = (steps - 1) % INTERVAL != 0
    # O += P V
    running_ME = queue_output(words, v, kv_state.values(), acc_ME, adds)
    return (running_ME, sum_ME, base_M, kv_before), m_M, l_ML, kv_state


@gluon.jit
def finish_fp8(q, kv, sums, q_state, kv_state, rest, m_M, blocks, params):
    """The unnormalised output: waits for the last product, frees the tiles that it read, adds the
    sums."""
    running_ME, sum_ME, base_M, kv_before = rest
    acc_ME = warpgroup_mma_wait(0, deps=[running_ME])
    kv.consumer_release_kept_k(kv_before)
    q.consumer_release_after_mma(q_state)
    kv.consumer_release_last_v(kv_state)
    if params.fp8.SUMS_IN_REGS:
        return (acc_ME + sum_ME,)
    else:
        if n_block_count(params, blocks) > params.fp8.PROMOTION_INTERVAL:
            acc_ME = with_sums(sums, acc_ME, m_M, base_M)
        return (acc_ME,)
