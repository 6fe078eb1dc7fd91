"""Shared memory of the backward of halves. A program has half of the columns of everything."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.backward.shared import allocate_queries
from heedful.kernels.hopper.backward_halves.exchange import Inbox
from heedful.kernels.hopper.sm90.barrier import barriers
from heedful.kernels.hopper.sm90.compat import aggregate
from heedful.kernels.hopper.sm90.mma import ROWS
from heedful.kernels.hopper.sm90.pipeline import Pipeline, allocate_boxes

HALVES: gl.constexpr = gl.constexpr(2)  # programs of a cluster


@aggregate
class HalvesShared:
    """k, v: 64 keys and values. q, do: rings of query tiles and cotangents. lse, delta: the numbers
    of their rows, see `allocate_queries`. p, ds: probabilities and dS of a visit, keys by queries;
    each is read before the next visit's other one is stored. s_parts, dp_parts: for the other
    program's parts of S and dP. k_full and others: barriers of what their names say."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q: Pipeline
    do: Pipeline
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    s_parts: Inbox
    dp_parts: Inbox
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor

    @gluon.jit
    def allocate(io, params):
        WARPS: gl.constexpr = 4
        q, do, lse, delta = allocate_queries(io, params)
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], io.q.dtype)
        return HalvesShared(
            allocate_boxes(io.k, 1),
            allocate_boxes(io.v, 1),
            q,
            do,
            lse,
            delta,
            gl.allocate_shared_memory(gl.float16, [ROWS, ROWS], layout),
            gl.allocate_shared_memory(io.q.dtype, [ROWS, ROWS], layout),
            Inbox.allocate(),
            Inbox.allocate(),
            barriers(1, 1),
            barriers(1, 1),
            barriers(1, WARPS),
            barriers(1, WARPS),
        )
