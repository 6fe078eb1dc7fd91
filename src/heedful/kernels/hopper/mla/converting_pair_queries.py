"""Queries of the MLA decode over latent vectors of 8 bits with two consumers. Each consumer brings
half of them to shared memory as they are, finds each row's largest with the other one, and scales
them there (`converting_consumer.load_scaled_queries` says why).

M query rows, D columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from heedful.kernels.hopper.decode.results import scale_of
from heedful.kernels.hopper.mla.boxes import WIDTH
from heedful.kernels.hopper.mla.converting_consumer import query_factors, row_tops, store_scaled
from heedful.kernels.hopper.mla.converting_pair_shared import (
    BOTH_BARRIER,
    HALF_BOX,
    OPEN,
    PARTS,
    store_flag,
)
from heedful.kernels.hopper.mla.queries import fetch_box, load_dims, query_layout
from heedful.kernels.hopper.sm90 import barrier
from heedful.kernels.hopper.sm90.barrier import sync_named
from heedful.kernels.hopper.sm90.compat import barrier as thread_barrier
from heedful.kernels.hopper.sm90.compat import reinterpret
from heedful.kernels.hopper.sm90.mma import ROWS


@gluon.jit
def store_part(shared, q_MD, part):
    """Stores 64 columns of queries beside columns of 8 bits as they are, in two boxes that have the
    order of the left operands beside them."""
    M: gl.constexpr = q_MD.shape[0]
    pairs = q_MD.to(gl.float16, bitcast=True).reshape([M, HALF_BOX // 2, 2, 2])
    first, second = gl.split(pairs.permute((0, 1, 3, 2)))
    shared.q.index(2 * part).store(first.reshape([M, HALF_BOX]))
    shared.q.index(2 * part + 1).store(second.reshape([M, HALF_BOX]))


@gluon.jit
def greater_sizes(x_MD, top_MD):
    """Maxima of |x|, and of numbers that are not negative, all as bits of float16 or bfloat16."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; and.b32 t, $1, 0x7fff7fff; max.u16x2 $0, t, $2; }",
        "=r,r,r",
        [x_MD, top_MD],
        gl.int16,
        True,
        2,
    )


@gluon.jit
def fetched_parts(io, shared):
    """The memory of queries as boxes of 64 columns, in which their tensor map leaves them."""
    dtype: gl.constexpr = io.q_map.dtype
    COUNT: gl.constexpr = shared.q.shape[0] // 2
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], dtype)
    return reinterpret(shared.q, dtype, [COUNT, ROWS, WIDTH], layout)


@gluon.jit
def fetch_query_half(
    io,
    shared,
    params,
    segment,
    turn,
    FIRST: gl.constexpr,
    STOP: gl.constexpr,
    IN_REST: gl.constexpr,
):
    """Loads a consumer's parts [FIRST, STOP) of the queries by their tensor map, as they are, and
    waits for them. IN_REST: also those beside columns of 16 bits. turn: the parity of segments."""
    CONSUMER: gl.constexpr = 0 if FIRST == 0 else 1
    full = shared.q_full.index(CONSUMER)
    BYTES: gl.constexpr = ROWS * WIDTH * 2
    mbarrier.expect(full, BYTES * (STOP - FIRST + (1 if IN_REST else 0)))
    parts = fetched_parts(io, shared)
    for part in gl.static_range(FIRST, STOP):
        fetch_box(io, parts.index(part), full, params, segment, part)
    if IN_REST:
        fetch_box(io, shared.q_rest.index(0), full, params, segment, PARTS)
    barrier.wait(full, turn)


@gluon.jit
def load_query_half(io, shared, params, segment, turn, CONSUMER: gl.constexpr):
    """Loads the queries of a segment to shared memory, as `load_scaled_queries` does: each consumer
    half of them, and the second those past the values, too. They come as they are, and are
    multiplied there. Loops, as instructions that run once wait for memory. turn: the parity of
    segments, if queries come by their tensor map."""
    SCALED: gl.constexpr = io.scales is not None
    FETCHES: gl.constexpr = io.q_map is not None
    IN_REST: gl.constexpr = SCALED and CONSUMER == 1
    dtype: gl.constexpr = io.q.ptr.dtype.element_ty
    wide: gl.constexpr = query_layout(WIDTH)
    narrow: gl.constexpr = wide if FETCHES else query_layout(HALF_BOX)
    dims_D = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, wide))
    FIRST: gl.constexpr = CONSUMER * PARTS // 2
    STOP: gl.constexpr = FIRST + PARTS // 2 + (0 if SCALED or CONSUMER == 0 else 1)
    if FETCHES:
        fetch_query_half(io, shared, params, segment, turn, FIRST, STOP, IN_REST)
        parts = fetched_parts(io, shared)
        top_MD = gl.zeros([ROWS, WIDTH], gl.int16, wide)
        for part in range(FIRST, STOP):
            x_MD = parts.index(part).load(wide).to(gl.int16, bitcast=True)
            top_MD = greater_sizes(x_MD, top_MD)
    else:
        for part in gl.static_range(FIRST, STOP):
            store_part(shared, load_dims(io, params, segment, part * WIDTH + dims_D, wide), part)
        top_MD = gl.zeros([ROWS, HALF_BOX], gl.int16, narrow)
        for box in range(2 * FIRST, 2 * STOP):
            x_MD = shared.q.index(box).load(narrow).to(gl.int16, bitcast=True)
            top_MD = greater_sizes(x_MD, top_MD)
    top_M = gl.max(top_MD, 1).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    if IN_REST:
        if FETCHES:
            rest_MD = shared.q_rest.index(0).load(wide)
        else:
            rest_MD = load_dims(io, params, segment, PARTS * WIDTH + dims_D, wide)
        top_M = gl.maximum(top_M, row_tops(rest_MD, narrow))
    shared.tops.index(CONSUMER).store(top_M)
    # Both consumers have finished the segment before.
    sync_named(BOTH_BARRIER)
    top_M = gl.maximum(top_M, shared.tops.index(1 - CONSUMER).load(top_M.type.layout))
    factor_M, back_M = query_factors(top_M)
    scale = gl.to_tensor(params.scale_log2)
    if io.k_descale.ptr is not None:
        descale = scale_of(io.k_descale, segment)
        factor_M = gl.where(descale < 0.0, -factor_M, factor_M)
        scale *= gl.abs(descale)
    # ptxas: it does not know that this is 0, and so does not unroll the loop.
    zero = gl.minimum(segment.seq.len_k, 0)
    if FETCHES:
        for part in range(zero + FIRST, STOP):
            q_MD = parts.index(part).load(wide)
            q_MD = (q_MD.to(gl.float32) * factor_M[:, None]).to(gl.float16)
            # All threads have read the part, whose memory gets it in another order.
            thread_barrier()
            store_part(shared, q_MD, part)
    else:
        for box in range(zero + 2 * FIRST, 2 * STOP):
            q_MD = shared.q.index(box).load(narrow).to(dtype, bitcast=True)
            store_scaled(shared.q.index(box), q_MD, factor_M)
    if IN_REST:
        store_scaled(shared.q_rest.index(0), rest_MD, factor_M)
    if CONSUMER == 0:
        # A masked score, an infinity, times 0 would be NaN.
        shared.scale.index(0).store(gl.maximum(back_M * scale, 1e-37))
    else:
        none_M = gl.full([ROWS], float("-inf"), gl.float32, top_M.type.layout)
        shared.top.index(0).store(none_M)
        shared.shift.index(0).store(gl.zeros_like(none_M))
        store_flag(shared.flags.index(OPEN), gl.to_tensor(1))
    fence_async_shared()
    sync_named(BOTH_BARRIER)
