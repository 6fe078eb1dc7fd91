"""Two roles of the backward that are one warp each: the producer loads tiles, and the adder adds
shares of dQ to global memory.

M query rows, N keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from heedful.kernels.args.hopper_backward import HopperBackwardIO, HopperBackwardParams
from heedful.kernels.hopper.backward.columns import share_columns
from heedful.kernels.hopper.backward.dq.sums import (
    add_block,
    end_turn,
    wait_for_turn,
    wait_until_read,
)
from heedful.kernels.hopper.backward.far_rows import any_far, is_far, scale_rows
from heedful.kernels.hopper.backward.mask import ALL_KEYS, list_words, range_words
from heedful.kernels.hopper.backward.shared import (
    CONSUMERS,
    SHARES,
    adders,
    alternates,
    word_count,
    words_of,
)
from heedful.kernels.hopper.backward.tile import (
    is_masked,
    key_tile,
    listed_visit,
    m_block_range,
    next_index,
    query_tile,
    stride_before,
    turn_of,
    visit_range,
)
from heedful.kernels.hopper.sm90 import barrier
from heedful.kernels.hopper.sm90.compat import tma_load
from heedful.kernels.hopper.sm90.mma import ROWS
from heedful.kernels.hopper.sm90.pipeline import PipelineState, stage_of
from heedful.kernels.hopper.sm90.sequences import box
from heedful.kernels.hopper.sm90.tile_scheduler import SCHEDULER_STAGES, TileScheduler


@gluon.jit
def load_numbers(ptr, io, params, tile, head, row, other):
    """Numbers of query rows from `row` on, from an array in the layout of lse_log2."""
    BLOCK_M: gl.constexpr = params.tile.BLOCK_M
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lies = io.lse_log2
    base = ptr + tile.batch.to(gl.int64) * lies.stride_b + head.to(gl.int64) * lies.stride_h
    rows_M = row + gl.arange(0, BLOCK_M, layout=layout)
    return gl.load(base + tile.seq.token_q + rows_M, mask=rows_M < tile.seq.len_q, other=other)


@gluon.jit
def needs_words(params, blocks, row, is_first):
    """Whether consumers read the words of a visit's rows: if it needs a mask or is its work tile's
    first, or if they mask every visit."""
    if params.tile.DQ_REGS is None:
        return gl.to_tensor(True)
    else:
        return is_masked(blocks, row // params.tile.BLOCK_M) | is_first


@gluon.constexpr_function
def are_bounds_ahead(BLOCK_M):
    """Whether bounds of rows are loaded with their other numbers, a visit ahead. Those of 128 rows
    would spill in this warp; they are loaded when they are needed."""
    return BLOCK_M <= 64


@gluon.jit
def load_bounds(params, tile, head, row, are_needed):
    """The bounds of key_ranges of query rows from `row` on, two or four of each, 0 unless they are
    needed."""
    ranges = params.mask.ranges
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    base = ranges.ptr + tile.batch.to(gl.int64) * ranges.stride_b
    base += head.to(gl.int64) * ranges.stride_h
    rows_M = row + gl.arange(0, params.tile.BLOCK_M, layout=layout)
    at_M = base + (tile.seq.token_q + rows_M).to(gl.int64) * ranges.stride_m
    exists_M = (rows_M < tile.seq.len_q) & are_needed
    bounds = gl.load(at_M, mask=exists_M, other=0), gl.load(at_M + 1, mask=exists_M, other=0)
    if params.mask.RANGES == 2:
        second = gl.load(at_M + 2, mask=exists_M, other=0)
        bounds = bounds + (second, gl.load(at_M + 3, mask=exists_M, other=0))
    return bounds


@gluon.jit
def store_bits(shared, params, tile, blocks, visit, first, row, state):
    """`store_words` by a block mask, if the visit is a consumer's first of its work tile or needs a
    mask, or if consumers mask every visit."""
    ALWAYS: gl.constexpr = params.tile.DQ_REGS is None
    SIDE: gl.constexpr = params.mask.blocks.SIDE
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    _ahead, place, entry = listed_visit(params, tile, blocks, visit)
    is_first = visit == first
    if alternates(params):
        is_first = visit < first + CONSUMERS
    if ALWAYS or (place < blocks.full_begin) | is_first:
        barrier.wait(shared.q.empty.index(state.index), state.phase ^ 1)
        rows_M = row + gl.arange(0, params.tile.BLOCK_M, layout=layout)
        for i in range(word_count(params)):
            index = gl.load(entry + 1 + i * 32 // SIDE)
            words_M = list_words(index, rows_M, tile.col + i * 32, params, tile)
            words_of(shared, params, state.index, i).store(words_M.to(gl.float32, bitcast=True))


@gluon.jit
def store_range_words(shared, bounds, params, tile, blocks, visit, first, head, row, state):
    """`store_words` by key_ranges, if consumers read them."""
    if needs_words(params, blocks, row, visit == first):
        if are_bounds_ahead(params.tile.BLOCK_M):
            numbers = bounds
        else:
            numbers = load_bounds(params, tile, head, row, True)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        rows_M = row + gl.arange(0, params.tile.BLOCK_M, layout=layout)
        words_M = range_words(numbers, rows_M, params, tile).to(gl.float32, bitcast=True)
        barrier.wait(shared.q.empty.index(state.index), state.phase ^ 1)
        words_of(shared, params, state.index, 0).store(words_M)


@gluon.jit
def without_blind_rows(lse_M, params, tile, blocks, head, row):
    """The log-sum-exps of a visit's rows, with inf where a row sees no key of the tile, if its rows
    see all keys or none."""
    if params.order.hulls.HIDES_ROWS:
        block = row // params.tile.BLOCK_M
        if (block >= blocks.whole_end) & (block < blocks.full_end):
            layout: gl.constexpr = lse_M.type.layout
            rows_M = row + gl.arange(0, params.tile.BLOCK_M, layout=layout)
            bounds = load_bounds(params, tile, head, row, True)
            words_M = range_words(bounds, rows_M, params, tile)
            lse_M = gl.where(words_M == ALL_KEYS, lse_M, float("inf"))
    return lse_M


@gluon.jit
def store_words(shared, bounds, params, tile, blocks, visit, first, head, row, state):
    """Stores the words of query rows beside their tile, once its stage is empty."""
    if params.mask.blocks.SIDE:
        store_bits(shared, params, tile, blocks, visit, first, row, state)
    elif params.mask.RANGES:
        store_range_words(shared, bounds, params, tile, blocks, visit, first, head, row, state)


@gluon.jit
def queries_of(io, params, tile, blocks, visit, is_first):
    """(query head, first row, lse_log2, delta, bounds) of a visit; the loads of the last three are
    under way. Rows past the last one have no probabilities. is_first: of its work tile."""
    head, block = query_tile(params, tile, blocks, visit)
    row = block * params.tile.BLOCK_M
    lse_M = load_numbers(io.lse_log2.ptr, io, params, tile, head, row, float("inf"))
    delta_M = load_numbers(io.delta, io, params, tile, head, row, 0.0)
    bounds = ()
    BY_RANGES: gl.constexpr = params.mask.RANGES and not params.mask.blocks.SIDE
    if BY_RANGES and are_bounds_ahead(params.tile.BLOCK_M):
        bounds = load_bounds(params, tile, head, row, needs_words(params, blocks, row, is_first))
    return head, row, lse_M, delta_M, bounds


@gluon.jit
def keys_at(rows_each, params, tile, row):
    """Coordinates of keys or values from `row` on, of a map that ends where those in use do.
    rows_each: as `k_rows` of the kernel's arguments."""
    if rows_each is None:
        PACKED: gl.constexpr = params.seqs.cu_k is not None
        return box(PACKED, tile.batch, tile.kv_head, tile.seq.token_k, tile.seq.len_k, row)
    else:
        start = tile.seq.token_k + tile.batch * rows_each
        return box(True, tile.batch, tile.kv_head, start, tile.seq.len_k, row)


@gluon.jit
def load_keys(desc, boxes, full, empty, state, rows_each, params, tile):
    """Loads a work tile's keys or values once their stage is empty."""
    BOXES: gl.constexpr = params.tile.BLOCK_N // ROWS
    bar = full.index(state.index)
    barrier.wait(empty.index(state.index), state.phase ^ 1)
    mbarrier.expect(bar, BOXES * desc.block_type.nbytes)
    for i in gl.static_range(BOXES):
        coordinates = keys_at(rows_each, params, tile, tile.col + i * ROWS)
        tma_load(desc, coordinates, bar, boxes.index(state.index * BOXES + i))


@gluon.jit
def load_k(io, shared, params, tile, kv_count):
    """Loads a work tile's keys. kv_count: work tiles that were loaded before."""
    state = stage_of(kv_count, params.tile.K_STAGES)
    load_keys(io.k, shared.k, shared.k_full, shared.k_empty, state, io.k_rows, params, tile)


@gluon.jit
def load_v(io, shared, params, tile, kv_count):
    """Loads a work tile's values."""
    state = stage_of(kv_count, 1)
    load_keys(io.v, shared.v, shared.v_full, shared.v_empty, state, io.v_rows, params, tile)


@gluon.jit
def load_rows(desc, ring, numbers, x_M, params, tile, head, row, state):
    """Loads a tile of q or dout once its stage is empty, and stores the rows' numbers x_M beside
    it."""
    PACKED: gl.constexpr = params.seqs.cu_q is not None
    full = ring.producer_acquire(state, state)
    numbers.index(state.index).store(x_M)
    mbarrier.expect(full, desc.block_type.nbytes)
    coordinates = box(PACKED, tile.batch, head, tile.seq.token_q, tile.seq.len_q, row)
    tma_load(desc, coordinates, full, ring.boxes.index(state.index))


@gluon.jit
def dout_scale(io, params, tile, head, row, lse_M):
    """Factors of the cotangents of rows, some of which are far from 0; 1 for the other rows."""
    scale_M = load_numbers(io.dout_scale, io, params, tile, head, row, 1.0)
    return gl.where(is_far(lse_M), scale_M, 1.0)


@gluon.jit
def load_dout(io, shared, params, tile, blocks, numbers, following, state, far_phase):
    """Loads dout and delta of a visit, as `load_rows` does, and the numbers of the `following` one.
    Those of far rows are scaled before the stage is announced as full. Returns the numbers, and the
    next phase of the barrier at which this warp waits for cotangents that it scales."""
    PACKED: gl.constexpr = params.seqs.cu_q is not None
    desc = io.dout
    head, row, lse_M, delta_M, _bounds = numbers
    ring, factors = shared.do, shared.delta.index(state.stages)
    is_far_tile = any_far(lse_M)
    full = ring.producer_acquire(state, state)
    if is_far_tile:
        scale_M = dout_scale(io, params, tile, head, row, lse_M)
        delta_M = delta_M * scale_M
        factors.store(scale_M)
    shared.delta.index(state.index).store(delta_M)
    rows = ring.boxes.index(state.index)
    loaded = ring.full.index(gl.where(is_far_tile, state.stages, state.index))
    mbarrier.expect(loaded, desc.block_type.nbytes)
    coordinates = box(PACKED, tile.batch, head, tile.seq.token_q, tile.seq.len_q, row)
    tma_load(desc, coordinates, loaded, rows)
    # After the TMA load: a stage that fills late is waited for, numbers have a visit's time.
    numbers = queries_of(io, params, tile, blocks, following, False)
    if is_far_tile:
        barrier.wait(loaded, far_phase)
        scale_rows(rows, factors)
        barrier.arrive_lane(full)
        far_phase ^= 1
    return numbers, far_phase


@gluon.jit
def tell_place(shared, params, tile, head, row, state):
    """Stores the number of the next tile of queries among those of all heads, and its first row,
    once their stage is empty."""
    barrier.wait(shared.q.empty.index(state.index), state.phase ^ 1)
    place = (head * params.sizes.accum_rows + tile.accum_row + row) // params.tile.BLOCK_M
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    none_L = gl.zeros([32], gl.int32, lanes)
    shared.places.index(state.index).store(none_L + place.to(gl.int32))
    shared.rows.index(state.index).store(none_L + row)


@gluon.jit
def load_tile(io, shared, params, tile, blocks, first, end, states, kv_count):
    """Loads a work tile's keys and values, and its queries in the order of visits."""
    # With two stages, there is room for keys while the tile before is in work. With one, values are
    # free before keys.
    K_AHEAD: gl.constexpr = params.tile.K_STAGES > 1
    TELLS_PLACES: gl.constexpr = params.tile.DQ_REGS is None and params.tile.BLOCK_N > ROWS
    q_state, do_state, far_phase = states
    numbers = queries_of(io, params, tile, blocks, first, True)
    for visit in range(first, end):
        head, row, lse_M, _delta_M, bounds = numbers
        if visit == first:
            if K_AHEAD:
                load_k(io, shared, params, tile, kv_count)
            else:
                load_v(io, shared, params, tile, kv_count)
        if TELLS_PLACES:
            tell_place(shared, params, tile, head, row, q_state)
        store_words(shared, bounds, params, tile, blocks, visit, first, head, row, q_state)
        lse_M = without_blind_rows(lse_M, params, tile, blocks, head, row)
        load_rows(io.q, shared.q, shared.lse, lse_M, params, tile, head, row, q_state)
        if visit == first:
            if K_AHEAD:
                load_v(io, shared, params, tile, kv_count)
            else:
                load_k(io, shared, params, tile, kv_count)
        # The numbers of the next rows are loaded while this warp waits for stages.
        following = gl.minimum(visit + 1, end - 1)
        numbers, far_phase = load_dout(
            io, shared, params, tile, blocks, numbers, following, do_state, far_phase
        )
        q_state = q_state.next()
        do_state = do_state.next()
    return q_state, do_state, far_phase


@gluon.jit
def backward_producer(
    io: HopperBackwardIO, shared, scheduler: TileScheduler, params: HopperBackwardParams
):
    """Fetches work tiles, commits them for the other warps, and loads their inputs."""
    q_state = PipelineState.start(params.tile.Q_STAGES)
    states = q_state, PipelineState.start(params.tile.DO_STAGES), gl.to_tensor(0)
    scheduler_state = PipelineState.start(SCHEDULER_STAGES)
    kv_count = gl.to_tensor(0)
    index = scheduler.fetch_next_work(stride_before())
    while index < scheduler.count:
        scheduler.producer_commit((index,), scheduler_state, ())
        scheduler_state = scheduler_state.next()
        tile = key_tile(params, index)
        blocks = m_block_range(params, tile)
        first, end = visit_range(params, tile, blocks)
        if end > first:
            states = load_tile(io, shared, params, tile, blocks, first, end, states, kv_count)
            kv_count += 1
        elif params.tile.DQ_REGS is None:
            # Gradients pass through the memory of keys here, so consumers always wait for keys.
            load_v(io, shared, params, tile, kv_count)
            load_k(io, shared, params, tile, kv_count)
            kv_count += 1
        # The next work tile is fetched only after all loads. A fetch at a tile's beginning would
        # follow the order in which programs began, and give the longest tile to the program with
        # the longest one.
        index = scheduler.fetch_next_work(index)
    scheduler.producer_commit((scheduler.count,), scheduler_state, ())


@gluon.jit
def add_share(address, shared, params, SHARE: gl.constexpr):
    """Adds a share of the dQ of a tile of queries. address: where the tile's sums begin."""
    D: gl.constexpr = params.tile.D
    BLOCK_M: gl.constexpr = params.tile.BLOCK_M
    BEFORE: gl.constexpr = SHARE * ROWS * share_columns(D, BLOCK_M, 0)
    NUMBERS: gl.constexpr = ROWS * share_columns(D, BLOCK_M, SHARE)
    add_block(address + BEFORE, shared.dq.index(SHARE), NUMBERS)


@gluon.jit
def backward_adder(
    io: HopperBackwardIO,
    shared,
    scheduler: TileScheduler,
    params: HopperBackwardParams,
    ADDER: gl.constexpr,
):
    """Adds shares of dQ to global memory, in the order of visits. With several such warps, each has
    every ADDERS-th visit."""
    ADDERS: gl.constexpr = adders(params)
    TAKES_TURNS: gl.constexpr = params.order.turns is not None
    BLOCK_M: gl.constexpr = params.tile.BLOCK_M
    phase = gl.to_tensor(0)
    ahead = gl.to_tensor(ADDER)
    scheduler_state = PipelineState.start(SCHEDULER_STAGES)
    index = next_index(scheduler, stride_before(), scheduler_state)
    while index < scheduler.count:
        tile = key_tile(params, index)
        blocks = m_block_range(params, tile)
        first, end = visit_range(params, tile, blocks)
        for visit in range(first + ahead, end, ADDERS):
            head, block = query_tile(params, tile, blocks, visit)
            place = head.to(gl.int64) * params.sizes.accum_rows + tile.accum_row + block * BLOCK_M
            address = io.dq_accum + place * params.tile.D
            if TAKES_TURNS:
                turn = params.order.turns + place // BLOCK_M
                number = turn_of(params, tile, head, block)
                wait_for_turn(turn, number)
            for i in gl.static_range(SHARES):
                barrier.wait(shared.dq_full.index(ADDER * SHARES + i), phase)
                add_share(address, shared, params, i)
                wait_until_read()
                barrier.arrive_lane(shared.dq_empty.index(i))
            if TAKES_TURNS:
                if params.mask.RANGES:
                    if number >= 0:
                        end_turn(turn)
                else:
                    end_turn(turn)
            phase ^= 1
        # The adders keep alternating in the next work tile.
        ahead = (ahead + end - first) % ADDERS
        scheduler_state = scheduler_state.next()
        index = next_index(scheduler, index, scheduler_state)
