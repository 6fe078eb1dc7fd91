"""The warpgroups that make the output in the forward of wide heads. Each has 256 of the 512
columns, in two parts.

M query rows, E columns of a part.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from heedful.kernels.hopper.forward.epilogue import (
    is_row,
    keep_rows,
    normalised,
    store_log_sums,
    store_partial,
)
from heedful.kernels.hopper.forward_wide.cluster import (
    arrive_after_mma,
    has_tile,
    meet,
    place_in_cluster,
    release_after_mma,
    wait,
)
from heedful.kernels.hopper.forward_wide.shared import PART, SLOTS
from heedful.kernels.hopper.sm90.block_range import n_block_count, program_n_block_range
from heedful.kernels.hopper.sm90.compat import reinterpret, tma_store
from heedful.kernels.hopper.sm90.mma import ROWS, scale_output, scores_layout
from heedful.kernels.hopper.sm90.sequences import queries_at
from heedful.kernels.hopper.sm90.softmax import vote_above
from heedful.kernels.hopper.sm90.tile_scheduler import work_tile_at


@gluon.jit
def add_values(shared, acc, step, base, FIRST: gl.constexpr, CLUSTER: gl.constexpr):
    """Adds a tile of values to both parts of the output. FIRST: the first of these parts."""
    slot = step % SLOTS
    phase = step & 1
    wait(shared.p_full.index(slot), step // SLOTS & 1, base)
    alpha_M = shared.alpha.index(slot).load(gl.SliceLayout(1, acc[0].type.layout))
    if vote_above(1.0 - alpha_M, 0) != 0:
        acc = scale_output(acc, alpha_M)
    p = shared.p.index(slot)
    left, right = acc
    # O += P V
    wait(shared.v_full.index(FIRST), phase, base)
    left = warpgroup_mma(p, shared.v.index(FIRST), left, is_async=True)
    wait(shared.v_full.index(FIRST + 1), phase, base)
    right = warpgroup_mma(p, shared.v.index(FIRST + 1), right, is_async=True)
    left, right = warpgroup_mma_wait(1, deps=[left, right])
    release_after_mma(shared.v_empty.index(FIRST), base, CLUSTER)
    left, right = warpgroup_mma_wait(0, deps=[left, right])
    release_after_mma(shared.v_empty.index(FIRST + 1), base, CLUSTER)
    arrive_after_mma(shared.p_empty.index(slot), base)
    return left, right


@gluon.jit
def write_parts(out, shared, desc, at, FIRST: gl.constexpr):
    """Writes both parts of an output to the memory of their values, and from there by TMA."""
    # Other warps may still be reading the values.
    gl.barrier()
    for i in gl.static_range(2):
        memory = shared.v.index(FIRST + i)
        box = reinterpret(memory, desc.dtype, desc.block_type.shape, desc.layout)
        box.store(out[i].to(desc.dtype).reshape(box.shape))
    fence_async_shared()
    for i in gl.static_range(2):
        memory = shared.v.index(FIRST + i)
        box = reinterpret(memory, desc.dtype, desc.block_type.shape, desc.layout)
        tma_store(desc, at[:-1] + [(FIRST + i) * PART], box)
    tma.store_wait(0)


@gluon.jit
def value_tile(
    outputs, shared, params, tile, split, place, base, CLUSTER: gl.constexpr, HALF: gl.constexpr
):
    """Computes and stores columns [256 HALF, 256 HALF + 256) of a work tile's 64 rows."""
    FIRST: gl.constexpr = 2 * HALF
    layout: gl.constexpr = scores_layout(shared.q.dtype, PART)
    row = tile.row + place * ROWS
    blocks = program_n_block_range(params, tile, split, ())
    acc = (
        gl.zeros([ROWS, PART], gl.float32, layout),
        gl.zeros([ROWS, PART], gl.float32, layout),
    )
    for step in range(n_block_count(params, blocks)):
        acc = add_values(shared, acc, step, base, FIRST, CLUSTER)
    wait(shared.stats_full.index(0), 0, base)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    m_M = shared.stats.index(0).load(rows)
    l_M = shared.stats.index(1).load(rows)
    out, m_M, l_M, seen_M = normalised(acc, m_M, l_M, tile, row, split, params, 1.0)
    if params.split.partials is not None:
        for i in gl.static_range(2):
            store_partial(out[i], tile, row, split, params, (FIRST + i) * PART)
    else:
        if params.seqs.used_q is not None:
            out = keep_rows(out, is_row(params, row, tile.seq.len_q, rows))
        write_parts(out, shared, outputs.desc, queries_at(params, tile, row), FIRST)
    if HALF == 0:
        store_log_sums(outputs, m_M, l_M, seen_M, tile, row, split, params)


@gluon.jit
def value_consumer(outputs, shared, scheduler, params, CLUSTER: gl.constexpr, HALF: gl.constexpr):
    """A half of the columns of a program's work tile, if there is one."""
    meet(CLUSTER)
    place = place_in_cluster(CLUSTER)
    index = gl.program_id(0) // CLUSTER
    if has_tile(params, scheduler, index):
        tile, split = work_tile_at(params, scheduler, index)
        value_tile(outputs, shared, params, tile, split, place, place << 24, CLUSTER, HALF)
    meet(CLUSTER)
