"""Attention forward: one producer warp, and consumer warpgroups of 64 query rows each.

B batch, H query head, M query rows, N keys, D qk dim, E v dim, L lanes that share a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from heedful.kernels.hopper.channel import Channel, Cursor
from heedful.kernels.hopper.compat import tma_store
from heedful.kernels.hopper.schedule import ROWS, Shape, decode, key_range
from heedful.kernels.hopper.softmax import (
    lane_sums,
    lazy_limit,
    scale_rows,
    softmax_first,
    softmax_lazy,
    softmax_step,
)

LN2: gl.constexpr = gl.constexpr(0.6931471805599453)


@gluon.jit
def hide_keys(s_MN, shape, tile, row, col):
    """Scores of query rows from `row` and keys from `col`, with the unseen ones at -inf."""
    M: gl.constexpr = s_MN.shape[0]
    N: gl.constexpr = s_MN.shape[1]
    layout: gl.constexpr = s_MN.type.layout
    key_N = gl.arange(0, N, layout=gl.SliceLayout(0, layout))
    stop_M = gl.full([M], 0, gl.int32, gl.SliceLayout(1, layout)) + (tile.len_k - col)
    diagonal_M = gl.arange(0, M, layout=gl.SliceLayout(1, layout)) + (row + tile.off - col)
    if shape.IS_RIGHT:
        stop_M = gl.minimum(stop_M, diagonal_M + (shape.right + 1))
    visible_MN = key_N[None, :] < stop_M[:, None]
    if shape.IS_LEFT:
        visible_MN = visible_MN & (key_N[None, :] >= (diagonal_M - shape.left)[:, None])
    return gl.where(visible_MN, s_MN, float("-inf"))


@gluon.jit
def take_turn(shape, WORKER: gl.constexpr):
    """Waits until the consumer before this one has queued its matrix products."""
    if shape.ORDERED:
        gl.inline_asm_elementwise(
            "bar.sync $1, 256; mov.u32 $0, 0;",
            "=r,r",
            [gl.to_tensor(8 + WORKER)],
            gl.int32,
            False,
            1,
        )


@gluon.jit
def pass_turn(shape, WORKER: gl.constexpr):
    """Lets the next consumer queue its matrix products."""
    if shape.ORDERED:
        gl.inline_asm_elementwise(
            "bar.arrive $1, 256; mov.u32 $0, 0;",
            "=r,r",
            [gl.to_tensor(8 + (WORKER + 1) % shape.CONSUMERS)],
            gl.int32,
            False,
            1,
        )


@gluon.jit
def producer(
    q_desc,
    k_desc,
    v_desc,
    q,
    k,
    v,
    shape,
):
    """Feeds every tile's queries, and its keys and values from the last to the first."""
    at_q = Cursor.start(shape.CONSUMERS)
    at = Cursor.start(shape.STAGES)
    for index in range(gl.program_id(0), shape.tiles, gl.num_programs(0)):
        tile = decode(shape, index)
        keys = key_range(shape, tile, tile.row, shape.CONSUMERS * ROWS)
        # Keys run one tile ahead of values, as the consumers take them.
        steps = keys.end - keys.begin
        col = (keys.end - 1) * shape.BLOCK_N
        if steps > 0:
            k.load(k_desc, [tile.batch, tile.kv_head, col, 0], at)
        for w in gl.static_range(shape.CONSUMERS):
            q.load(q_desc, [tile.batch, tile.head, tile.row + w * ROWS, 0], at_q)
            at_q = at_q.next()
        for _ in range(1, steps):
            behind = at
            at = at.next()
            k.load(k_desc, [tile.batch, tile.kv_head, col - shape.BLOCK_N, 0], at)
            v.load(v_desc, [tile.batch, tile.kv_head, col, 0], behind)
            col -= shape.BLOCK_N
        if steps > 0:
            v.load(v_desc, [tile.batch, tile.kv_head, col, 0], at)
            at = at.next()


@gluon.jit
def skip(k, v, at, count, shape, WORKER: gl.constexpr):
    """Passes over tiles that other consumers of this program need and this one does not."""
    for _ in range(count):
        take_turn(shape, WORKER)
        pass_turn(shape, WORKER)
        k.wait(at)
        k.release_after_mma(at)
        v.wait(at)
        v.release_after_mma(at)
        at = at.next()
    return at


@gluon.jit
def add_values(p_MN, v_NE, ones_NL, acc_ME, l_ML, SUM_BY_MMA: gl.constexpr):
    """Queues acc += p v, and l += p 1 where the matrix unit sums the rows too."""
    acc_ME = warpgroup_mma(p_MN, v_NE, acc_ME, is_async=True)
    if SUM_BY_MMA:
        l_ML = warpgroup_mma(p_MN, ones_NL, l_ML, is_async=True)
    return acc_ME, l_ML


@gluon.jit
def attend(
    q,
    at_q,
    k,
    v,
    ones_NL,
    at,
    keys,
    shape,
    tile,
    row,
    scale_log2,
    WORKER: gl.constexpr,
):
    """Streams the keys of `keys` (at least one) past one consumer's rows.

    Returns the unnormalised output, maximum, sums by lane, and the ring's cursor.
    """
    q_smem_MD = q.tile(at_q)
    dtype: gl.constexpr = q_smem_MD.dtype
    E: gl.constexpr = v.dim
    BLOCK_N: gl.constexpr = shape.BLOCK_N
    SUM_BY_MMA: gl.constexpr = shape.SUM_BY_MMA
    LIMIT: gl.constexpr = lazy_limit(dtype)
    LATE: gl.constexpr = shape.CONSUMERS >= 3
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    zero_MN = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    acc_ME = gl.zeros([ROWS, E], gl.float32, o_layout)

    k.wait(at)
    take_turn(shape, WORKER)
    s_MN = warpgroup_mma(
        q_smem_MD, k.tile(at).permute((1, 0)), zero_MN, use_acc=False, is_async=True
    )
    pass_turn(shape, WORKER)
    s_MN = warpgroup_mma_wait(0, deps=[s_MN])
    k.release_after_mma(at)
    if shape.CONSUMERS == 3 or keys.end > keys.full_end:
        s_MN = hide_keys(s_MN, shape, tile, row, (keys.end - 1) * shape.BLOCK_N)
    p_MN, m_M = softmax_first(s_MN, scale_log2)
    if SUM_BY_MMA:
        l_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
        l_ML = gl.zeros([ROWS, 8], gl.float32, l_layout)
    else:
        l_ML = lane_sums(p_MN)
    if not LATE:
        p_MN = gl.convert_layout(p_MN.to(dtype), p_layout)
    last = at
    at = at.next()
    steps = keys.end - keys.begin
    k.wait(at, pred=steps > 1)
    for step in range(1, steps):
        p_dot_MN = p_MN
        if LATE:
            p_dot_MN = gl.convert_layout(p_MN.to(dtype), p_layout)
        take_turn(shape, WORKER)
        s_MN = warpgroup_mma(
            q_smem_MD, k.tile(at).permute((1, 0)), zero_MN, use_acc=False, is_async=True
        )
        v.wait(last)
        acc_ME, l_ML = add_values(p_dot_MN, v.tile(last), ones_NL, acc_ME, l_ML, SUM_BY_MMA)
        pass_turn(shape, WORKER)
        s_MN = warpgroup_mma_wait(2 if SUM_BY_MMA else 1, deps=[s_MN])
        if shape.IS_RIGHT or shape.IS_LEFT:
            j = keys.end - 1 - step
            if (j >= keys.full_end) | (j < keys.full_begin):
                s_MN = hide_keys(s_MN, shape, tile, row, j * shape.BLOCK_N)
        moved = 1
        if shape.LAZY:
            p_MN, m_M, l_ML, alpha_M, moved = softmax_lazy(
                s_MN, m_M, l_ML, scale_log2, LIMIT, shape.IS_RIGHT or shape.IS_LEFT, not SUM_BY_MMA
            )
        else:
            p_MN, m_M, l_ML, alpha_M = softmax_step(
                s_MN, m_M, l_ML, scale_log2, shape.IS_RIGHT or shape.IS_LEFT
            )
        # The next K tile's barrier also keeps ptxas from hoisting the wait below over the
        # exponentials: a wait loop ends a basic block.
        at_next = at.next()
        k.wait(at_next, pred=step + 1 < steps)
        if SUM_BY_MMA:
            acc_ME, l_ML = warpgroup_mma_wait(0, deps=[acc_ME, l_ML])
        else:
            acc_ME = warpgroup_mma_wait(0, deps=[acc_ME])
        k.release_after_mma(at)
        v.release_after_mma(last)
        if shape.LAZY:
            if moved != 0:
                acc_ME = scale_rows(acc_ME, alpha_M)
                if SUM_BY_MMA:
                    l_ML = scale_rows(l_ML, alpha_M)
        else:
            acc_ME = scale_rows(acc_ME, alpha_M)
        if not LATE:
            p_MN = gl.convert_layout(p_MN.to(dtype), p_layout)
        last = at
        at = at_next
    if not shape.OUT_IN_Q:
        q.release_after_mma(at_q)
    v.wait(last)
    if LATE:
        p_MN = gl.convert_layout(p_MN.to(dtype), p_layout)
    acc_ME, l_ML = add_values(p_MN, v.tile(last), ones_NL, acc_ME, l_ML, SUM_BY_MMA)
    if SUM_BY_MMA:
        acc_ME, l_ML = warpgroup_mma_wait(0, deps=[acc_ME, l_ML])
        l_M = gl.max(l_ML, 1)
    else:
        acc_ME = warpgroup_mma_wait(0, deps=[acc_ME])
        l_M = gl.sum(l_ML, 1)
    v.release_after_mma(last)
    return acc_ME, m_M, l_M, at


@gluon.jit
def store_rows(out_desc, lse_ptr, o_smem, acc_ME, m_M, l_M, tile, row, shape):
    """Normalises one consumer's rows and writes them and their log-sum-exp."""
    seen_M = l_M > 0.0
    inverse_M = gl.where(seen_M, 1.0 / l_M, 0.0)
    tma.store_wait(0)
    o_smem.store(scale_rows(acc_ME, inverse_M).to(out_desc.dtype).reshape(o_smem.shape))
    fence_async_shared()
    tma_store(out_desc, [tile.batch, tile.head, row, 0], o_smem)
    if lse_ptr is not None:
        lse_M = gl.where(seen_M, (m_M + gl.log2(l_M)) * LN2, float("-inf"))
        rows_M = row + gl.arange(0, ROWS, layout=lse_M.type.layout)
        base = (tile.batch * shape.heads + tile.head).to(gl.int64) * shape.seqlen_q
        gl.store(lse_ptr + base + rows_M, lse_M, mask=rows_M < tile.len_q)


@gluon.jit
def consumer(
    out_desc,
    lse_ptr,
    q,
    k,
    v,
    ones,
    o,
    shape,
    scale_log2,
    WORKER: gl.constexpr,
):
    """Computes rows [64 WORKER, 64 WORKER + 64) of every tile of this program."""
    E: gl.constexpr = v.dim
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    at = Cursor.start(shape.STAGES)
    parity = gl.to_tensor(0)
    o_smem = o.index(WORKER)
    ones_NL = ones
    if shape.SUM_BY_MMA:
        ones_NL = ones.permute((1, 0))
    if WORKER == shape.CONSUMERS - 1:
        pass_turn(shape, WORKER)
    for index in range(gl.program_id(0), shape.tiles, gl.num_programs(0)):
        tile = decode(shape, index)
        row = tile.row + WORKER * ROWS
        whole = key_range(shape, tile, tile.row, shape.CONSUMERS * ROWS)
        keys = key_range(shape, tile, row, ROWS)
        at_q = Cursor(gl.to_tensor(WORKER), parity, shape.CONSUMERS)
        q.wait(at_q)
        if keys.end > keys.begin:
            at = skip(k, v, at, whole.end - keys.end, shape, WORKER)
            acc_ME, m_M, l_M, at = attend(
                q, at_q, k, v, ones_NL, at, keys, shape, tile, row, scale_log2, WORKER
            )
            at = skip(k, v, at, keys.begin - whole.begin, shape, WORKER)
            m_M = gl.convert_layout(m_M, row_layout)
            l_M = gl.convert_layout(l_M, row_layout)
            store_rows(out_desc, lse_ptr, o_smem, acc_ME, m_M, l_M, tile, row, shape)
        else:
            at = skip(k, v, at, whole.end - whole.begin, shape, WORKER)
            if not shape.OUT_IN_Q:
                q.release(at_q)
            if row < tile.len_q:
                zero_M = gl.zeros([ROWS], gl.float32, row_layout)
                zero_ME = gl.zeros([ROWS, E], gl.float32, o_layout)
                store_rows(out_desc, lse_ptr, o_smem, zero_ME, zero_M, zero_M, tile, row, shape)
        if shape.OUT_IN_Q:
            tma.store_wait(0)
            q.release(at_q)
        parity ^= 1
    tma.store_wait(0)


@gluon.jit
def forward(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    lse_ptr,
    scale_log2,
    heads,
    group,
    seqlen_q,
    seqlen_k,
    row_blocks,
    tiles,
    section,
    left,
    right,
    shift,
    align,
    BLOCK_N: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
    OUT_IN_Q: gl.constexpr,
    ORDERED: gl.constexpr,
    LAZY: gl.constexpr,
    SUM_BY_MMA: gl.constexpr,
    IS_RIGHT: gl.constexpr,
    IS_LEFT: gl.constexpr,
    num_warps: gl.constexpr,
):
    """out = softmax(scale q k^T + mask) v over (batch, head, row, dim) tensor maps."""
    shape = Shape(
        heads,
        group,
        seqlen_q,
        seqlen_k,
        row_blocks,
        tiles,
        section,
        left,
        right,
        shift,
        align,
        BLOCK_N,
        CONSUMERS,
        STAGES,
        OUT_IN_Q,
        ORDERED,
        LAZY,
        SUM_BY_MMA,
        IS_RIGHT,
        IS_LEFT,
    )
    q = Channel.allocate(q_desc, CONSUMERS, 1)
    k = Channel.allocate(k_desc, STAGES, CONSUMERS)
    v = Channel.allocate(v_desc, STAGES, CONSUMERS)
    if OUT_IN_Q:
        o = q.boxes
    else:
        o = gl.allocate_shared_memory(
            out_desc.dtype, [CONSUMERS] + out_desc.block_type.shape, out_desc.layout
        )
    ones = 0
    if SUM_BY_MMA:
        ones_layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 4], [1, 0])
        ones = gl.allocate_shared_memory(
            k_desc.dtype,
            [8, BLOCK_N],
            gl.NVMMASharedLayout.get_default_for([8, BLOCK_N], k_desc.dtype),
            gl.full([8, BLOCK_N], 1.0, k_desc.dtype, ones_layout),
        )
    fence_async_shared()
    # A partition is compiled on its own, so that each consumer must be spelled out.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consumer, (out_desc, lse_ptr, q, k, v, ones, o, shape, scale_log2, 0)),
                (consumer, (out_desc, lse_ptr, q, k, v, ones, o, shape, scale_log2, 1)),
                (producer, (q_desc, k_desc, v_desc, q, k, v, shape)),
            ],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (consumer, (out_desc, lse_ptr, q, k, v, ones, o, shape, scale_log2, 0)),
                (consumer, (out_desc, lse_ptr, q, k, v, ones, o, shape, scale_log2, 1)),
                (consumer, (out_desc, lse_ptr, q, k, v, ones, o, shape, scale_log2, 2)),
                (producer, (q_desc, k_desc, v_desc, q, k, v, shape)),
            ],
            [4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (out_desc, lse_ptr, q, k, v, ones, o, shape, scale_log2, 0)),
                (consumer, (out_desc, lse_ptr, q, k, v, ones, o, shape, scale_log2, 1)),
                (consumer, (out_desc, lse_ptr, q, k, v, ones, o, shape, scale_log2, 2)),
                (consumer, (out_desc, lse_ptr, q, k, v, ones, o, shape, scale_log2, 3)),
                (producer, (q_desc, k_desc, v_desc, q, k, v, shape)),
            ],
            [4, 4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )
