"""fp8 attention forward: e4m3 products, one producer warp, consumer warpgroups of 64 query rows.

The roles are those of forward.py. What differs: V comes turned (fp8_values.py), P is rounded to
e4m3 in registers (fp8_softmax.py, fp8_recheck.py), and output sums leave the matrix unit's
accumulators, which keep some 14 bits, for float32 ones every FLUSH key tiles (fp8_sums.py).

B batch, H query head, G kv head, M query rows, N keys, D qk dim, E v dim, L lanes that share a row.
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
from heedful.kernels.hopper.compat import reinterpret
from heedful.kernels.hopper.deal import DEAL_SLOTS, Deal
from heedful.kernels.hopper.fp8_output import Outputs, store_rows
from heedful.kernels.hopper.fp8_recheck import (
    E4M3_BITS,
    FINITE_BITS,
    any_above,
    exponentials,
    redo,
    rescale,
    rescore,
)
from heedful.kernels.hopper.fp8_scales import Scales
from heedful.kernels.hopper.fp8_shape import Fp8Shape, values_at
from heedful.kernels.hopper.fp8_softmax import (
    from_words,
    part_sums,
    reference,
    shift_of,
    softmax_careful,
    to_words,
)
from heedful.kernels.hopper.fp8_sums import allocate_sums, cleared, store_sums, with_sums
from heedful.kernels.hopper.fp8_turner import (
    RAW_SLOTS,
    TURN_WARPS,
    Turning,
    turner,
    wait_for_turner,
)
from heedful.kernels.hopper.masking import hide_outside
from heedful.kernels.hopper.schedule import (
    ROWS,
    key_range,
    keys_at,
    needs_mask,
    next_masked,
    rows_at,
    visited,
    visits_last_second,
)
from heedful.kernels.hopper.slots import Slots
from heedful.kernels.hopper.softmax import scale_rows
from heedful.kernels.hopper.terms import cap
from heedful.kernels.hopper.turns import pass_turn, skip, skip_all, take_turn
from heedful.kernels.hopper.work import hear, hear_next, take, tell


@gluon.jit
def producer(q_desc, k_desc, v_desc, q, slots, deal, turning, shape):
    """Feeds every tile's queries, and its keys and values in the order of visits."""
    at_q = Cursor.start(shape.Q_SLOTS)
    at = slots.start()
    at_deal = Cursor.start(DEAL_SLOTS)
    index = gl.program_id(0)
    while index < deal.count:
        tile, split = take(shape, index)
        tell(shape, deal, index, tile, split, at_deal)
        at_deal = at_deal.next()
        keys = key_range(shape, tile, tile.row, shape.CONSUMERS * ROWS)
        last_second = visits_last_second(shape, keys)
        steps = keys.end - keys.begin
        col = visited(keys, 0, last_second) * shape.BLOCK_N
        if steps > 0:
            slots.k.load(k_desc, keys_at(shape, tile, col), at.k)
            at = at.after_keys()
        for w in gl.static_range(shape.CONSUMERS):
            q.load(q_desc, rows_at(shape, tile, tile.row + w * ROWS), at_q)
            at_q = at_q.next()
        for step in range(1, steps):
            is_first = (step == 1) | (last_second & (step == 2))
            wait_for_turner(turning, tile, col, is_first, shape.BLOCK_N)
            next_col = visited(keys, step, last_second) * shape.BLOCK_N
            k_at, v_at = keys_at(shape, tile, next_col), values_at(shape, tile, col)
            slots.load(k_desc, k_at, v_desc, v_at, at)
            at = at.next()
            col = next_col
        if steps > 0:
            is_first = (steps == 1) | (last_second & (steps == 2))
            wait_for_turner(turning, tile, col, is_first, shape.BLOCK_N)
            slots.v.load(v_desc, values_at(shape, tile, col), at.values())
            at = at.after_values()
        index = deal.draw(index)
    deal.tell((deal.count,), at_deal)


@gluon.jit
def hide_keys(x_MN, shape, tile, row, col, HIDDEN: gl.constexpr):
    """Query rows from `row` and keys from `col`, with the unseen ones at HIDDEN."""
    M: gl.constexpr = x_MN.shape[0]
    rows: gl.constexpr = gl.SliceLayout(1, x_MN.type.layout)
    stop_M = gl.full([M], 0, gl.int32, rows) + (tile.len_k - col)
    diagonal_M = gl.arange(0, M, layout=rows) + (row + tile.off - col)
    if shape.IS_RIGHT:
        stop_M = gl.minimum(stop_M, diagonal_M + (shape.right + 1))
    start_M = None
    if shape.IS_LEFT:
        start_M = diagonal_M - shape.left
    return hide_outside(x_MN, start_M, stop_M, HIDDEN)


@gluon.jit
def modify(s_MN, where, j, factors, MAY_HIDE: gl.constexpr):
    """Raw scores of key tile j under softcap, with unseen keys hidden if there may be any.
    where: keys, shape, tile, row. factors: as Scales.of_scores gives them."""
    keys, shape, tile, row = where
    softcap_scale, scale_log2 = factors
    if shape.HAS_SOFTCAP:
        s_MN = cap(s_MN, softcap_scale)
    if MAY_HIDE:
        hides = needs_mask(keys, j)
        if hides:
            # At the infinity that the scale, which may be negative, makes -inf.
            if scale_log2 < 0.0:
                s_MN = hide_keys(s_MN, shape, tile, row, j * shape.BLOCK_N, float("inf"))
            else:
                s_MN = hide_keys(s_MN, shape, tile, row, j * shape.BLOCK_N, float("-inf"))
    return s_MN


@gluon.jit
def queue_scores(q, k, at_q, at, BLOCK_N: gl.constexpr):
    """Starts q k^T of one tile of keys."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    s_MN = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    k_DN = k.tile(at).permute((1, 0))
    return warpgroup_mma(q.tile(at_q), k_DN, s_MN, use_acc=False, is_async=True)


@gluon.jit
def queue_output(words, v, at, acc_ME, adds):
    """Starts p, packed in words, times one tile of values: added to the output, or in its place."""
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_ME.type.layout, 4)
    p_MN = from_words(words, p_layout)
    v_NE = v.tile(at).permute((1, 0))
    return warpgroup_mma(p_MN, v_NE, acc_ME, use_acc=adds, is_async=True)


@gluon.jit
def answer(q, k, at_q, at, p_MN, sums_MCL, m_M, l_ML, where, j, factors, MASKED: gl.constexpr):
    """What a warp does about sums above the limit: p, its sums, references, the sums before, and
    what these and the output so far are scaled by. Scores only if p has become infinite."""
    if any_above(sums_MCL, FINITE_BITS) == 0:
        p_MN, sums_ML, m_M, l_ML, alpha_M = rescale(p_MN, m_M, l_ML)
    else:
        s_MN = rescore(q, k, at_q, at, p_MN.type)
        s_MN = modify(s_MN, where, j, factors, MASKED)
        _, scale_log2 = factors
        p_MN, sums_ML, m_M, l_ML, alpha_M = redo(s_MN, m_M, l_ML, scale_log2)
    return p_MN, sums_ML, m_M, l_ML, alpha_M


@gluon.jit
def flush(sums, acc_ME, sum_ME, m_M, base_M, products, shape):
    """Every FLUSH products, takes the accumulators into the float32 sums and their base."""
    if products % shape.FLUSH == 0:
        if shape.SUMS_IN_REGS:
            sum_ME = sum_ME + acc_ME
        else:
            # The first time there is nothing to add to, but the last output to wait for.
            if products > shape.FLUSH:
                acc_ME = with_sums(sums, acc_ME, m_M, base_M)
            else:
                tma.store_wait(0)
                gl.barrier()
            store_sums(sums, acc_ME)
            base_M = m_M
    return acc_ME, sum_ME, base_M


@gluon.jit
def attend(
    q, slots, sums, at_q, at, keys, last_second, shape, tile, row, factors, WORKER: gl.constexpr
):
    """Streams the keys of `keys` (at least one) past one consumer's rows.

    The scores of a tile and the output of the tile before are computed while the exponentials of
    this one run. Returns with the last product on its way: what `finish` needs of it, references,
    row sums, and the next slot.
    """
    BLOCK_N: gl.constexpr = shape.BLOCK_N
    MASKED: gl.constexpr = shape.IS_RIGHT or shape.IS_LEFT
    # Behind the innermost loop, ahead of masks and alarms: there as one block it costs fewer jumps.
    FLUSHES_NEARBY: gl.constexpr = shape.SUMS_IN_REGS and MASKED
    where = (keys, shape, tile, row)
    _, scale_log2 = factors
    k, v = slots.k, slots.v
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, v.rows, 32])
    acc_ME = cleared(ROWS, v.rows, o_layout)
    sum_ME = acc_ME
    if shape.SUMS_IN_REGS:
        sum_ME = cleared(ROWS, v.rows, o_layout)
    steps = keys.end - keys.begin
    j = visited(keys, 0, last_second)

    slots.wait(at)
    take_turn(shape, WORKER)
    s_MN = queue_scores(q, k, at_q, at.k, BLOCK_N)
    pass_turn(shape, WORKER)
    s_MN = warpgroup_mma_wait(0, deps=[s_MN])
    slots.release_keys_after_mma(at)
    # Without a mask, the last tile alone can have keys past the end.
    s_MN = modify(s_MN, where, j, factors, True)
    m_M = reference(s_MN, scale_log2)
    base_M = m_M
    p_MN = gl.exp2(s_MN * scale_log2 - shift_of(m_M)[:, None])
    sums_MCL = part_sums(p_MN)
    l_ML = gl.sum(sums_MCL, 1)
    words = to_words(p_MN)
    before_ML = l_ML
    at_before = at
    at = at.after_keys()
    slots.wait(at, steps > 1)
    moved = gl.to_tensor(0)
    alpha_M = gl.full(m_M.shape, 1.0, gl.float32, m_M.type.layout)
    step = gl.to_tensor(1)
    while step < steps:
        # What few steps need is outside of the loop below: jumped over it would cost every step.
        # So it ends before the next of them, `last`.
        last = steps - 1
        if shape.LATE and MASKED:
            # The last key tile is visited at step 1 if not at 0.
            masked = next_masked(keys, step)
            last = gl.minimum(last, gl.where(last_second & (step == 1), 1, masked))
        goes = step <= last
        while goes:
            counts = gl.to_tensor(True)
            while counts:
                if not shape.LATE:
                    words = to_words(p_MN)
                take_turn(shape, WORKER)
                s_MN = queue_scores(q, k, at_q, at.k, BLOCK_N)
                slots.wait_for_values(at)
                acc_ME = queue_output(words, v, at.values(), acc_ME, (step - 1) % shape.FLUSH != 0)
                pass_turn(shape, WORKER)
                s_MN = warpgroup_mma_wait(1, deps=[s_MN])
                slots.release_keys_after_mma(at)
                # That these scores are there means that every warp is done with the slot before.
                slots.release_kept_after_mma(at_before)
                j = keys.end - 1 - step
                if shape.LATE:
                    s_MN = modify(s_MN, where, j, factors, False)
                    p_MN, sums_MCL = exponentials(s_MN, m_M, scale_log2)
                    before_ML = l_ML
                    l_ML = l_ML + gl.sum(sums_MCL, 1)
                    if not shape.LOOKS_LAST:
                        moved = any_above(sums_MCL, E4M3_BITS)
                    words = to_words(p_MN)
                else:
                    s_MN = modify(s_MN, where, j, factors, MASKED)
                    p_MN, m_M, l_ML, alpha_M, moved = softmax_careful(
                        s_MN, m_M, l_ML, scale_log2, MASKED
                    )
                at_before = at
                at = at.next()
                # A wait loop ends a basic block: else ptxas would hoist the wait below over the
                # exponentials.
                slots.wait(at, step + 1 < steps)
                acc_ME = warpgroup_mma_wait(0, deps=[acc_ME])
                if shape.LOOKS_LAST:
                    moved = any_above(sums_MCL, E4M3_BITS)
                slots.release_values_after_mma(at_before)
                counts = (moved == 0) & (step < last) & (step % shape.FLUSH != 0)
                step += 1
            if FLUSHES_NEARBY:
                acc_ME, sum_ME, base_M = flush(sums, acc_ME, sum_ME, m_M, base_M, step - 1, shape)
                goes = (moved == 0) & (step <= last)
            else:
                goes = gl.to_tensor(False)
        if shape.LATE:
            j = visited(keys, step - 1, last_second)
            if MASKED:  # noqa: SIM102  (known when compiling, and `and` is not)
                if needs_mask(keys, j):
                    p_MN = hide_keys(p_MN, shape, tile, row, j * BLOCK_N, 0.0)
                    sums_MCL = part_sums(p_MN)
                    l_ML = before_ML + gl.sum(sums_MCL, 1)
                    moved = any_above(sums_MCL, E4M3_BITS)
                    words = to_words(p_MN)
            if moved != 0:
                k_before = at_before.k
                p_MN, sums_ML, m_M, before_ML, alpha_M = answer(
                    q, k, at_q, k_before, p_MN, sums_MCL, m_M, before_ML, where, j, factors, MASKED
                )
                l_ML = before_ML + sums_ML
                words = to_words(p_MN)
                acc_ME = scale_rows(acc_ME, alpha_M)
                if shape.SUMS_IN_REGS:
                    sum_ME = scale_rows(sum_ME, alpha_M)
        elif moved != 0:
            acc_ME = scale_rows(acc_ME, alpha_M)
        if not FLUSHES_NEARBY:
            acc_ME, sum_ME, base_M = flush(sums, acc_ME, sum_ME, m_M, base_M, step - 1, shape)
    if not shape.LATE:
        words = to_words(p_MN)
    slots.wait_for_values(at)
    adds = (steps - 1) % shape.FLUSH != 0
    running_ME = queue_output(words, v, at.values(), acc_ME, adds)
    return (running_ME, sum_ME, base_M, at_before), m_M, l_ML, at


@gluon.jit
def finish(q, slots, sums, at_q, at, rest, m_M, keys, shape):
    """The unnormalised output: waits for the last product, frees what it read, adds the sums."""
    running_ME, sum_ME, base_M, at_before = rest
    acc_ME = warpgroup_mma_wait(0, deps=[running_ME])
    slots.release_kept_after_mma(at_before)
    q.release_after_mma(at_q)
    slots.release_last_values_after_mma(at)
    if shape.SUMS_IN_REGS:
        return acc_ME + sum_ME
    else:
        if keys.end - keys.begin > shape.FLUSH:
            acc_ME = with_sums(sums, acc_ME, m_M, base_M)
        return acc_ME


@gluon.jit
def consumer(outputs, scales, all_sums, q, slots, deal, shape, WORKER: gl.constexpr):
    """Computes rows [64 WORKER, 64 WORKER + 64) of every tile of this program."""
    E: gl.constexpr = slots.v.rows
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 32])
    row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    at = slots.start()
    at_q = Cursor(gl.to_tensor(WORKER), gl.to_tensor(0), shape.Q_SLOTS)
    sums = all_sums.index(WORKER)
    # Sums are done with when the output takes their place.
    o_smem = reinterpret(
        sums, outputs.desc.dtype, outputs.desc.block_type.shape, outputs.desc.layout
    )
    if WORKER == shape.CONSUMERS - 1:
        pass_turn(shape, WORKER)
    at_deal = Cursor.start(DEAL_SLOTS)
    index = deal.follow(gl.program_id(0) - gl.num_programs(0), at_deal)
    if shape.HEARS_AHEAD:
        tile, _ = hear(shape, deal, index, at_deal)
    while index < deal.count:
        if not shape.HEARS_AHEAD:
            tile, _ = hear(shape, deal, index, at_deal)
        row = tile.row + WORKER * ROWS
        whole = key_range(shape, tile, tile.row, shape.CONSUMERS * ROWS)
        keys = key_range(shape, tile, row, ROWS)
        factors = scales.of_scores(tile, shape.HAS_SOFTCAP)
        v_scale = scales.of_values(tile)
        q.wait(at_q)
        if keys.end > keys.begin:
            at = skip(slots, at, whole.end - keys.end, shape, WORKER)
            last_second = visits_last_second(shape, whole)
            rest, m_M, l_ML, at = attend(
                q, slots, sums, at_q, at, keys, last_second, shape, tile, row, factors, WORKER
            )
            if shape.HEARS_AHEAD:
                # The last product runs meanwhile.
                at_deal = at_deal.next()
                index, next_tile = hear_next(shape, deal, index, at_deal)
            acc_ME = finish(q, slots, sums, at_q, at, rest, m_M, keys, shape)
            l_M = gl.sum(l_ML, 1)
            at = at.after_values()
            at = skip(slots, at, keys.begin - whole.begin, shape, WORKER)
            m_M = gl.convert_layout(m_M, row_layout)
            l_M = gl.convert_layout(l_M, row_layout)
            store_rows(outputs, o_smem, acc_ME, m_M, l_M, tile, row, shape, v_scale)
            if shape.HEARS_AHEAD:
                tile = next_tile
        else:
            at = skip_all(slots, at, whole.end - whole.begin, shape, WORKER)
            q.release(at_q)
            if row < tile.len_q:
                none_M = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
                zero_M = gl.zeros([ROWS], gl.float32, row_layout)
                zero_ME = gl.zeros([ROWS, E], gl.float32, o_layout)
                store_rows(outputs, o_smem, zero_ME, none_M, zero_M, tile, row, shape, v_scale)
            if shape.HEARS_AHEAD:
                at_deal = at_deal.next()
                index, tile = hear_next(shape, deal, index, at_deal)
        at_q = at_q.ahead(shape.CONSUMERS)
        if not shape.HEARS_AHEAD:
            at_deal = at_deal.next()
            index = deal.follow(index, at_deal)
    tma.store_wait(0)


@gluon.jit
def forward(
    q_desc,
    k_desc,
    v_desc,
    q_descale,
    k_descale,
    v_descale,
    sink_ptr,
    cu_q,
    cu_k,
    order,
    drawn,
    raw_v_desc,
    turned_v,
    turn_counts,
    out_desc,
    lse_ptr,
    scale_log2,
    softcap_scale,
    stride_qdb,
    stride_qdh,
    stride_kdb,
    stride_kdh,
    stride_vdb,
    stride_vdh,
    heads,
    group,
    seqlen_q,
    seqlen_k,
    total_q,
    row_blocks,
    tiles,
    section,
    sections,
    left,
    right,
    shift,
    align,
    heads_k,
    dim_v,
    padded_k,
    pieces,
    BLOCK_N: gl.constexpr,
    CONSUMERS: gl.constexpr,
    Q_SLOTS: gl.constexpr,
    STAGES: gl.constexpr,
    FLUSH: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
    LATE: gl.constexpr,
    LOOKS_LAST: gl.constexpr,
    HEARS_AHEAD: gl.constexpr,
    SUMS_IN_REGS: gl.constexpr,
    ORDERED: gl.constexpr,
    TURNS: gl.constexpr,
    IS_RIGHT: gl.constexpr,
    IS_LEFT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
):
    """out = softmax(scale q k^T + mask) v over tensor maps (batch, head, row, dim); of turned
    values: (batch, head, dim, position)."""
    if order is not None:
        tiles = gl.load(order) * heads
    shape = Fp8Shape(
        heads,
        group,
        seqlen_q,
        seqlen_k,
        total_q,
        row_blocks,
        tiles,
        section,
        sections,
        left,
        right,
        shift,
        align,
        cu_q,
        cu_k,
        order,
        BLOCK_N,
        CONSUMERS,
        Q_SLOTS,
        FLUSH,
        LATE,
        LOOKS_LAST,
        HEARS_AHEAD,
        SUMS_IN_REGS,
        ORDERED,
        IS_RIGHT,
        IS_LEFT,
        HAS_SOFTCAP,
    )
    scales = Scales(
        scale_log2,
        softcap_scale,
        q_descale,
        k_descale,
        v_descale,
        stride_qdb,
        stride_qdh,
        stride_kdb,
        stride_kdh,
        stride_vdb,
        stride_vdh,
    )
    # Each consumer has slots of its own, see `channel.full_barriers`.
    gl.static_assert(Q_SLOTS % CONSUMERS == 0)
    q = Channel.allocate(q_desc, Q_SLOTS, 1)
    # At D256 keys are looked at no more once their scores are there, and memory holds two slots:
    # too few to keep keys as long as values.
    k = Channel.allocate(k_desc, STAGES, CONSUMERS)
    if LATE:
        v = Channel.beside(v_desc, k)
    else:
        v = Channel.allocate(v_desc, STAGES, CONSUMERS)
    slots = Slots.of(k, v, LATE, LATE)
    kept: gl.constexpr = out_desc.dtype if SUMS_IN_REGS else gl.float32
    sums = allocate_sums(CONSUMERS, slots.v.rows, kept)
    deal = Deal.of(shape.tiles, drawn, CONSUMERS)
    outputs = Outputs(out_desc, lse_ptr, sink_ptr)
    turning: gl.constexpr = None
    if TURNS:
        section_k = gl.maximum(section // group, 1)
        sections_k = section * sections // group // section_k
        sizes = (heads_k, section_k, sections_k, dim_v, padded_k, pieces)
        turning = Turning(turned_v, turn_counts, *sizes, slots.v.rows)
        raw = Channel.allocate(raw_v_desc, RAW_SLOTS, 1)
    feed = (q_desc, k_desc, v_desc, q, slots, deal, turning, shape)
    fence_async_shared()
    # A partition is compiled on its own, so that each consumer must be spelled out.
    if CONSUMERS == 2:
        gl.warp_specialize(
            (
                (consumer, (outputs, scales, sums, q, slots, deal, shape, 0)),
                (consumer, (outputs, scales, sums, q, slots, deal, shape, 1)),
                (producer, feed),
            )
            + (((turner, (raw_v_desc, turning, raw)),) if TURNS else ()),
            (4, 1) + ((TURN_WARPS,) if TURNS else ()),
            (CONSUMER_REGS, PRODUCER_REGS) + ((PRODUCER_REGS,) if TURNS else ()),
        )
    else:
        gl.warp_specialize(
            (
                (consumer, (outputs, scales, sums, q, slots, deal, shape, 0)),
                (consumer, (outputs, scales, sums, q, slots, deal, shape, 1)),
                (consumer, (outputs, scales, sums, q, slots, deal, shape, 2)),
                (producer, feed),
            )
            + (((turner, (raw_v_desc, turning, raw)),) if TURNS else ()),
            (4, 4, 1) + ((TURN_WARPS,) if TURNS else ()),
            (CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS) + ((PRODUCER_REGS,) if TURNS else ()),
        )
