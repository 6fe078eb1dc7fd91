"""A consumer warpgroup of the backward: it computes dK and dV of its 64 keys of every work tile,
and stores them. Where `kernel.py` says so, both consumers are one role of eight warps, which share
machine code and differ by a number (`this_consumer`).

M query rows, N keys (64), C columns of a part of a gradient.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from heedful.kernels.args.hopper_backward import HopperBackwardIO, HopperBackwardParams
from heedful.kernels.hopper.backward.columns import (
    no_gradients,
    part_columns,
    part_count,
    part_of,
    scaled,
)
from heedful.kernels.hopper.backward.dq.sums import store_registers
from heedful.kernels.hopper.backward.mainloop import backward_mainloop, pass_over
from heedful.kernels.hopper.backward.p_scale import p_descale
from heedful.kernels.hopper.backward.shared import (
    CONSUMERS,
    alternates,
    ds_bytes,
    ds_stages,
    sync_consumers,
    wait_for_outlet,
)
from heedful.kernels.hopper.backward.tile import (
    is_visited,
    key_tile,
    m_block_range,
    next_index,
    partial_row,
    stride_before,
    visit_range,
)
from heedful.kernels.hopper.sm90 import barrier
from heedful.kernels.hopper.sm90.compat import inline_asm, reinterpret, tma_store
from heedful.kernels.hopper.sm90.mma import ROWS
from heedful.kernels.hopper.sm90.pipeline import PipelineState, matrix, stage_of
from heedful.kernels.hopper.sm90.sequences import box
from heedful.kernels.hopper.sm90.tile_scheduler import SCHEDULER_STAGES, TileScheduler


@gluon.jit
def this_consumer():
    """The number of a thread's consumer, where both consumers are one role. The compiler treats it
    as one number of all eight warps, and tensors as the same in both warpgroups."""
    return inline_asm("mov.u32 $0, %tid.x; shr.u32 $0, $0, 7;", "=r", [], gl.int32)


@gluon.jit
def with_zeros(x_NC, row, params, tile):
    """One part of the gradients of keys from `row` on, with zeros for keys that are not in use."""
    if params.seqs.used_k is not None or params.mods.longest_k is not None:
        layout: gl.constexpr = gl.SliceLayout(1, x_NC.type.layout)
        key_N = row + gl.arange(0, ROWS, layout=layout)
        x_NC = gl.where((key_N < tile.seq.len_k)[:, None], x_NC, 0.0)
    return x_NC


@gluon.jit
def gradients_at(params, tile, row):
    """Coordinates of gradients of keys from `row` on, those that are not in use among them."""
    PACKED: gl.constexpr = params.seqs.cu_k is not None
    seq = tile.seq
    if params.seqs.leftpad_k is not None:
        # Padded sequences are dense: the map has rows of padding, which another kernel clears.
        row += seq.token_k
    return box(PACKED, tile.batch, tile.kv_head, seq.token_k, seq.stored_k, row)


@gluon.jit
def store_rows(desc, memory, others, x_NC, COLUMNS: gl.constexpr, params, tile, CONSUMER, column=0):
    """Stores the gradients of one consumer's keys by TMA, through its shared memory. others: that
    of both consumers, if they are one role, of which one thread stores for both. column: the first
    one."""
    row = tile.col + CONSUMER * ROWS
    if len(x_NC) == 1:
        x = with_zeros(x_NC[0], row, params, tile)
        memory.store(x.to(desc.dtype).reshape(memory.shape))
    else:
        rows = matrix(memory, ROWS, memory.shape[-1])
        for part in gl.static_range(len(x_NC)):
            x = with_zeros(x_NC[part], row, params, tile)
            part_of(rows, COLUMNS, part).store(x.to(desc.dtype))
    fence_async_shared()
    if gl.num_warps() == 8:
        for i in gl.static_range(CONSUMERS):
            row = tile.col + i * ROWS
            tma_store(desc, gradients_at(params, tile, row), others[i])
    else:
        tma_store(desc, gradients_at(params, tile, row)[:-1] + [column], memory)


@gluon.jit
def outlet(shared, desc, first: gl.constexpr, CONSUMER):
    """Shared memory for gradients of one consumer's keys. This is the memory of its dS, which one
    gradient or both fill. first: whether the gradient is the first of the two."""
    shape: gl.constexpr = desc.block_type.shape
    FIT: gl.constexpr = ds_bytes(shared) // desc.block_type.nbytes
    boxes = reinterpret(shared.ds, desc.dtype, [CONSUMERS * FIT] + shape, desc.layout)
    return boxes.index(CONSUMER * FIT + (0 if first else FIT - 1))


@gluon.jit
def store_dk(io, shared, dk, params, tile, is_tight: gl.constexpr, CONSUMER):
    """Stores scaled dK through the memory of dS. is_tight: which dV still fills."""
    if is_tight:
        wait_for_outlet()
    out = outlet(shared, io.dk, False, CONSUMER)
    others = outlet(shared, io.dk, False, 0), outlet(shared, io.dk, False, 1)
    store_rows(io.dk, out, others, dk, params.tile.D, params, tile, CONSUMER)


@gluon.jit
def store_gradients(io, shared, dk, dv, params, tile, visit, kv_count, CONSUMER):
    """Stores dV and dK through the memory of dS, once dQ has been computed from it; with
    DK_IN_KEYS dK through that of the consumer's last keys, which it still holds. kv_count: work
    tiles whose keys it has had."""
    D: gl.constexpr = io.dk.block_type.shape[-1]
    E: gl.constexpr = io.dv.block_type.shape[-1]
    for ahead in gl.static_range(params.tile.DS_STAGES):
        state = stage_of(visit + ahead, params.tile.DS_STAGES)
        barrier.wait(shared.ds_empty.index(state.index), state.phase ^ 1)
    out = outlet(shared, io.dv, True, CONSUMER)
    others = outlet(shared, io.dv, True, 0), outlet(shared, io.dv, True, 1)
    store_rows(io.dv, out, others, dv, params.tile.E, params, tile, CONSUMER)
    is_tight: gl.constexpr = ds_bytes(shared) < 2 * ROWS * (D + E)
    dk = scaled(dk, params.sizes.scale * p_descale(io.q.dtype))
    if params.ways.DK_IN_KEYS:
        if kv_count > 0:
            BOXES: gl.constexpr = [params.tile.K_STAGES * CONSUMERS] + io.dk.block_type.shape
            boxes = reinterpret(shared.k, io.dk.dtype, BOXES, io.dk.layout)
            first = stage_of(kv_count - 1, params.tile.K_STAGES).index * CONSUMERS
            others = boxes.index(first), boxes.index(first + 1)
            out = boxes.index(first + CONSUMER)
            store_rows(io.dk, out, others, dk, params.tile.D, params, tile, CONSUMER)
        else:
            store_dk(io, shared, dk, params, tile, is_tight, CONSUMER)
    else:
        store_dk(io, shared, dk, params, tile, is_tight, CONSUMER)


@gluon.jit
def store_partial(x_NC, before, COLUMNS: gl.constexpr, params, tile, CONSUMER):
    """Stores one gradient of one consumer's keys for the epilogue, in the order of registers.
    COLUMNS: columns of the gradient. before: columns of the gradients before it in memory."""
    ALL: gl.constexpr = params.tile.D + params.tile.E
    place = (partial_row(params, tile) + CONSUMER * ROWS) * ALL + before * ROWS
    for part in gl.static_range(len(x_NC)):
        at = place + part * part_columns(COLUMNS, 0) * ROWS
        store_registers(params.order.parts.partials + at, x_NC[part])


@gluon.jit
def store_gradient(
    desc,
    memory,
    x_NC,
    before,
    COLUMNS: gl.constexpr,
    params,
    tile,
    BOX: gl.constexpr,
    column=0,
):
    """Stores one gradient of 64 keys, or one split's addend of it. BOX: which 64 keys of the
    tile. before, column: as of `store_partial` and `store_rows`."""
    if params.order.parts.partials is None:
        store_rows(desc, memory, (), x_NC, COLUMNS, params, tile, BOX, column)
    else:
        store_partial(x_NC, before, COLUMNS, params, tile, BOX)


@gluon.jit
def send_partial(io, dk, dv, params, tile, CONSUMER):
    """Stores one split's addends of dV and dK for the epilogue."""
    E: gl.constexpr = params.tile.E
    store_partial(dv, 0, E, params, tile, CONSUMER)
    dk = scaled(dk, params.sizes.scale * p_descale(io.q.dtype))
    store_partial(dk, E, params.tile.D, params, tile, CONSUMER)


@gluon.jit
def send_gradients(io, shared, dk, dv, params, tile, visit, kv_count, CONSUMER):
    """Scales and stores dV and dK, or one split's addends of them."""
    dv = scaled(dv, p_descale(io.q.dtype))
    if params.dropout.IS_ON:
        dv = scaled(dv, params.dropout.inverse_keep)
    if params.order.parts.partials is None:
        store_gradients(io, shared, dk, dv, params, tile, visit, kv_count, CONSUMER)
    elif params.order.parts.whole is None:
        send_partial(io, dk, dv, params, tile, CONSUMER)
    elif tile.slot < 0:
        store_gradients(io, shared, dk, dv, params, tile, visit, kv_count, CONSUMER)
    else:
        send_partial(io, dk, dv, params, tile, CONSUMER)


@gluon.constexpr_function
def turn_count(columns):
    """How many turns a gradient of this many columns takes."""
    return columns // 64 if part_count(columns) == 1 else 2


@gluon.constexpr_function
def place_of_turn(columns, turn):
    """(part, first number, numbers) of a turn, in the registers of a thread."""
    if part_count(columns) == 1:
        return 0, 32 * turn, 32
    return turn, 0, part_columns(columns, turn) // 2


@gluon.constexpr_function
def _text(numbers, columns, turn, adds):
    """Assembly that stores a turn's numbers, or adds what is stored to them, four at a time."""
    _, first, count = place_of_turn(columns, turn)
    address = 2 * numbers if adds else numbers
    lines = ["{ .reg .b32 t; .reg .f32 a, b, c, d; mov.u32 t, %tid.x; and.b32 t, t, 127;"]
    lines.append(f"shl.b32 t, t, 4; add.u32 t, t, ${address};")
    for i in range(first, first + count, 4):
        four, at = [f"${n}" for n in range(i, i + 4)], f"[t+{4 * 128 * (i - first)}]"
        if adds:
            lines.append(f"ld.shared.v4.f32 {{a, b, c, d}}, {at};")
            lines += [f"add.f32 {x}, {x}, {y};" for x, y in zip(four, "abcd", strict=True)]
        else:
            lines.append(f"st.shared.v4.f32 {at}, {{{', '.join(four)}}};")
    return " ".join(lines) + " }"


@gluon.constexpr_function
def _inputs(numbers):
    return ",".join(["f"] * numbers + ["r", "~{memory}"])


@gluon.constexpr_function
def _in_place(numbers):
    """Constraints: numbers stay in their registers."""
    ties = [str(i) for i in range(numbers)]
    return ",".join(["=f"] * numbers + ties + ["r", "~{memory}"])


@gluon.jit
def put_turn(memory, x_NC, COLUMNS: gl.constexpr, TURN: gl.constexpr):
    """Stores a turn's numbers of a part of a gradient."""
    ALL: gl.constexpr = x_NC.shape[1] // 2
    text: gl.constexpr = _text(ALL, COLUMNS, TURN, False)
    operands: gl.constexpr = _inputs(ALL)
    inline_asm(text, operands, [x_NC, memory])


@gluon.jit
def plus_turn(memory, x_NC, COLUMNS: gl.constexpr, TURN: gl.constexpr):
    """A part of a gradient with a turn's numbers of the other consumer added."""
    ALL: gl.constexpr = x_NC.shape[1] // 2
    text: gl.constexpr = _text(ALL, COLUMNS, TURN, True)
    operands: gl.constexpr = _in_place(ALL)
    return inline_asm(text, operands, [x_NC, memory], x_NC.type)


@gluon.jit
def exchange_columns(mine, other, sent, kept, COLUMNS: gl.constexpr, TURN: gl.constexpr):
    """`kept` after a turn."""
    PART: gl.constexpr = place_of_turn(COLUMNS, TURN)[0]
    put_turn(mine, sent[PART], COLUMNS, TURN)
    sync_consumers()
    if len(kept) == 1:
        kept = (plus_turn(other, kept[0], COLUMNS, TURN),)
    elif PART == 0:
        kept = (plus_turn(other, kept[0], COLUMNS, TURN), kept[1])
    else:
        kept = (kept[0], plus_turn(other, kept[1], COLUMNS, TURN))
    sync_consumers()
    return kept


@gluon.jit
def exchanged(shared, sent, kept, COLUMNS: gl.constexpr, CONSUMER: gl.constexpr):
    """The gradient `kept` of both consumers, of which the other gets `sent`, through the memory of
    their dS. Each has waited until nobody reads its own. A thread's numbers go to that of the same
    place in the other warpgroup, which has the same rows and columns, 32 at a time."""
    WORDS: gl.constexpr = ds_bytes(shared) // 4 // 128
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    memory = reinterpret(shared.ds, gl.float32, [CONSUMERS, WORDS, 128], plain)
    mine = memory.index(CONSUMER)
    other = memory.index(1 - CONSUMER)
    for turn in gl.static_range(turn_count(COLUMNS)):
        kept = exchange_columns(mine, other, sent, kept, COLUMNS, turn)
    return kept


@gluon.jit
def wait_for_own_ds(shared, params, visit, CONSUMER: gl.constexpr):
    """Waits until dQ has been computed from the boxes of dS of a consumer that alternates."""
    first = visit + ((visit + CONSUMER) & 1)
    for ahead in gl.static_range(params.tile.DS_STAGES):
        state = stage_of(first + CONSUMERS * ahead, ds_stages(params))
        barrier.wait(shared.ds_empty.index(state.index), state.phase ^ 1)


@gluon.jit
def send_together(io, shared, dk, dv, params, tile, visit, CONSUMER: gl.constexpr):
    """`send_gradients` of consumers that alternate: the first adds up and stores dV of both, the
    second dK."""
    D: gl.constexpr = params.tile.D
    E: gl.constexpr = params.tile.E
    wait_for_own_ds(shared, params, visit, CONSUMER)
    if CONSUMER == 0:
        dv = scaled(exchanged(shared, dk, dv, E, CONSUMER), p_descale(io.q.dtype))
        memory = outlet(shared, io.dv, True, CONSUMER)
        store_gradient(io.dv, memory, dv, 0, E, params, tile, 0)
    else:
        factor = params.sizes.scale * p_descale(io.q.dtype)
        dk = scaled(exchanged(shared, dv, dk, D, CONSUMER), factor)
        memory = outlet(shared, io.dk, True, CONSUMER)
        store_gradient(io.dk, memory, dk, E, D, params, tile, 0)


@gluon.jit
def gradients_of_both(shared, visit, blocks, params, tile, kv_count, CONSUMER):
    """`backward_mainloop` of a consumer that alternates, which may have none of the visits."""
    first, end = visit_range(params, tile, blocks)
    if first + ((visit + CONSUMER) & 1) < end:
        dk, dv, _last = backward_mainloop(shared, visit, blocks, params, tile, kv_count, CONSUMER)
    else:
        pass_over(shared, params, kv_count)
        dk = no_gradients(params.tile.D, shared.k.dtype)
        dv = no_gradients(params.tile.E, shared.k.dtype)
    return dk, dv, visit + end - first


@gluon.jit
def backward_consumer(
    io: HopperBackwardIO,
    shared,
    scheduler: TileScheduler,
    params: HopperBackwardParams,
    CONSUMER,
):
    """Computes the gradients of one consumer's keys of each work tile; zeros if no query sees any
    of them."""
    if gl.num_warps() == 8:
        CONSUMER = this_consumer()
    visit = gl.to_tensor(0)
    kv_count = gl.to_tensor(0)
    scheduler_state = PipelineState.start(SCHEDULER_STAGES)
    index = next_index(scheduler, stride_before(), scheduler_state)
    while index < scheduler.count:
        tile = key_tile(params, index)
        blocks = m_block_range(params, tile)
        if is_visited(params, tile, blocks):
            if alternates(params):
                dk, dv, visit = gradients_of_both(
                    shared, visit, blocks, params, tile, kv_count, CONSUMER
                )
            else:
                dk, dv, visit = backward_mainloop(
                    shared, visit, blocks, params, tile, kv_count, CONSUMER
                )
            kv_count += 1
        else:
            dk = no_gradients(params.tile.D, io.dk.dtype)
            dv = no_gradients(params.tile.E, io.dv.dtype)
            wait_for_outlet()
        if alternates(params):
            send_together(io, shared, dk, dv, params, tile, visit, CONSUMER)
        else:
            send_gradients(io, shared, dk, dv, params, tile, visit, kv_count, CONSUMER)
        scheduler_state = scheduler_state.next()
        index = next_index(scheduler, index, scheduler_state)
    wait_for_outlet()
