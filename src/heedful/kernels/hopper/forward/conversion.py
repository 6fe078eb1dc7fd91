"""Warps that convert keys and values of 8 bits beside queries of 16.

The matrix unit multiplies operands of one dtype, which it reads from shared memory. So tiles of a
quantised cache are loaded as they are stored, to rings of their own. Spare warps beside the
producer's convert them to the rings that the consumers read, in the order of visits. Keys get the
dtype of the queries. Values get float16, which the probabilities have, too. Both hold e4m3 exactly;
descales are applied to the scale of the scores and to the output. To consumers it is as if TMA had
loaded 16 bits.

N keys, D dim of keys or values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from heedful.kernels.args.hopper import HopperParams
from heedful.kernels.hopper.fp8.descale import at_head
from heedful.kernels.hopper.sm90.block_range import n_block_count, program_n_block_range
from heedful.kernels.hopper.sm90.pipeline import PipelineState
from heedful.kernels.hopper.sm90.tile_scheduler import SCHEDULER_STAGES, current_work_tile

# bfloat16 takes four instructions for two values, float16 one.
KEY_WARPS: gl.constexpr = gl.constexpr(2)
VALUE_WARPS: gl.constexpr = gl.constexpr(1)
# Values that a thread has at once.
HELD: gl.constexpr = gl.constexpr(64)


@gluon.constexpr_function
def converted_layout(dim, warps):
    """Eight values of a row for each thread: 16 bytes once they are converted. No two threads of a
    quarter warp then use the same banks."""
    across = min(32, dim // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def rows_at_once(rows, dim, warps):
    """Rows of a tile that are converted at once; a multiple of eight, after which a swizzle
    repeats."""
    return max(8, min(rows, HELD.value * 32 * warps // dim))


@gluon.jit
def convert_tile(stored, converted, stored_state, state, NEGATES: gl.constexpr):
    """Waits for a stored tile and for an empty stage, which it fills with the tile's values, or
    these times -1."""
    N: gl.constexpr = converted.rows
    D: gl.constexpr = converted.dim
    ROWS: gl.constexpr = rows_at_once(N, D, gl.num_warps())
    layout: gl.constexpr = converted_layout(D, gl.num_warps())
    dtype: gl.constexpr = converted.boxes.dtype
    stored.consumer_wait(stored_state)
    full = converted.producer_acquire(state, state)
    source = stored.tile(stored_state)
    target = converted.tile(state)
    for part in gl.static_range(N // ROWS):
        x_ND = source.slice(part * ROWS, ROWS).load(layout)
        if dtype == gl.bfloat16:
            # By float32: Triton's own way takes two instructions more.
            x_ND = x_ND.to(gl.float32)
        x_ND = x_ND.to(dtype)
        target.slice(part * ROWS, ROWS).store(-x_ND if NEGATES else x_ND)
    stored.consumer_release(stored_state)
    # The matrix unit reads by a proxy of its own.
    fence_async_shared()
    mbarrier.arrive(full, count=1)


@gluon.jit
def convert_tiles(stored, converted, stored_state, state, steps, NEGATES: gl.constexpr):
    """Converts so many tiles; returns the states after them."""
    for _ in range(steps):
        convert_tile(stored, converted, stored_state, state, NEGATES)
        stored_state, state = stored_state.next(), state.next()
    return stored_state, state


@gluon.jit
def convert(stored, converted, descale, scheduler, params: HopperParams, SIGNED: gl.constexpr):
    """Converts the keys, or the values, of every work tile in the order in which the producer loads
    them. SIGNED: the sign of their descale is theirs, since the scale of scores is positive."""
    stored_state = PipelineState.start(stored.full.shape[0])
    state = PipelineState.start(converted.full.shape[0])
    scheduler_state = PipelineState.start(SCHEDULER_STAGES)
    index = scheduler.get_current_work(gl.program_id(0) - gl.num_programs(0), scheduler_state)
    while index < scheduler.count:
        tile, split = current_work_tile(params, scheduler, index, scheduler_state)
        steps = n_block_count(params, program_n_block_range(params, tile, split, ()))
        is_negative = gl.to_tensor(False)
        if SIGNED:
            is_negative = at_head(descale, tile) < 0.0
        if is_negative:
            stored_state, state = convert_tiles(stored, converted, stored_state, state, steps, True)
        else:
            stored_state, state = convert_tiles(
                stored, converted, stored_state, state, steps, False
            )
        scheduler_state = scheduler_state.next()
        index = scheduler.get_current_work(index, scheduler_state)


@gluon.jit
def score_factors_of(params: HopperParams, tile):
    """The factors of a work tile's scores, see `mainloop.score_factors`: that of raw scores has the
    size of the keys' descale."""
    scale_log2 = gl.to_tensor(params.mods.scale_log2)
    softcap_scale = gl.to_tensor(params.mods.softcap_scale)
    unit = gl.to_tensor(1.0) if params.mods.unit is None else gl.to_tensor(params.mods.unit)
    if params.fp8.descales.k.ptr is not None:
        # A masked score, an infinity, times 0 would be NaN.
        factor = gl.maximum(gl.abs(at_head(params.fp8.descales.k, tile)), 1e-30)
        if params.mods.HAS_SOFTCAP:
            softcap_scale *= factor
        else:
            scale_log2 *= factor
            unit *= factor
    return scale_log2, softcap_scale, unit
