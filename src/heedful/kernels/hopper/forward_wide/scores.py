"""The warpgroup that makes probabilities in the forward of wide heads. The scores of the next tile
run while it computes the exponentials of one; other warpgroups multiply these by values.

M query rows, N keys of a tile, L lanes that share a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from heedful.kernels.hopper.forward.mainloop import apply_score_mods
from heedful.kernels.hopper.forward_wide.cluster import (
    arrive_each_warp,
    has_tile,
    meet,
    place_in_cluster,
    release_after_mma,
    wait,
)
from heedful.kernels.hopper.forward_wide.shared import KEYS, PARTS, SLOTS
from heedful.kernels.hopper.sm90.block_range import (
    is_masked,
    n_block_at,
    n_block_count,
    program_n_block_range,
)
from heedful.kernels.hopper.sm90.mask import apply_mask_if_needed
from heedful.kernels.hopper.sm90.mma import ROWS, scores_layout
from heedful.kernels.hopper.sm90.pipeline import PipelineState
from heedful.kernels.hopper.sm90.softmax import lane_sums, softmax_threshold, threshold_limit
from heedful.kernels.hopper.sm90.tile_scheduler import work_tile_at

# Parts of the next tile's scores that are queued before the exponentials of a tile.
AHEAD: gl.constexpr = gl.constexpr(2)


@gluon.jit
def queue_part(shared, s_MN, k_state, base, PART_OF: gl.constexpr):
    """Starts adding the product of a part of queries and keys to a tile's scores, once it is
    loaded. Returns the scores, and the state after them."""
    wait(shared.k_full.index(k_state.index), k_state.phase, base)
    k_DN = shared.k.index(k_state.index).permute((1, 0))
    q = shared.q.index(PART_OF)
    s_MN = warpgroup_mma(q, k_DN, s_MN, use_acc=PART_OF > 0, is_async=True)
    return s_MN, k_state.next()


@gluon.jit
def release_part(shared, s_MN, k_state, base, CLUSTER: gl.constexpr, BEHIND: gl.constexpr):
    """The scores once all but BEHIND products are done; releases the part before these."""
    s_MN = warpgroup_mma_wait(BEHIND, deps=[s_MN])
    release_after_mma(shared.k_empty.index(k_state.index), base, CLUSTER)
    return s_MN, k_state.next()


@gluon.jit
def begin_tile(shared, k_state, base):
    """Starts the first parts of q k^T of a tile. Returns the scores, and the state after them."""
    dtype: gl.constexpr = shared.q.dtype
    s_MN = gl.zeros([ROWS, KEYS], gl.float32, scores_layout(dtype, KEYS))
    for part in gl.static_range(AHEAD):
        s_MN, k_state = queue_part(shared, s_MN, k_state, base, part)
    return s_MN, k_state


@gluon.jit
def finish_tile(shared, s_MN, first, k_state, base, CLUSTER: gl.constexpr):
    """The scores of a tile that `begin_tile` has begun, and the state after them. Each part of the
    keys is released after its product. first, k_state: the tile's first part, and the next one."""
    for part in gl.static_range(AHEAD, PARTS):
        s_MN, k_state = queue_part(shared, s_MN, k_state, base, part)
        s_MN, first = release_part(shared, s_MN, first, base, CLUSTER, AHEAD)
    for part in gl.static_range(AHEAD):
        s_MN, first = release_part(shared, s_MN, first, base, CLUSTER, AHEAD - 1 - part)
    return s_MN, k_state


@gluon.jit
def publish_tile(shared, s_MN, m_M, l_ML, blocks, params, tile, row, step, base):
    """Computes and stores the probabilities of a tile. Returns references and sums."""
    dtype: gl.constexpr = shared.q.dtype
    MASKED: gl.constexpr = is_masked(
        params.mask.HAS_LEFT, params.mask.HAS_RIGHT, params.mask.RANGES, params.mask.blocks.SIDE
    )
    mods = params.mods
    factors = (mods.scale_log2, mods.softcap_scale, mods.unit)
    j = n_block_at(params, blocks, step)
    s_MN = apply_score_mods(s_MN, gl.to_tensor(0), params, tile, row, j, factors)
    s_MN = apply_mask_if_needed(s_MN, blocks, params, tile, row, j)
    p_MN, m_M, l_ML, alpha_M, _moved = softmax_threshold(
        s_MN, m_M, l_ML, mods.scale_log2, threshold_limit(dtype), MASKED
    )
    l_ML = l_ML + lane_sums(p_MN)
    slot = step % SLOTS
    wait(shared.p_empty.index(slot), (step // SLOTS & 1) ^ 1, base)
    shared.alpha.index(slot).store(alpha_M)
    shared.p.index(slot).store(p_MN.to(dtype))
    fence_async_shared()
    arrive_each_warp(shared.p_full.index(slot), base)
    return m_M, l_ML


@gluon.jit
def score_tile(shared, params, tile, split, place, base, CLUSTER: gl.constexpr):
    """Computes the probabilities of a work tile's 64 rows, and stores references and sums."""
    dtype: gl.constexpr = shared.q.dtype
    layout: gl.constexpr = scores_layout(dtype, KEYS)
    row = tile.row + place * ROWS
    blocks = program_n_block_range(params, tile, split, ())
    steps = n_block_count(params, blocks)
    m_M = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    l_ML = lane_sums(gl.zeros([ROWS, KEYS], gl.float32, layout))
    k_state = PipelineState.start(shared.k.shape[0])
    if steps > 0:
        wait(shared.q_full.index(0), 0, base)
        s_MN, after = begin_tile(shared, k_state, base)
        s_MN, k_state = finish_tile(shared, s_MN, k_state, after, base, CLUSTER)
        for step in range(1, steps):
            # S = Q K^T
            next_MN, after = begin_tile(shared, k_state, base)
            m_M, l_ML = publish_tile(
                shared, s_MN, m_M, l_ML, blocks, params, tile, row, step - 1, base
            )
            s_MN, k_state = finish_tile(shared, next_MN, k_state, after, base, CLUSTER)
        m_M, l_ML = publish_tile(
            shared, s_MN, m_M, l_ML, blocks, params, tile, row, steps - 1, base
        )
    shared.stats.index(0).store(m_M)
    shared.stats.index(1).store(gl.sum(l_ML, 1))
    arrive_each_warp(shared.stats_full.index(0), base)


@gluon.jit
def score_consumer(shared, scheduler, params, CLUSTER: gl.constexpr, CONSUMER: gl.constexpr):
    """Scores of a program's work tile, if there is one: packed sequences may have fewer."""
    meet(CLUSTER)
    place = place_in_cluster(CLUSTER)
    index = gl.program_id(0) // CLUSTER
    if has_tile(params, scheduler, index):
        tile, split = work_tile_at(params, scheduler, index)
        score_tile(shared, params, tile, split, place, place << 24, CLUSTER)
    meet(CLUSTER)
