"""The mainloop of one consumer: streams key tiles past its 64 query rows.

In each step the scores of a tile and the output of the tile before are computed by the matrix unit,
while the warpgroup computes exponentials.

B batch, H query head, M query rows, N keys, D qk dim, E v dim, L lanes that share a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from heedful.kernels.common.constants import LN2
from heedful.kernels.hopper.forward.dropout import drop
from heedful.kernels.hopper.forward.epilogue import store_max_scores
from heedful.kernels.hopper.sm90.block_range import (
    is_masked,
    n_block_at,
    n_block_count,
    needs_mask,
    next_masked,
)
from heedful.kernels.hopper.sm90.mask import apply_mask, apply_mask_if_needed
from heedful.kernels.hopper.sm90.mma import (
    ROWS,
    finish_output,
    no_output,
    queue_output,
    queue_scores,
    scale_output,
)
from heedful.kernels.hopper.sm90.pairs import from_pairs, to_pairs
from heedful.kernels.hopper.sm90.pingpong import pingpong_arrive, pingpong_sync
from heedful.kernels.hopper.sm90.score_mods import add_alibi_and_bias, apply_softcap, load_bias
from heedful.kernels.hopper.sm90.softmax import (
    exponentials,
    lane_peaks,
    lane_sums,
    peaks,
    raised,
    scale_rows,
    shift_of,
    softmax_exact,
    softmax_threshold,
    threshold_limit,
    vote_above,
)
from heedful.kernels.hopper.sm90.speculative_softmax import (
    headroom,
    reference_of,
    references_of_rows_above,
    rescale_from_scores,
    rescore,
    sum_limit,
)


@gluon.jit
def start_bias(params, tile, row, j):
    """Starts loading the bias of key tile j to registers; 0 if there is none."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, params.tile.BLOCK_N, 16])
    return load_bias(
        params.mods, tile, row, j * params.tile.BLOCK_N, ROWS, params.tile.BLOCK_N, layout
    )


@gluon.jit
def apply_score_mods(s_MN, bias_MN, params, tile, row, j, factors):
    """Scores of key tile j with softcap, ALiBi and bias, before the mask. They are raw or, with a
    bias, in natural units. factors: (scale_log2, softcap_scale, unit) of the work tile's scores, as
    of `HopperScoreMods`."""
    _, softcap_scale, unit = factors
    if params.mods.HAS_SOFTCAP:
        s_MN = apply_softcap(s_MN, softcap_scale)
    return add_alibi_and_bias(s_MN, bias_MN, params.mods, tile, row, j * params.tile.BLOCK_N, unit)


@gluon.jit
def score_again(q, kv, q_state, kv_state, bias_MN, blocks, params, tile, row, j, factors):
    """Scores of key tile j, masked, which a warp computes again."""
    gl.static_assert(params.mods.unit is None)
    s_MN = rescore(q, kv.k, q_state, kv_state.k, params.tile.BLOCK_N)
    s_MN = apply_score_mods(s_MN, bias_MN, params, tile, row, j, factors)
    MASKED: gl.constexpr = is_masked(
        params.mask.HAS_LEFT, params.mask.HAS_RIGHT, params.mask.RANGES, params.mask.blocks.SIDE
    )
    if MASKED:
        s_MN = apply_mask_if_needed(s_MN, blocks, params, tile, row, j)
    return s_MN


@gluon.jit
def first_scores(
    q, kv, q_state, kv_state, blocks, params, tile, row, factors, CONSUMER: gl.constexpr
):
    """(scores of the first key tile, masked; its bias; its number)."""
    kv.consumer_wait(kv_state)
    pingpong_sync(params, CONSUMER)
    # S = Q K^T
    s_MN = queue_scores(q, kv.k, q_state, kv_state.k, params.tile.BLOCK_N)
    pingpong_arrive(params, CONSUMER)
    j = n_block_at(params, blocks, 0)
    bias_MN = start_bias(params, tile, row, j)
    s_MN = warpgroup_mma_wait(0, deps=[s_MN])
    kv.consumer_release_k(kv_state)
    s_MN = apply_score_mods(s_MN, bias_MN, params, tile, row, j, factors)
    if needs_mask(blocks, j):
        s_MN = apply_mask(s_MN, blocks, params, tile, row, j)
    return s_MN, bias_MN, j


@gluon.jit
def queue_step(q, kv, q_state, kv_state, p_MN, acc, params, CONSUMER: gl.constexpr):
    """Starts the scores of one key tile and the output of the tile before."""
    pingpong_sync(params, CONSUMER)
    # S = Q K^T
    s_MN = queue_scores(q, kv.k, q_state, kv_state.k, params.tile.BLOCK_N)
    kv.consumer_wait_v(kv_state)
    # O += P V
    acc = queue_output(p_MN, kv.v, kv_state.values(), acc)
    pingpong_arrive(params, CONSUMER)
    return s_MN, acc


@gluon.jit
def softmax_of_tile(s_MN, m_M, l_ML, peaks_ML, scale_log2, params, dtype: gl.constexpr):
    """(p, maximum, row sums, factor of the output so far, whether it must be scaled) after one more
    tile of masked scores. peaks_ML: their `lane_peaks`, if they are known."""
    IS_NATURAL: gl.constexpr = params.mods.unit is not None
    # A bias can mask keys, too.
    MASKS_ROWS: gl.constexpr = IS_NATURAL or is_masked(
        params.mask.HAS_LEFT, params.mask.HAS_RIGHT, params.mask.RANGES, params.mask.blocks.SIDE
    )
    LIMIT: gl.constexpr = threshold_limit(dtype) * (LN2 if IS_NATURAL else 1.0)
    if params.tile.RESCALE == "threshold":
        p_MN, m_M, l_ML, alpha_M, must_rescale = softmax_threshold(
            s_MN,
            m_M,
            l_ML,
            scale_log2,
            LIMIT,
            MASKS_ROWS,
            IS_NATURAL=IS_NATURAL,
            peaks_ML=peaks_ML,
            BY_ROW=params.split.PART_TILES is not None,
        )
        return p_MN, m_M, l_ML + lane_sums(p_MN), alpha_M, must_rescale
    else:
        p_MN, m_M, l_ML, alpha_M = softmax_exact(
            s_MN, m_M, l_ML, scale_log2, MASKS_ROWS, IS_NATURAL
        )
        return p_MN, m_M, l_ML, alpha_M, gl.to_tensor(1)


@gluon.jit
def first_largest(s_MN, p_MN, l_ML, SPECULATIVE: gl.constexpr):
    """The number by which a lane tells the largest score that it holds of each row: that score, or,
    where rows keep old references, its probability, which takes half as many instructions."""
    if SPECULATIVE:
        return raised(p_MN, gl.full(l_ML.shape, 0.0, gl.float32, l_ML.type.layout))
    else:
        return lane_peaks(s_MN)


@gluon.jit
def store_largest(largest_ML, m_M, scale_log2, acc, tile, row, params):
    """Stores the largest score of each row, told as in `first_largest`."""
    largest_M = gl.convert_layout(gl.max(largest_ML, 1), m_M.type.layout)
    if params.tile.RESCALE == "speculative":
        # A row without keys has no reference, and 0.
        largest_M = (m_M + gl.log2(largest_M)) * LN2
    elif params.mods.unit is None:
        largest_M = largest_M * (scale_log2 * LN2)
    store_max_scores(largest_M, acc, tile, row, params)


@gluon.jit
def first_reference(s_MN, scale_log2, params, HEAD: gl.constexpr):
    """The references of rows that have seen these scores alone."""
    if params.tile.RESCALE == "speculative" and params.split.PART_TILES is not None:
        return reference_of(s_MN, scale_log2, HEAD)
    else:
        return peaks(s_MN, scale_log2, params.mods.unit is not None) + HEAD


@gluon.jit
def moved_reference(s_MN, sums_ML, m_M, scale_log2, params, dtype: gl.constexpr):
    """The references to which a warp moves its rows, which have these scores, at least: all rows
    or, where no row may follow another, those whose own sums are above the limit."""
    if params.split.PART_TILES is not None:
        return references_of_rows_above(s_MN, sums_ML, m_M, scale_log2, dtype)
    else:
        return gl.max(s_MN, 1) * scale_log2 + headroom(dtype)


@gluon.jit
def mainloop(q, kv, q_state, kv_state, blocks, params, tile, row, factors, CONSUMER: gl.constexpr):
    """Streams the keys of `blocks` (at least one) past one consumer's rows.

    The scores of a tile and the output of the tile before are computed while exponentials run.
    Returns the unnormalised output, maximum, row sums, and the next KV state.
    """
    dtype: gl.constexpr = kv.v.boxes.dtype
    MASKED: gl.constexpr = is_masked(
        params.mask.HAS_LEFT, params.mask.HAS_RIGHT, params.mask.RANGES, params.mask.blocks.SIDE
    )
    IS_NATURAL: gl.constexpr = params.mods.unit is not None
    SPECULATIVE: gl.constexpr = params.tile.RESCALE == "speculative"
    MASKS_SCORES: gl.constexpr = MASKED and not SPECULATIVE
    HEAD: gl.constexpr = headroom(dtype) if SPECULATIVE else 0.0
    KEEPS_LARGEST: gl.constexpr = params.split.max_scores is not None
    acc = no_output(kv.v, params)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)
    scale_log2, _, _ = factors
    s_MN, bias_MN, j = first_scores(
        q, kv, q_state, kv_state, blocks, params, tile, row, factors, CONSUMER
    )
    m_M = first_reference(s_MN, scale_log2, params, HEAD)
    p_MN = exponentials(s_MN, shift_of(m_M), scale_log2, IS_NATURAL)
    l_ML = lane_sums(p_MN)
    if KEEPS_LARGEST:
        largest_ML = first_largest(s_MN, p_MN, l_ML, SPECULATIVE)
        largest_before_ML = largest_ML
    p_MN = drop(p_MN, params.dropout, tile, row, j * params.tile.BLOCK_N)
    p_MJ = to_pairs(p_MN, dtype)
    kv_before, kv_state = kv_state, kv_state.after_keys()
    steps = n_block_count(params, blocks)
    kv.consumer_wait(kv_state, steps > 1)
    before_ML, sums_ML = l_ML, l_ML
    must_rescale = gl.to_tensor(0)
    step = gl.to_tensor(1)
    while step < steps:
        # ptxas: code that few steps need is outside of the loop. A jump over it would cost every
        # step.
        last = steps - 1
        if SPECULATIVE and MASKED:
            last = gl.minimum(last, next_masked(blocks, step))
        goes = step <= last
        while goes:
            p_dot_MN = from_pairs(p_MJ, dtype, p_layout)
            s_MN, acc = queue_step(q, kv, q_state, kv_state, p_dot_MN, acc, params, CONSUMER)
            j = n_block_at(params, blocks, step)
            bias_MN = start_bias(params, tile, row, j)
            s_MN = warpgroup_mma_wait(len(acc), deps=[s_MN])
            kv.consumer_release_k(kv_state)
            # These scores exist only after every warp is done with the tile before.
            kv.consumer_release_kept_k(kv_before)
            s_MN = apply_score_mods(s_MN, bias_MN, params, tile, row, j, factors)
            if MASKS_SCORES:
                s_MN = apply_mask_if_needed(s_MN, blocks, params, tile, row, j)
            if SPECULATIVE:
                p_MN = exponentials(s_MN, m_M, scale_log2)
                sums_ML = lane_sums(p_MN)
                before_ML = l_ML
                l_ML = l_ML + sums_ML
                if KEEPS_LARGEST:
                    largest_before_ML, largest_ML = largest_ML, raised(p_MN, largest_ML)
                must_rescale = vote_above(sums_ML, sum_limit(dtype))
            else:
                tile_ML = lane_peaks(s_MN) if KEEPS_LARGEST else None
                if KEEPS_LARGEST:
                    largest_ML = gl.maximum(largest_ML, tile_ML)
                p_MN, m_M, l_ML, alpha_M, must_rescale = softmax_of_tile(
                    s_MN, m_M, l_ML, tile_ML, scale_log2, params, dtype
                )
                p_MN = drop(p_MN, params.dropout, tile, row, j * params.tile.BLOCK_N)
            kv_before, kv_state = kv_state, kv_state.next()
            # ptxas: the wait's loop ends a basic block. Otherwise the wait is hoisted over
            # exponentials.
            kv.consumer_wait(kv_state, step + 1 < steps)
            acc = finish_output(acc)
            kv.consumer_release_v(kv_before)
            if not SPECULATIVE:  # noqa: SIM102  (known when compiling, and `and` is not)
                if must_rescale != 0:
                    acc = scale_output(acc, alpha_M)
            p_MJ = to_pairs(p_MN, dtype)
            # ptxas: without a mask, `step < last` is the same, but it merges the two loops into
            # one.
            goes = step < last if MASKED else step + 1 < steps
            if SPECULATIVE:
                goes = goes & (must_rescale == 0)
            step += 1
        if SPECULATIVE:
            if MASKED:  # noqa: SIM102  (known when compiling, and `and` is not)
                if needs_mask(blocks, j):
                    p_MN = apply_mask(p_MN, blocks, params, tile, row, j, 0.0)
                    sums_ML = lane_sums(p_MN)
                    l_ML = before_ML + sums_ML
                    if KEEPS_LARGEST:
                        largest_ML = raised(p_MN, largest_before_ML)
                    must_rescale = vote_above(sums_ML, sum_limit(dtype))
                    p_MJ = to_pairs(p_MN, dtype)
            if must_rescale != 0:
                s_MN = score_again(
                    q, kv, q_state, kv_before, bias_MN, blocks, params, tile, row, j, factors
                )
                top_M = moved_reference(s_MN, sums_ML, m_M, scale_log2, params, dtype)
                p_MN, m_M, before_ML, alpha_M = rescale_from_scores(
                    s_MN, top_M, m_M, before_ML, scale_log2, MASKED
                )
                l_ML = before_ML + lane_sums(p_MN)
                if KEEPS_LARGEST:
                    largest_ML = raised(p_MN, scale_rows(largest_before_ML, alpha_M))
                p_MJ, acc = to_pairs(p_MN, dtype), scale_output(acc, alpha_M)
    kv.consumer_wait_v(kv_state)
    p_dot_MN = from_pairs(p_MJ, dtype, p_layout)
    # O += P V
    acc = finish_output(queue_output(p_dot_MN, kv.v, kv_state.values(), acc))
    kv.consumer_release_kept_k(kv_before)
    if KEEPS_LARGEST:
        store_largest(largest_ML, m_M, scale_log2, acc, tile, row, params)
    if not params.tile.OUT_IN_Q and params.split.held is None:
        q.consumer_release_after_mma(q_state)
    kv.consumer_release_last_v(kv_state)
    return acc, m_M, l_ML, kv_state.after_values()
