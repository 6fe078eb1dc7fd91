"""Shared memory of the Hopper backward, and who waits for what in it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.backward_sums import allocate_dq
from heedful.kernels.hopper.barrier import barriers
from heedful.kernels.hopper.compat import aggregate
from heedful.kernels.hopper.mma import ROWS
from heedful.kernels.hopper.pipeline import Pipeline, allocate_boxes

CONSUMERS: gl.constexpr = gl.constexpr(2)


@gluon.constexpr_function
def dq_warpgroups(params):
    """Warpgroups that make dQ alone."""
    return 1 if params.tile.DQ_REGS else 0


@gluon.constexpr_function
def adders(params):
    """Warps that add dQ to global memory, visits in turn: two where they wait for turns, which
    takes longer than a visit."""
    if params.tile.DQ_HOW % 2 == 1:
        return 0
    return 1 if params.order.turns is None else 2


@aggregate
class BackwardShared:
    """k, v: a box of 64 keys for each consumer. q, do: rings of query tiles, beside each of which
    lie lse in base 2, delta. ds: of each step a box for each consumer, keys by queries.
    dq: each consumer's share. Full and empty barriers: of k and v of a work tile, ds_full of a
    step, dq_empty of a share, dq_full of a share for each warp that adds.
    """

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q: Pipeline
    do: Pipeline
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor
    ds_empty: gl.shared_memory_descriptor
    dq_full: gl.shared_memory_descriptor
    dq_empty: gl.shared_memory_descriptor

    @gluon.jit
    def allocate(io, params):
        BLOCK_M: gl.constexpr = params.tile.BLOCK_M
        D: gl.constexpr = io.q.block_type.shape[-1]
        SHARE: gl.constexpr = BLOCK_M * D // CONSUMERS
        # dK and dV leave through memory of dQ.
        OUT: gl.constexpr = max(io.dk.block_type.nbytes, io.dv.block_type.nbytes) // 4
        q = Pipeline.allocate(io.q, params.tile.Q_STAGES, CONSUMERS)
        do = Pipeline.allocate(io.dout, params.tile.DO_STAGES, CONSUMERS)
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        lse = gl.allocate_shared_memory(gl.float32, [params.tile.Q_STAGES, BLOCK_M], plain)
        delta = gl.allocate_shared_memory(gl.float32, [params.tile.DO_STAGES, BLOCK_M], plain)
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], io.q.dtype)
        ds = gl.allocate_shared_memory(
            io.q.dtype, [params.tile.DS_STAGES * CONSUMERS, ROWS, BLOCK_M], layout
        )
        return BackwardShared(
            allocate_boxes(io.k, CONSUMERS),
            allocate_boxes(io.v, CONSUMERS),
            q,
            do,
            lse,
            delta,
            ds,
            allocate_dq(
                CONSUMERS,
                256
                if not adders(params)
                else (SHARE if SHARE > OUT or dq_warpgroups(params) else OUT),
            ),
            barriers(1, 1),
            barriers(1, 1),
            barriers(1, CONSUMERS + dq_warpgroups(params)),
            barriers(1, CONSUMERS),
            barriers(params.tile.DS_STAGES, CONSUMERS * 4),
            barriers(params.tile.DS_STAGES, 1),
            barriers(max(CONSUMERS * adders(params), 1), 4),
            barriers(CONSUMERS, 1),
        )
