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
from heedful.kernels.hopper.compat import HAS_INLINE_ASM, aggregate, optional, tma_store
from heedful.kernels.hopper.schedule import (
    ROWS,
    Shape,
    decode,
    key_range,
    keys_at,
    needs_mask,
    rows_at,
)
from heedful.kernels.hopper.softmax import (
    lane_sums,
    lazy_limit,
    scale_rows,
    softmax_first,
    softmax_lazy,
    softmax_step,
)

LN2: gl.constexpr = gl.constexpr(0.6931471805599453)
LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)


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


@aggregate
class Outputs:
    """Where results go, and the sink logits that enter them; lse and sink may be None."""

    desc: tma.tensor_descriptor
    boxes: gl.shared_memory_descriptor
    lse: gl.tensor | gl.constexpr
    sink: gl.tensor | gl.constexpr

    @gluon.constexpr_function
    def __init__(self, desc, boxes, lse, sink):
        self.desc = desc
        self.boxes = boxes
        self.lse = optional(lse)
        self.sink = optional(sink)


@gluon.jit
def cap(s_MN, softcap_scale):
    """tanh(s scale / softcap), as 1 - 2 / (1 + 2^(s softcap_scale)); what follows scales it by
    softcap log2(e)."""
    return 1.0 - 2.0 / (1.0 + gl.exp2(s_MN * softcap_scale))


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
def producer(q_desc, k_desc, v_desc, q, k, v, shape):
    """Feeds every tile's queries, and its keys and values from the last to the first."""
    at_q = Cursor.start(shape.CONSUMERS)
    at_k = Cursor.start(shape.K_STAGES)
    at_v = Cursor.start(shape.V_STAGES)
    for index in range(gl.program_id(0), shape.tiles, gl.num_programs(0)):
        tile = decode(shape, index)
        keys = key_range(shape, tile, tile.row, shape.CONSUMERS * ROWS)
        steps = keys.end - keys.begin
        col = (keys.end - 1) * shape.BLOCK_N
        # Keys run one tile ahead of values, as the consumers take them.
        if steps > 0:
            k.load(k_desc, keys_at(shape, tile, col), at_k)
            at_k = at_k.next()
        for w in gl.static_range(shape.CONSUMERS):
            q.load(q_desc, rows_at(shape, tile, tile.row + w * ROWS), at_q)
            at_q = at_q.next()
        for _ in range(1, steps):
            k.load(k_desc, keys_at(shape, tile, col - shape.BLOCK_N), at_k)
            v.load(v_desc, keys_at(shape, tile, col), at_v)
            at_k = at_k.next()
            at_v = at_v.next()
            col -= shape.BLOCK_N
        if steps > 0:
            v.load(v_desc, keys_at(shape, tile, col), at_v)
            at_v = at_v.next()


@gluon.jit
def skip(k, v, at_k, at_v, count, shape, WORKER: gl.constexpr):
    """Passes over tiles that other consumers of this program need and this one does not.

    No product holds the warps together here, so that releasing must: a warp that lagged behind
    would miss a phase of the barrier it waits for.
    """
    for _ in range(count):
        take_turn(shape, WORKER)
        pass_turn(shape, WORKER)
        k.wait(at_k)
        k.release(at_k)
        at_k = at_k.next()
        v.wait(at_v)
        v.release(at_v)
        at_v = at_v.next()
    return at_k, at_v


@gluon.jit
def attend(
    q,
    k,
    v,
    at_q,
    at_k,
    at_v,
    keys,
    shape,
    tile,
    row,
    WORKER: gl.constexpr,
):
    """Streams the keys of `keys` (at least one) past one consumer's rows.

    The scores of a tile and the output of the tile before are computed while the exponentials of
    this one run. Returns the unnormalised output, maximum, row sums, and the cursors.
    """
    q_MD = q.tile(at_q)
    dtype: gl.constexpr = q_MD.dtype
    BLOCK_N: gl.constexpr = shape.BLOCK_N
    MASKED: gl.constexpr = shape.IS_RIGHT or shape.IS_LEFT
    LIMIT: gl.constexpr = lazy_limit(dtype)
    # Where registers are scarce P crosses the loop's end as float32: packed there, ptxas copies it.
    LATE: gl.constexpr = shape.CONSUMERS >= 3
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, v.dim, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    zero_MN = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    acc_ME = gl.zeros([ROWS, v.dim], gl.float32, o_layout)

    k.wait(at_k)
    take_turn(shape, WORKER)
    s_MN = warpgroup_mma(q_MD, k.tile(at_k).permute((1, 0)), zero_MN, use_acc=False, is_async=True)
    pass_turn(shape, WORKER)
    s_MN = warpgroup_mma_wait(0, deps=[s_MN])
    k.release_after_mma(at_k)
    if shape.HAS_SOFTCAP:
        s_MN = cap(s_MN, shape.softcap_scale)
    # With three consumers a branch here makes their loops spill (Triton 3.9), a mask does not.
    if shape.CONSUMERS == 3 or needs_mask(keys, keys.end - 1):
        s_MN = hide_keys(s_MN, shape, tile, row, (keys.end - 1) * BLOCK_N)
    p_MN, m_M = softmax_first(s_MN, shape.scale_log2)
    l_ML = lane_sums(p_MN)
    if not LATE:
        p_MN = gl.convert_layout(p_MN.to(dtype), p_layout)
    at_k = at_k.next()
    steps = keys.end - keys.begin
    k.wait(at_k, pred=steps > 1)
    for step in range(1, steps):
        p_dot_MN = p_MN
        if LATE:
            p_dot_MN = gl.convert_layout(p_MN.to(dtype), p_layout)
        take_turn(shape, WORKER)
        s_MN = warpgroup_mma(
            q_MD, k.tile(at_k).permute((1, 0)), zero_MN, use_acc=False, is_async=True
        )
        v.wait(at_v)
        acc_ME = warpgroup_mma(p_dot_MN, v.tile(at_v), acc_ME, is_async=True)
        pass_turn(shape, WORKER)
        s_MN = warpgroup_mma_wait(1, deps=[s_MN])
        k.release_after_mma(at_k)
        if shape.HAS_SOFTCAP:
            s_MN = cap(s_MN, shape.softcap_scale)
        if MASKED:
            j = keys.end - 1 - step
            if needs_mask(keys, j):
                s_MN = hide_keys(s_MN, shape, tile, row, j * BLOCK_N)
        if shape.LAZY:
            p_MN, m_M, l_ML, alpha_M, moved = softmax_lazy(
                s_MN, m_M, l_ML, shape.scale_log2, LIMIT, MASKED, shape.FMA_EXP
            )
        else:
            p_MN, m_M, l_ML, alpha_M = softmax_step(s_MN, m_M, l_ML, shape.scale_log2, MASKED)
        # The next K tile's barrier also keeps ptxas from hoisting the wait below over the
        # exponentials: a wait loop ends a basic block.
        at_k = at_k.next()
        k.wait(at_k, pred=step + 1 < steps)
        acc_ME = warpgroup_mma_wait(0, deps=[acc_ME])
        v.release_after_mma(at_v)
        at_v = at_v.next()
        if shape.LAZY:
            if moved != 0:
                acc_ME = scale_rows(acc_ME, alpha_M)
        else:
            acc_ME = scale_rows(acc_ME, alpha_M)
        if not LATE:
            p_MN = gl.convert_layout(p_MN.to(dtype), p_layout)
    if not shape.OUT_IN_Q:
        q.release_after_mma(at_q)
    v.wait(at_v)
    if LATE:
        p_MN = gl.convert_layout(p_MN.to(dtype), p_layout)
    acc_ME = warpgroup_mma(p_MN, v.tile(at_v), acc_ME, is_async=True)
    acc_ME = warpgroup_mma_wait(0, deps=[acc_ME])
    v.release_after_mma(at_v)
    return acc_ME, m_M, gl.sum(l_ML, 1), at_k, at_v.next()


@gluon.jit
def store_rows(outputs, o_smem, acc_ME, m_M, l_M, tile, row, shape):
    """Normalises one consumer's rows and writes them and their log-sum-exp."""
    factor_M = gl.full(l_M.shape, 1.0, gl.float32, l_M.type.layout)
    if outputs.sink is not None:
        sink = gl.load(outputs.sink + tile.head) * LOG2E
        top_M = gl.maximum(m_M, sink)
        shift_M = gl.where(top_M == float("-inf"), 0.0, top_M)
        factor_M = gl.exp2(m_M - shift_M)
        l_M = l_M * factor_M + gl.exp2(sink - shift_M)
        m_M = top_M
    seen_M = l_M > 0.0
    inverse_M = gl.where(seen_M, factor_M / l_M, 0.0)
    tma.store_wait(0)
    o_smem.store(scale_rows(acc_ME, inverse_M).to(outputs.desc.dtype).reshape(o_smem.shape))
    fence_async_shared()
    tma_store(outputs.desc, rows_at(shape, tile, row), o_smem)
    if outputs.lse is not None:
        lse_M = gl.where(seen_M, (m_M + gl.log2(l_M)) * LN2, float("-inf"))
        rows_M = row + gl.arange(0, ROWS, layout=lse_M.type.layout)
        if shape.cu_q is not None:
            base = tile.head.to(gl.int64) * shape.total_q + tile.start_q
        else:
            base = (tile.batch * shape.heads + tile.head).to(gl.int64) * shape.seqlen_q
        gl.store(outputs.lse + base + rows_M, lse_M, mask=rows_M < tile.len_q)


@gluon.jit
def consumer(outputs, q, k, v, shape, WORKER: gl.constexpr):
    """Computes rows [64 WORKER, 64 WORKER + 64) of every tile of this program."""
    E: gl.constexpr = v.dim
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    at_k = Cursor.start(shape.K_STAGES)
    at_v = Cursor.start(shape.V_STAGES)
    parity = gl.to_tensor(0)
    o_smem = outputs.boxes.index(WORKER)
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
            at_k, at_v = skip(k, v, at_k, at_v, whole.end - keys.end, shape, WORKER)
            acc_ME, m_M, l_M, at_k, at_v = attend(
                q, k, v, at_q, at_k, at_v, keys, shape, tile, row, WORKER
            )
            at_k, at_v = skip(k, v, at_k, at_v, keys.begin - whole.begin, shape, WORKER)
            m_M = gl.convert_layout(m_M, row_layout)
            l_M = gl.convert_layout(l_M, row_layout)
            store_rows(outputs, o_smem, acc_ME, m_M, l_M, tile, row, shape)
        else:
            at_k, at_v = skip(k, v, at_k, at_v, whole.end - whole.begin, shape, WORKER)
            if not shape.OUT_IN_Q:
                q.release(at_q)
            if row < tile.len_q:
                none_M = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
                zero_M = gl.zeros([ROWS], gl.float32, row_layout)
                zero_ME = gl.zeros([ROWS, E], gl.float32, o_layout)
                store_rows(outputs, o_smem, zero_ME, none_M, zero_M, tile, row, shape)
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
    sink_ptr,
    cu_q,
    cu_k,
    out_desc,
    lse_ptr,
    scale_log2,
    softcap_scale,
    heads,
    group,
    seqlen_q,
    seqlen_k,
    total_q,
    row_blocks,
    tiles,
    section,
    left,
    right,
    shift,
    align,
    BLOCK_N: gl.constexpr,
    CONSUMERS: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
    OUT_IN_Q: gl.constexpr,
    ORDERED: gl.constexpr,
    LAZY: gl.constexpr,
    FMA_EXP: gl.constexpr,
    IS_RIGHT: gl.constexpr,
    IS_LEFT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
):
    """out = softmax(scale q k^T + mask) v over (batch, head, row, dim) tensor maps."""
    shape = Shape(
        scale_log2,
        softcap_scale,
        heads,
        group,
        seqlen_q,
        seqlen_k,
        total_q,
        row_blocks,
        tiles,
        section,
        left,
        right,
        shift,
        align,
        cu_q,
        cu_k,
        BLOCK_N,
        CONSUMERS,
        K_STAGES,
        V_STAGES,
        OUT_IN_Q,
        ORDERED,
        LAZY and HAS_INLINE_ASM,
        FMA_EXP,
        IS_RIGHT,
        IS_LEFT,
        HAS_SOFTCAP,
    )
    q = Channel.allocate(q_desc, CONSUMERS, 1)
    k = Channel.allocate(k_desc, K_STAGES, CONSUMERS)
    v = Channel.allocate(v_desc, V_STAGES, CONSUMERS)
    if OUT_IN_Q:
        o = q.boxes
    else:
        o = gl.allocate_shared_memory(
            out_desc.dtype, [CONSUMERS] + out_desc.block_type.shape, out_desc.layout
        )
    fence_async_shared()
    outputs = Outputs(out_desc, o, lse_ptr, sink_ptr)
    feed = (q_desc, k_desc, v_desc, q, k, v, shape)
    # A partition is compiled on its own, so that each consumer must be spelled out.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consumer, (outputs, q, k, v, shape, 0)),
                (consumer, (outputs, q, k, v, shape, 1)),
                (producer, feed),
            ],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (consumer, (outputs, q, k, v, shape, 0)),
                (consumer, (outputs, q, k, v, shape, 1)),
                (consumer, (outputs, q, k, v, shape, 2)),
                (producer, feed),
            ],
            [4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (outputs, q, k, v, shape, 0)),
                (consumer, (outputs, q, k, v, shape, 1)),
                (consumer, (outputs, q, k, v, shape, 2)),
                (consumer, (outputs, q, k, v, shape, 3)),
                (producer, feed),
            ],
            [4, 4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )
