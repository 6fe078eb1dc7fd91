"""Shared memory of the backward, and its barriers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from heedful.kernels.hopper.backward.columns import share_columns
from heedful.kernels.hopper.backward.dq.sums import allocate_dq
from heedful.kernels.hopper.sm90 import barrier
from heedful.kernels.hopper.sm90.barrier import barriers
from heedful.kernels.hopper.sm90.compat import aggregate, inline_asm
from heedful.kernels.hopper.sm90.mma import ROWS
from heedful.kernels.hopper.sm90.pipeline import Pipeline, allocate_boxes, box_rows

CONSUMERS: gl.constexpr = gl.constexpr(2)
# The backward's only named barrier: its two consumers meet there.
CONSUMERS_BARRIER: gl.constexpr = barrier.FIRST_NAMED
# A visit's dQ is passed on in this many shares, one after the other.
SHARES: gl.constexpr = gl.constexpr(2)


@gluon.constexpr_function
def alternates(params):
    """Whether both consumers have the same 64 keys, and of their visits each every second one."""
    return params.tile.BLOCK_N == 64 and params.tile.DQ_REGS is not None


@gluon.constexpr_function
def visits_apart(params):
    """The number of a consumer's next visit less that of its last one."""
    return 2 if alternates(params) else 1


@gluon.constexpr_function
def ds_stages(params):
    """Stages of dS, in the order of visits."""
    return params.tile.DS_STAGES * visits_apart(params)


@gluon.constexpr_function
def adders(params):
    """Warps that add dQ to global memory, taking visits in turn. There are two if they wait for
    turns, which takes longer than a visit."""
    return 1 if params.order.turns is None else 2


@gluon.jit
def allocate_queries(io, params):
    """(ring of query tiles, ring of their cotangents, memory for lse, memory for delta). For tiles
    with far rows, cotangents have one more full barrier, and delta room for the factors of rows. If
    rows have key_ranges or a block mask, lse has room for their words, too."""
    BLOCK_M: gl.constexpr = params.tile.BLOCK_M
    STAGES: gl.constexpr = params.tile.DO_STAGES
    shape: gl.constexpr = io.dout.block_type.shape
    READERS: gl.constexpr = CONSUMERS // visits_apart(params)
    q = Pipeline.allocate(io.q, params.tile.Q_STAGES, READERS)
    boxes = allocate_boxes(io.dout, STAGES)
    full, empty = barriers(STAGES + 1, 1), barriers(STAGES, READERS)
    do = Pipeline(boxes, None, full, empty, box_rows(shape), shape[-1])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ARRAYS: gl.constexpr = params.tile.Q_STAGES * (1 + word_count(params))
    lse = gl.allocate_shared_memory(gl.float32, [ARRAYS, BLOCK_M], plain)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES + 1, BLOCK_M], plain)
    return q, do, lse, delta


@gluon.constexpr_function
def word_count(params):
    """Words of a query row: one by its key_ranges, one for every 32 keys by a block mask."""
    if params.mask.blocks.SIDE:
        return params.tile.BLOCK_N // 32
    return 1 if params.mask.RANGES else 0


@gluon.jit
def words_of(shared, params, stage, i):
    """The memory of the words of number i of a stage's query rows. They lie behind all lse."""
    return shared.lse.index(params.tile.Q_STAGES + stage * word_count(params) + i)


@gluon.jit
def load_words(shared, params, stage, CONSUMER, layout: gl.constexpr):
    """The words of a stage's query rows, in registers: which keys they see, see mask.py."""
    i = 0
    if params.mask.blocks.SIDE:
        # The compiler treats it as one number of all warps.
        half = inline_asm("mov.u32 $0, %tid.x; bfe.u32 $0, $0, 6, 1;", "=r", [], gl.int32)
        i = half if alternates(params) else CONSUMER * (ROWS // 32) + half
    return words_of(shared, params, stage, i).load(layout).to(gl.int32, bitcast=True)


@gluon.jit
def row_numbers(shared, params, stage, CONSUMER, layout: gl.constexpr, MASKED: gl.constexpr):
    """(lse, words) of a stage's query rows, in registers. Words are there for a mask by
    key_ranges or tiles."""
    rows = (shared.lse.index(stage).load(layout),)
    if MASKED and word_count(params) > 0:
        rows = rows + (load_words(shared, params, stage, CONSUMER, layout),)
    return rows


@gluon.constexpr_function
def ds_bytes(shared):
    """Bytes of one consumer's dS, in all stages."""
    boxes, rows, columns = shared.ds.shape
    return boxes // 2 * rows * columns * 2


@gluon.jit
def sync_consumers():
    """Waits for the other consumer."""
    WORDS: gl.constexpr = f"bar.sync {CONSUMERS_BARRIER}, 256;"
    inline_asm(WORDS, "~{memory}", [])


@gluon.jit
def wait_for_keys(shared, phase):
    """Waits for a work tile's keys and values. Where gradients pass through their memory, this
    holds even for tiles that no query sees."""
    barrier.wait(shared.k_full.index(0), phase)
    barrier.wait(shared.v_full.index(0), phase)


@gluon.jit
def release_keys(shared):
    """Releases the memory of keys and values, once the gradients of both consumers have left it."""
    tma.store_wait(0)
    sync_consumers()
    mbarrier.arrive(shared.k_empty.index(0), count=1)
    mbarrier.arrive(shared.v_empty.index(0), count=1)


@gluon.jit
def wait_for_outlet():
    """Waits until gradients have left the memory of dS, so that it may be written."""
    tma.store_wait(0)
    gl.barrier()


@aggregate
class BackwardShared:
    """k: for each consumer a box of 64 keys, of two work tiles. v: the same, of one work tile. q,
    do: rings of query tiles and cotangents. lse (in base 2), delta: the numbers of their rows. ds:
    for each consumer a ring of boxes, keys by queries. dq: shares. Consumers that alternate have
    one box of keys, and their boxes of dS are one ring.

    Full and empty barriers: one for each stage of k, for v, and for each stage of ds; dq_empty for
    each share; dq_full for each share and each warp that adds.
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
        K_STAGES: gl.constexpr = params.tile.K_STAGES
        STAGES: gl.constexpr = ds_stages(params)
        WRITERS: gl.constexpr = CONSUMERS // visits_apart(params)
        BOXES: gl.constexpr = params.tile.BLOCK_N // ROWS
        # The first share is the largest one.
        SHARE: gl.constexpr = ROWS * share_columns(params.tile.D, BLOCK_M, 0)
        q, do, lse, delta = allocate_queries(io, params)
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], io.q.dtype)
        ds = gl.allocate_shared_memory(
            io.q.dtype, [CONSUMERS * params.tile.DS_STAGES, ROWS, BLOCK_M], layout
        )
        return BackwardShared(
            allocate_boxes(io.k, K_STAGES * BOXES),
            allocate_boxes(io.v, BOXES),
            q,
            do,
            lse,
            delta,
            ds,
            allocate_dq(SHARES, SHARE),
            barriers(K_STAGES, 1),
            barriers(1, 1),
            # The warpgroup that computes dQ reads keys, too.
            barriers(K_STAGES, CONSUMERS + 1),
            barriers(1, CONSUMERS),
            barriers(STAGES, WRITERS * 4),
            barriers(STAGES, 1),
            barriers(SHARES * adders(params), 4),
            barriers(SHARES, 1),
        )

    @gluon.jit
    def consumer_ds(self, state, CONSUMER):
        """One consumer's box of dS at a stage. Those of a consumer lie side by side."""
        if state.stages == self.ds.shape[0]:
            first = CONSUMER * (state.stages // CONSUMERS)
            return self.ds.index(first + state.index // CONSUMERS)
        else:
            return self.ds.index(CONSUMER * state.stages + state.index)
