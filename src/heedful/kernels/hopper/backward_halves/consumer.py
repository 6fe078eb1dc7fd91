"""The consumers of the backward of halves: one computes S and dV, the other dP and dK.

They work as those of `hopper.backward.wide`, on half of the columns. S and dP are sums over all
columns, so that each program of a cluster makes a part of them and sends it to the other one. Both
programs compute the same probabilities.

M query rows, N keys (64), J pairs of neighbouring queries.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from heedful.kernels.hopper.backward.columns import (
    no_gradients,
    queue_gradients,
    queue_transposed,
    scaled,
    wait_for_gradients,
)
from heedful.kernels.hopper.backward.consumer import store_gradient
from heedful.kernels.hopper.backward.dq.sums import add_registers
from heedful.kernels.hopper.backward.mainloop import key_box
from heedful.kernels.hopper.backward.p_scale import p_descale
from heedful.kernels.hopper.backward.scores import kept_probabilities, queued_probabilities
from heedful.kernels.hopper.backward.shared import CONSUMERS, row_numbers, sync_consumers
from heedful.kernels.hopper.backward.tile import (
    key_tile,
    m_block_range,
    query_tile,
    visit_range,
)
from heedful.kernels.hopper.backward.wide import crossed_gradients, crossing_probabilities
from heedful.kernels.hopper.backward_halves.exchange import receive, send
from heedful.kernels.hopper.backward_halves.shared import HALVES
from heedful.kernels.hopper.forward_wide.cluster import (
    arrive_each_warp,
    meet,
    place_in_cluster,
    wait,
)
from heedful.kernels.hopper.sm90.mma import ROWS, scores_layout
from heedful.kernels.hopper.sm90.pipeline import stage_of

COLS: gl.constexpr = gl.constexpr(64)  # of dQ that a product makes


@gluon.jit
def add_dq(io, shared, params, tile, blocks, number, place, CONSUMER: gl.constexpr):
    """Computes one consumer's columns of a program's half of a visit's dQ, and adds them to global
    memory."""
    D: gl.constexpr = params.tile.D
    PARTS: gl.constexpr = D // HALVES // COLS // CONSUMERS
    layout: gl.constexpr = scores_layout(shared.k.dtype, COLS)
    head, block = query_tile(params, tile, blocks, number)
    row = head.to(gl.int64) * params.sizes.accum_rows + tile.accum_row + block * ROWS
    address = io.dq_accum + row * D + place * (D // HALVES * ROWS)
    left = shared.ds.permute((1, 0))
    keys = key_box(shared.k, 0)
    for part in gl.static_range(CONSUMER * PARTS, CONSUMER * PARTS + PARTS):
        dq = gl.zeros([ROWS, COLS], gl.float32, layout)
        # dQ += dS K
        right = keys.slice(part * COLS, COLS, dim=1)
        dq = warpgroup_mma(left, right, dq, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        add_registers(address + part * (ROWS * COLS), dq)


@gluon.jit
def value_gradients(io, shared, blocks, params, tile, first, end, place):
    """A program's half of dV, by the consumer that computes probabilities."""
    base = place << 24
    dtype: gl.constexpr = shared.k.dtype
    layout: gl.constexpr = scores_layout(dtype, ROWS)
    dv = no_gradients(params.tile.E // HALVES, dtype)
    operand: gl.constexpr = gl.DotOperandLayout(0, dv[0].type.layout, 2)
    for number in range(first, end):
        visit = number - first
        q_state = stage_of(visit, params.tile.Q_STAGES)
        do_state = stage_of(visit, params.tile.DO_STAGES)
        wait(shared.q.full.index(q_state.index), q_state.phase, base)
        # S^T = K Q^T
        keys, queries = key_box(shared.k, 0), shared.q.tile(q_state)
        s_NM = queue_transposed(keys, queries, params.tile.D // HALVES, ROWS)
        rows = row_numbers(shared, params, q_state.index, 0, gl.SliceLayout(0, layout), True)
        s_NM = warpgroup_mma_wait(0, deps=[s_NM])
        send(shared.s_parts, s_NM, visit, base)
        shared.q.consumer_release(q_state)
        s_NM = receive(shared.s_parts, s_NM, visit, base)
        queued = queued_probabilities(s_NM, rows, blocks, params, tile, number, dtype, 0, True)
        shared.p.store(crossing_probabilities(queued, params, dtype, layout))
        arrive_each_warp(shared.p_full.index(0), base)
        wait(shared.do.full.index(do_state.index), do_state.phase, base)
        left = kept_probabilities(queued, params, dtype, operand)
        # dV += P^T dO
        dv = queue_gradients(left, shared.do.tile(do_state), dv, params.tile.E // HALVES)
        wait(shared.ds_full.index(0), visit & 1, base)
        dv = wait_for_gradients(dv)
        shared.do.consumer_release(do_state)
        add_dq(io, shared, params, tile, blocks, number, place, 0)
    return dv


@gluon.jit
def key_gradients(io, shared, blocks, params, tile, first, end, place):
    """A program's half of dK, without the scale, by the consumer that computes dS."""
    base = place << 24
    dtype: gl.constexpr = shared.k.dtype
    layout: gl.constexpr = scores_layout(dtype, ROWS)
    dk = no_gradients(params.tile.D // HALVES, dtype)
    operand: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    for number in range(first, end):
        visit = number - first
        q_state = stage_of(visit, params.tile.Q_STAGES)
        do_state = stage_of(visit, params.tile.DO_STAGES)
        wait(shared.do.full.index(do_state.index), do_state.phase, base)
        # dP^T = V dO^T
        values, dout = key_box(shared.v, 0), shared.do.tile(do_state)
        dp_NM = queue_transposed(values, dout, params.tile.E // HALVES, ROWS)
        delta_M = shared.delta.index(do_state.index).load(gl.SliceLayout(0, layout))
        dp_NM = warpgroup_mma_wait(0, deps=[dp_NM])
        send(shared.dp_parts, dp_NM, visit, base)
        shared.do.consumer_release(do_state)
        dp_NM = receive(shared.dp_parts, dp_NM, visit, base)
        wait(shared.p_full.index(0), visit & 1, base)
        p_NM = shared.p.load(layout)
        ds_NM = crossed_gradients(p_NM, dp_NM, delta_M, params, dtype)
        shared.ds.store(ds_NM)
        fence_async_shared()
        arrive_each_warp(shared.ds_full.index(0), base)
        wait(shared.q.full.index(q_state.index), q_state.phase, base)
        left = gl.convert_layout(ds_NM, operand)
        # dK += dS^T Q
        dk = queue_gradients(left, shared.q.tile(q_state), dk, params.tile.D // HALVES)
        dk = wait_for_gradients(dk)
        shared.q.consumer_release(q_state)
        add_dq(io, shared, params, tile, blocks, number, place, 1)
    return dk


@gluon.jit
def tile_gradients(io, shared, params, tile, place, CONSUMER: gl.constexpr):
    """Computes and stores a program's half of dV (consumer 0) or dK (consumer 1) of a work tile;
    zeros if no query sees any key."""
    D: gl.constexpr = params.tile.D // HALVES
    E: gl.constexpr = params.tile.E // HALVES
    base = place << 24
    blocks = m_block_range(params, tile)
    first, end = visit_range(params, tile, blocks)
    if end > first:
        wait(shared.k_full.index(0), 0, base)
        wait(shared.v_full.index(0), 0, base)
    if CONSUMER == 0:
        dv = value_gradients(io, shared, blocks, params, tile, first, end, place)
        dv = scaled(dv, p_descale(io.q.dtype))
        # The other consumer has read all values and all keys.
        sync_consumers()
        store_gradient(io.dv, shared.v.index(0), dv, place * E, E, params, tile, 0, place * E)
    else:
        dk = key_gradients(io, shared, blocks, params, tile, first, end, place)
        dk = scaled(dk, params.sizes.scale * p_descale(io.q.dtype))
        sync_consumers()
        before = params.tile.E + place * D
        store_gradient(io.dk, shared.k.index(0), dk, before, D, params, tile, 0, place * D)
    tma.store_wait(0)


@gluon.jit
def halves_consumer(io, shared, params, count, CONSUMER: gl.constexpr):
    """One gradient of a program's work tile, if there is one. count: of work tiles."""
    meet(HALVES)
    place = place_in_cluster(HALVES)
    index = gl.program_id(0) // HALVES
    if index < count:
        tile_gradients(io, shared, params, key_tile(params, index), place, CONSUMER)
    meet(HALVES)
