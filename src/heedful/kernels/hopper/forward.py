"""Attention forward: one producer warp, and consumer warpgroups of 64 query rows each.

B batch, H query head, M query rows, N keys, D qk dim, E v dim, L lanes that share a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma_wait,
)

from heedful.kernels.hopper.channel import Channel, Cursor, allocate_boxes
from heedful.kernels.hopper.chunks import (
    finish_output,
    no_output,
    queue_output,
    queue_scores,
    scale_output,
)
from heedful.kernels.hopper.compat import HAS_INLINE_ASM
from heedful.kernels.hopper.deal import DEAL_SLOTS, Deal
from heedful.kernels.hopper.dropout import Dropout, drop
from heedful.kernels.hopper.masking import hide_outside
from heedful.kernels.hopper.output import Outputs, store_nothing, store_rows
from heedful.kernels.hopper.pairs import from_pairs, to_pairs
from heedful.kernels.hopper.recheck import (
    exponentials,
    headroom,
    must_redo,
    redo,
    rescore,
    sum_limit,
)
from heedful.kernels.hopper.schedule import ROWS, needs_mask, next_masked
from heedful.kernels.hopper.sequences import (
    Storage,
    load_keys,
    load_keys_and_values,
    position,
    queries_at,
)
from heedful.kernels.hopper.shape import Shape
from heedful.kernels.hopper.slots import Slots
from heedful.kernels.hopper.softmax import (
    lane_sums,
    lazy_limit,
    softmax_first,
    softmax_lazy,
    softmax_step,
)
from heedful.kernels.hopper.terms import Terms, add_terms, cap, load_bias
from heedful.kernels.hopper.turns import pass_turn, skip, skip_all, take_turn
from heedful.kernels.hopper.work import (
    consumer_keys,
    count,
    hear,
    key_tile,
    program_keys,
    steps_of,
    take,
    tell,
)


@gluon.jit
def hide_keys(s_MN, keys, shape, tile, row, j, HIDDEN: gl.constexpr = float("-inf")):
    """Scores of query rows from `row` and key tile j, or what became of them, with the unseen ones
    at HIDDEN."""
    col = j * shape.BLOCK_N
    M: gl.constexpr = s_MN.shape[0]
    layout: gl.constexpr = s_MN.type.layout
    stop_M = gl.full([M], 0, gl.int32, gl.SliceLayout(1, layout)) + (tile.len_k - col)
    place_M = position(shape, gl.arange(0, M, layout=gl.SliceLayout(1, layout)))
    diagonal_M = place_M + (position(shape, row) + tile.off - col)
    if shape.IS_RIGHT:
        stop_M = gl.minimum(stop_M, diagonal_M + (shape.right + 1))
    if not shape.IS_LEFT:
        return hide_outside(s_MN, None, stop_M, HIDDEN)
    elif shape.first is None:
        # Most tiles that a bound of a window crosses the other does not.
        if j >= keys.full_end:
            s_MN = hide_outside(s_MN, None, stop_M, HIDDEN)
        if j < keys.full_begin:
            s_MN = hide_outside(s_MN, diagonal_M - shape.left, None, HIDDEN)
        return s_MN
    else:
        N: gl.constexpr = s_MN.shape[1]
        key_N = gl.arange(0, N, layout=gl.SliceLayout(0, layout))
        within_MN = key_N[None, :] >= (diagonal_M - shape.left)[:, None]
        within_MN = within_MN | (key_N < shape.first - col)[None, :]
        return gl.where(within_MN & (key_N[None, :] < stop_M[:, None]), s_MN, HIDDEN)


@gluon.jit
def hide_if_needed(s_MN, keys, shape, tile, row, j):
    """Scores of key tile j with the unseen ones at -inf, untouched if there are none."""
    if needs_mask(keys, j):
        s_MN = hide_keys(s_MN, keys, shape, tile, row, j)
    return s_MN


@gluon.jit
def placed(shape, place: gl.constexpr):
    """Which consumer's queries come in this place, and the other way round: in order of turns, or
    those that see the last key tile first."""
    return place if shape.ORDERED else shape.CONSUMERS - 1 - place


@gluon.jit
def producer(q_desc, k_desc, v_desc, q, slots, deal, shape):
    """Feeds every tile's queries, and its keys and values from the last to the first."""
    at_q = Cursor.start(shape.Q_SLOTS)
    at_full = Cursor.start(q.full.shape[0])
    at = slots.start()
    k_rows = shape.storage.k_rows
    v_rows = shape.storage.v_rows
    at_deal = Cursor.start(DEAL_SLOTS)
    index = gl.program_id(0)
    while index < deal.count:
        tile, split = take(shape, index)
        tell(shape, deal, index, tile, split, at_deal)
        at_deal = at_deal.next()
        keys = program_keys(shape, tile, split)
        steps = steps_of(shape, keys)
        col = key_tile(shape, keys, 0) * shape.BLOCK_N
        # Keys run one tile ahead of values, as the consumers take them.
        if steps > 0:
            load_keys(slots.k, k_desc, shape, tile, k_rows, col, at.k)
            at = at.after_keys()
        for place in gl.static_range(shape.CONSUMERS):
            row = tile.row + placed(shape, place) * ROWS
            q.load(q_desc, queries_at(shape, tile, row), at_q, at_full)
            at_q = at_q.next()
            at_full = at_full.next()
        for step in range(1, steps):
            next_col = key_tile(shape, keys, step) * shape.BLOCK_N
            load_keys_and_values(slots, k_desc, v_desc, shape, tile, next_col, col, at)
            at = at.next()
            col = next_col
        if steps > 0:
            load_keys(slots.v, v_desc, shape, tile, v_rows, col, at.values())
            at = at.after_values()
        index = deal.draw(index)
    deal.tell((deal.count,), at_deal)


@gluon.jit
def start_bias(shape, tile, row, j):
    """The bias of key tile j on its way to registers, 0 without one."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.BLOCK_N, 16])
    return load_bias(shape.terms, tile, row, j * shape.BLOCK_N, ROWS, shape.BLOCK_N, layout)


@gluon.jit
def modify(s_MN, bias_MN, shape, tile, row, j):
    """Scores of key tile j with softcap, ALiBi and bias, before the mask."""
    if shape.HAS_SOFTCAP:
        s_MN = cap(s_MN, shape.softcap_scale)
    return add_terms(s_MN, bias_MN, shape.terms, tile, row, j * shape.BLOCK_N)


@gluon.jit
def attend(
    q,
    slots,
    at_q,
    at,
    keys,
    shape,
    tile,
    row,
    WORKER: gl.constexpr,
):
    """Streams the keys of `keys` (at least one) past one consumer's rows.

    The scores of a tile and the output of the tile before are computed while the exponentials of
    this one run. Returns the unnormalised output, maximum, row sums, and the next place.
    """
    dtype: gl.constexpr = q.boxes.dtype
    BLOCK_N: gl.constexpr = shape.BLOCK_N
    MASKED: gl.constexpr = shape.IS_RIGHT or shape.IS_LEFT
    # A bias can hide keys as a mask can.
    HIDES: gl.constexpr = MASKED or shape.terms.bias is not None
    LIMIT: gl.constexpr = lazy_limit(dtype)
    LATE: gl.constexpr = shape.LAZY == 2
    HEAD: gl.constexpr = headroom(dtype) if LATE else 0.0
    k, v = slots.k, slots.v
    acc = no_output(v)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)

    slots.wait(at)
    take_turn(shape, WORKER)
    s_MN = queue_scores(q, k, at_q, at.k, BLOCK_N)
    pass_turn(shape, WORKER)
    j = key_tile(shape, keys, 0)
    bias_MN = start_bias(shape, tile, row, j)
    s_MN = warpgroup_mma_wait(0, deps=[s_MN])
    slots.release_keys_after_mma(at)
    s_MN = modify(s_MN, bias_MN, shape, tile, row, j)
    if needs_mask(keys, j):
        s_MN = hide_keys(s_MN, keys, shape, tile, row, j)
    p_MN, m_M = softmax_first(s_MN, shape.scale_log2, HEAD)
    sums_ML = lane_sums(p_MN)
    l_ML = sums_ML
    p_MN = drop(p_MN, shape.dropout, tile, row, j * BLOCK_N)
    p_MJ = to_pairs(p_MN, dtype)
    at_before = at
    at = at.after_keys()
    steps = steps_of(shape, keys)
    slots.wait(at, steps > 1)
    before_ML = l_ML
    moved = gl.to_tensor(0)
    step = gl.to_tensor(1)
    while step < steps:
        # What few steps need is outside of the loop below: jumped over it would cost every step.
        last = steps - 1
        if LATE and MASKED:
            last = gl.minimum(last, next_masked(keys, step))
        goes = step <= last
        while goes:
            p_dot_MN = from_pairs(p_MJ, dtype, p_layout)
            take_turn(shape, WORKER)
            s_MN = queue_scores(q, k, at_q, at.k, BLOCK_N)
            slots.wait_for_values(at)
            acc = queue_output(p_dot_MN, v, at.values(), acc)
            pass_turn(shape, WORKER)
            j = key_tile(shape, keys, step)
            bias_MN = start_bias(shape, tile, row, j)
            s_MN = warpgroup_mma_wait(len(acc), deps=[s_MN])
            slots.release_keys_after_mma(at)
            # That these scores are there means that every warp is done with the tile before.
            slots.release_kept_after_mma(at_before)
            s_MN = modify(s_MN, bias_MN, shape, tile, row, j)
            if LATE:
                p_MN, sums_ML = exponentials(s_MN, m_M, shape.scale_log2)
                before_ML = l_ML
                l_ML = l_ML + sums_ML
                moved = must_redo(sums_ML, sum_limit(dtype))
            else:
                if MASKED:
                    s_MN = hide_if_needed(s_MN, keys, shape, tile, row, j)
                if shape.LAZY:
                    p_MN, m_M, l_ML, alpha_M, moved = softmax_lazy(
                        s_MN, m_M, l_ML, shape.scale_log2, LIMIT, HIDES
                    )
                else:
                    p_MN, m_M, l_ML, alpha_M = softmax_step(
                        s_MN, m_M, l_ML, shape.scale_log2, HIDES
                    )
                    moved = gl.to_tensor(1)
                p_MN = drop(p_MN, shape.dropout, tile, row, j * BLOCK_N)
            at_before = at
            at = at.next()
            # A wait loop ends a basic block: else ptxas would hoist the wait below over the
            # exponentials.
            slots.wait(at, step + 1 < steps)
            acc = finish_output(acc)
            slots.release_values_after_mma(at_before)
            if not LATE:  # noqa: SIM102  (known when compiling, and `and` is not)
                if moved != 0:
                    acc = scale_output(acc, alpha_M)
            p_MJ = to_pairs(p_MN, dtype)
            # Without a mask the loop around this one ends here too, and `step < last`, which says
            # the same, has LLVM make one loop of the two.
            goes = step < last if MASKED else step + 1 < steps
            if LATE:
                goes = goes & (moved == 0)
            step += 1
        if LATE:
            if MASKED:  # noqa: SIM102  (known when compiling, and `and` is not)
                if needs_mask(keys, j):
                    p_MN = hide_keys(p_MN, keys, shape, tile, row, j, 0.0)
                    sums_ML = lane_sums(p_MN)
                    l_ML = before_ML + sums_ML
                    moved = must_redo(sums_ML, sum_limit(dtype))
                    p_MJ = to_pairs(p_MN, dtype)
            if moved != 0:
                s_MN = rescore(q, k, at_q, at_before.k, s_MN.type)
                s_MN = modify(s_MN, bias_MN, shape, tile, row, j)
                if MASKED:
                    s_MN = hide_if_needed(s_MN, keys, shape, tile, row, j)
                p_MN, sums_ML, m_M, before_ML, alpha_M = redo(
                    s_MN, m_M, before_ML, shape.scale_log2, HIDES, HEAD
                )
                l_ML = before_ML + sums_ML
                p_MJ = to_pairs(p_MN, dtype)
                acc = scale_output(acc, alpha_M)
    slots.wait_for_values(at)
    p_dot_MN = from_pairs(p_MJ, dtype, p_layout)
    acc = finish_output(queue_output(p_dot_MN, v, at.values(), acc))
    slots.release_kept_after_mma(at_before)
    if not shape.OUT_IN_Q:
        q.release_after_mma(at_q)
    slots.release_last_values_after_mma(at)
    return acc, m_M, gl.sum(l_ML, 1), at.after_values()


@gluon.jit
def consumer(outputs, q, slots, deal, shape, WORKER: gl.constexpr):
    """Computes rows [64 WORKER, 64 WORKER + 64) of every tile of this program."""
    E: gl.constexpr = slots.v.dim
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    at = slots.start()
    at_q = Cursor(gl.to_tensor(placed(shape, WORKER)), gl.to_tensor(0), shape.Q_SLOTS)
    at_full = Cursor(gl.to_tensor(placed(shape, WORKER)), gl.to_tensor(0), q.full.shape[0])
    at_deal = Cursor.start(DEAL_SLOTS)
    if WORKER == shape.CONSUMERS - 1:
        pass_turn(shape, WORKER)
    index = deal.follow(gl.program_id(0) - gl.num_programs(0), at_deal)
    while index < deal.count:
        tile, split = hear(shape, deal, index, at_deal)
        row = tile.row + WORKER * ROWS
        whole = program_keys(shape, tile, split)
        keys = consumer_keys(shape, tile, row, whole)
        place = at_q.slot if shape.OUT_IN_Q else gl.to_tensor(WORKER)
        q.wait(q.told(at_q, at_full))
        if steps_of(shape, keys) > 0:
            at = skip(slots, at, whole.end - keys.end, shape, WORKER)
            acc, m_M, l_M, at = attend(q, slots, at_q, at, keys, shape, tile, row, WORKER)
            at = skip(slots, at, keys.begin - whole.begin, shape, WORKER)
            m_M = gl.convert_layout(m_M, row_layout)
            l_M = gl.convert_layout(l_M, row_layout)
            store_rows(outputs, acc, m_M, l_M, tile, row, split, shape, place)
        else:
            at = skip_all(slots, at, steps_of(shape, whole), shape, WORKER)
            if not shape.OUT_IN_Q:
                q.release(at_q)
            if position(shape, row) < tile.stored_q:
                store_nothing(outputs, no_output(slots.v), tile, row, split, shape, place)
        if shape.OUT_IN_Q:
            tma.store_wait(0)
            q.release(at_q)
        at_q = at_q.ahead(shape.CONSUMERS)
        at_full = at_full.ahead(shape.CONSUMERS)
        at_deal = at_deal.next()
        index = deal.follow(index, at_deal)
    tma.store_wait(0)


@gluon.constexpr_function
def _look(lazy, is_plain):
    """LAZY of a variant: inline assembly does both looks, and the late one takes plain scores."""
    if not HAS_INLINE_ASM:
        return 0
    return lazy if is_plain else min(lazy, 1)


@gluon.jit
def forward(
    q_desc,
    k_desc,
    v_desc,
    bias_ptr,
    alibi_ptr,
    sink_ptr,
    seed_ptr,
    cu_q,
    cu_k,
    order,
    drawn,
    used_q,
    used_k,
    leftpad_k,
    kv_batch_idx,
    block_table,
    out_desc,
    lse_ptr,
    parts_ptr,
    scale_log2,
    softcap_scale,
    per_unit,
    drop_threshold,
    drop_scale,
    origin_b,
    origin_h,
    origin_m,
    origin_n,
    stride_biasb,
    stride_biash,
    stride_biasm,
    stride_biasn,
    stride_alibib,
    stride_table,
    k_rows,
    v_rows,
    page_size,
    entries,
    dim_v,
    packed,
    heads,
    group,
    seqlen_q,
    seqlen_k,
    total_q,
    longest_k,
    row_blocks,
    tiles,
    section,
    sections,
    left,
    right,
    shift,
    align,
    first,
    splits,
    BLOCK_N: gl.constexpr,
    TAIL_D: gl.constexpr,
    TAIL_E: gl.constexpr,
    PACK: gl.constexpr,
    CONSUMERS: gl.constexpr,
    Q_SLOTS: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    AS_ONE: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
    OUT_IN_Q: gl.constexpr,
    ORDERED: gl.constexpr,
    LAZY: gl.constexpr,
    IS_RIGHT: gl.constexpr,
    IS_LEFT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    IS_RAGGED: gl.constexpr,
    NO_PAGE: gl.constexpr,
):
    """out = softmax(scale q k^T + terms + mask) v over (batch, head, row, dim) tensor maps.

    TAIL_D, TAIL_E: whether a tile of queries or keys, of values or results is 192 columns.
    AS_ONE: keys and values share slots, see slots.py.
    LAZY: 0 moves a row's maximum with every tile; 1 looks at scores first, 2 at sums afterwards.
    What a call lacks is None. parts_ptr: results of each of `splits` parts of the keys, which then
    go there and to an lse with a leading split, and `out` is left alone.
    """
    storage = Storage(
        used_q,
        used_k,
        leftpad_k,
        kv_batch_idx,
        block_table,
        stride_table,
        page_size,
        entries,
        k_rows,
        v_rows,
        IS_RAGGED,
        NO_PAGE,
    )
    terms = Terms(
        alibi_ptr,
        stride_alibib,
        bias_ptr,
        stride_biasb,
        stride_biash,
        stride_biasm,
        stride_biasn,
        per_unit,
        longest_k,
    )
    # A look at the sums afterwards needs scores again: cheap to have only where nothing is loaded
    # for them, and seldom only where they do not grow from tile to tile, as ALiBi makes them up to
    # the diagonal.
    ALIKE: gl.constexpr = bias_ptr is None and alibi_ptr is None
    PLAIN: gl.constexpr = ALIKE and seed_ptr is None and not TAIL_D
    LOOK: gl.constexpr = _look(LAZY, PLAIN)
    dropout = Dropout(seed_ptr, drop_threshold, drop_scale, origin_b, origin_h, origin_m, origin_n)
    if order is not None:
        tiles = gl.load(order) * heads
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
        sections,
        left,
        right,
        shift,
        align,
        first,
        splits,
        dim_v,
        packed,
        cu_q,
        cu_k,
        order,
        storage,
        terms,
        dropout,
        BLOCK_N,
        PACK,
        CONSUMERS,
        Q_SLOTS,
        OUT_IN_Q,
        ORDERED,
        LOOK,
        IS_RIGHT,
        IS_LEFT,
        HAS_SOFTCAP,
    )
    q = Channel.allocate(q_desc, Q_SLOTS, 1, TAIL_D, CONSUMERS)
    if block_table is None:
        k = Channel.allocate(k_desc, K_STAGES, CONSUMERS, TAIL_D)
        if AS_ONE:
            gl.static_assert(K_STAGES == V_STAGES and not TAIL_E)
            v = Channel.beside(v_desc, k)
        else:
            v = Channel.allocate(v_desc, V_STAGES, CONSUMERS, TAIL_E)
    else:
        gl.static_assert(not AS_ONE)
        D: gl.constexpr = q_desc.block_type.shape[-1]
        E: gl.constexpr = out_desc.block_type.shape[-1]
        k = Channel.of_tiles(k_desc.dtype, BLOCK_N, D, K_STAGES, CONSUMERS)
        v = Channel.of_tiles(v_desc.dtype, BLOCK_N, E, V_STAGES, CONSUMERS)
    slots = Slots.of(k, v, AS_ONE, LOOK == 2)
    o = None
    o_tails = None
    if OUT_IN_Q:
        o = q.boxes
        if TAIL_E:
            o_tails = q.tails
    elif parts_ptr is None:
        each: gl.constexpr = slots.v.dim // out_desc.block_type.shape[-1]
        o = allocate_boxes(out_desc, each * CONSUMERS)
        if TAIL_E:
            o_tails = allocate_boxes(out_desc, CONSUMERS)
    deal = Deal.of(count(shape), drawn, CONSUMERS)
    fence_async_shared()
    outputs = Outputs(out_desc, o, o_tails, lse_ptr, sink_ptr, parts_ptr)
    feed = (q_desc, k_desc, v_desc, q, slots, deal, shape)
    # A partition is compiled on its own, so that each consumer must be spelled out.
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(consumer, (outputs, q, slots, deal, shape, 0)), (producer, feed)],
            [1],
            [PRODUCER_REGS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consumer, (outputs, q, slots, deal, shape, 0)),
                (consumer, (outputs, q, slots, deal, shape, 1)),
                (producer, feed),
            ],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (consumer, (outputs, q, slots, deal, shape, 0)),
                (consumer, (outputs, q, slots, deal, shape, 1)),
                (consumer, (outputs, q, slots, deal, shape, 2)),
                (producer, feed),
            ],
            [4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (outputs, q, slots, deal, shape, 0)),
                (consumer, (outputs, q, slots, deal, shape, 1)),
                (consumer, (outputs, q, slots, deal, shape, 2)),
                (consumer, (outputs, q, slots, deal, shape, 3)),
                (producer, feed),
            ],
            [4, 4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )
