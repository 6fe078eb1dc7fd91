"""Which key tiles (n-blocks) the rows of a tile see, and in which order they are visited. The
forward's producer and consumers each compute it.

Key tiles are visited from the last to the first, and visits are numbered in this order. The numbers
count all key tiles that the tile's rows see, so that the splits of a sequence depend on its own
length alone. Rows with a list of a block mask number key tiles by their places in it. Tiles seen in
part stand last in a list, and so are visited first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.common.block_lists import list_of, listed, step_of
from heedful.kernels.common.key_range import key_bounds
from heedful.kernels.common.row_hulls import first_entry, row_hulls
from heedful.kernels.hopper.sm90.compat import aggregate
from heedful.kernels.hopper.sm90.mma import ROWS
from heedful.kernels.hopper.sm90.sequences import query_position


@aggregate
class NBlockRange:
    """Some rows see key tiles [begin, end). All but [full_begin, full_end) of them need a mask.

    swaps: whether the last two tiles are visited in the other order, see `visits_last_second`. If
    rows see a second run of keys, such as leading keys beside a window, its tiles, which end at
    first_end, are visited after these; of all visits, `visits` from number `skipped` on belong to
    this split. Else these fields are None.
    """

    begin: gl.tensor
    full_begin: gl.tensor
    full_end: gl.tensor
    end: gl.tensor
    first_end: gl.tensor | gl.constexpr = None
    skipped: gl.tensor | gl.constexpr = None
    visits: gl.tensor | gl.constexpr = None
    swaps: gl.tensor | gl.constexpr = None


@gluon.jit
def n_block_range(params, tile, row, rows: gl.constexpr):
    """The key tiles of queries [row, row + rows); `core.call.mask.MaskSpec.key_range` is the same
    on the host."""
    if params.mask.blocks.SIDE:
        return places_in_list(params, tile, row)
    elif params.mask.RANGES:
        return hull_of_rows(params, tile, row, rows)
    else:
        return n_blocks_by_position(params, tile, row, rows)


@gluon.jit
def places_in_list(params, tile, row):
    """The places in the list of rows from `row` on. Those seen whole need no mask where neither
    positions nor the last keys are hidden."""
    STEPS: gl.constexpr = params.mask.blocks.SIDE // params.tile.BLOCK_N
    whole, part = listed(
        list_of(tile.batch, tile.head, row, params.mask.blocks), params.mask.blocks
    )
    is_any = (row < tile.seq.len_q) & (tile.seq.len_k > 0)
    end = gl.where(is_any, (whole + part) * STEPS, 0)
    begin = end * 0
    full_end = begin
    if params.mask.blocks.IS_EXACT:
        full_end = gl.minimum(whole * STEPS, end)
    elif params.mask.blocks.IS_PLAIN:
        full_end = gl.where(
            tile.seq.len_k % params.mask.blocks.SIDE == 0, gl.minimum(whole * STEPS, end), 0
        )
    return NBlockRange(begin, begin, full_end, end)


@gluon.jit
def listed_tile(params, tile, row, j):
    """(first key, index of bits) of place j in the list of rows from `row` on. A place that is
    masked may be past the last key."""
    at = list_of(tile.batch, tile.head, row, params.mask.blocks)
    return step_of(at, j, tile.seq.len_k, params.mask.blocks, params.tile.BLOCK_N, True)


@gluon.jit
def first_key(params, tile, blocks, j):
    """The first key of key tile j of a work tile's `blocks`."""
    if params.mask.blocks.SIDE:
        col, _ = listed_tile(params, tile, tile.row, j)
        if params.mask.blocks.IS_PLAIN or params.mask.blocks.IS_EXACT:
            # Nobody masks those seen whole.
            last = tile.seq.len_k - params.mask.blocks.SIDE + col % params.mask.blocks.SIDE
            col = gl.where(j < blocks.full_end, gl.minimum(col, last), col)
        return col
    else:
        return j * params.tile.BLOCK_N


@gluon.jit
def hull_of_rows(params, tile, row, rows: gl.constexpr):
    """The key tiles that rows see by their key_ranges, as `key_hulls` stored it: with two ranges,
    two runs of tiles."""
    N: gl.constexpr = params.tile.BLOCK_N
    at = first_entry(params.order.hulls, tile.seq, tile.batch, tile.head)
    hulls = row_hulls(at, row, tile.seq.len_q, rows // ROWS, params.mask.RANGES)
    end = gl.cdiv(hulls.end, N)
    begin = gl.minimum(hulls.begin // N, end)
    full_begin = gl.cdiv(hulls.full_begin, N)
    full_end = hulls.full_end // N
    if params.mask.RANGES == 1:
        # Without a key that all rows see, both bounds hide keys of any tile.
        has_full = hulls.full_begin < hulls.full_end
        full_begin = gl.where(has_full, full_begin, end)
        full_end = gl.where(has_full, full_end, begin)
        return NBlockRange(begin, full_begin, full_end, end)
    else:
        later_end = gl.maximum(gl.cdiv(hulls.later_end, N), end)
        later_begin = gl.minimum(gl.maximum(hulls.later_begin // N, end), later_end)
        visits = end - begin + later_end - later_begin
        # The run with tiles that need no mask is visited first.
        is_later = (full_begin < full_end) & (full_begin >= later_begin)
        first_end = gl.where(is_later, end, later_end)
        begin = gl.where(is_later, later_begin, begin)
        end = gl.where(is_later, later_end, end)
        full_begin = gl.minimum(gl.maximum(full_begin, begin), end)
        full_end = gl.minimum(gl.maximum(full_end, full_begin), end)
        return NBlockRange(begin, full_begin, full_end, end, first_end, gl.to_tensor(0), visits)


@gluon.constexpr_function
def hull_words(RANGES, CONSUMERS):
    """The numbers of `words_of_runs`: only two runs of keys have so many that consumers would wait
    for them."""
    return 6 + 2 * CONSUMERS if RANGES == 2 else 0


@gluon.jit
def words_of_runs(params, tile):
    """Two runs of keys that the rows of a work tile see, as numbers that the producer passes on:
    those of the program, and of each consumer the tiles that its rows see whole."""
    CONSUMERS: gl.constexpr = params.tile.CONSUMERS
    blocks = hull_of_rows(params, tile, tile.row, CONSUMERS * ROWS)
    words = (blocks.begin, blocks.full_begin, blocks.full_end, blocks.end)
    words = words + (blocks.first_end, blocks.visits)
    for i in gl.static_range(CONSUMERS):
        mine = hull_of_rows(params, tile, tile.row + i * ROWS, ROWS)
        words = words + (mine.full_begin, mine.full_end)
    return words


@gluon.jit
def runs_in_words(program, mine):
    """(the `NBlockRange` of a program, one with the whole tiles of a consumer) in such numbers."""
    begin, full_begin, full_end, end, first_end, visits = program
    none = gl.to_tensor(0)
    blocks = NBlockRange(begin, full_begin, full_end, end, first_end, none, visits)
    return blocks, NBlockRange(none, mine[0], mine[1], none)


@gluon.jit
def n_blocks_by_position(params, tile, row, rows: gl.constexpr):
    """`n_block_range` of rows without key_ranges."""
    last = gl.minimum(row + rows, tile.seq.len_q) - 1
    bounds = key_bounds(row, last, tile.seq.off, tile.seq.len_k, params.mask)
    end = gl.where(last < row, 0, gl.cdiv(bounds.stop_last, params.tile.BLOCK_N))
    begin = end * 0
    full_begin = begin
    if params.mask.HAS_LEFT:
        begin = gl.minimum(bounds.start_first // params.tile.BLOCK_N, end)
        full_begin = gl.cdiv(bounds.start_last, params.tile.BLOCK_N)
    return NBlockRange(begin, full_begin, bounds.stop_first // params.tile.BLOCK_N, end)


@gluon.constexpr_function
def is_masked(HAS_LEFT, HAS_RIGHT, RANGES, SIDE):
    """Whether any row may see less than all keys of its sequence."""
    return bool(HAS_LEFT or HAS_RIGHT or RANGES or SIDE)


@gluon.jit
def with_swaps(blocks, swaps):
    """The range with another `swaps`."""
    return NBlockRange(blocks.begin, blocks.full_begin, blocks.full_end, blocks.end, swaps=swaps)


@gluon.jit
def needs_mask(blocks, j):
    """Whether any row does not see a key of key tile j."""
    return (j >= blocks.full_end) | (j < blocks.full_begin)


@gluon.jit
def next_masked(blocks, step):
    """The first visit from number `step` on whose tile needs a mask; a number past the last visit
    if none does."""
    right = blocks.end - 1 - blocks.full_end
    left = blocks.end - blocks.full_begin
    if blocks.skipped is not None:
        right -= blocks.skipped
        left -= blocks.skipped
    masked = gl.where(step <= right, step, gl.maximum(step, left))
    if blocks.swaps is not None:
        # The last key tile is visited at step 1, if not at step 0.
        masked = gl.where(blocks.swaps & (step == 1), 1, masked)
    return masked


@gluon.jit
def visits_last_second(blocks):
    """Whether the last key tile is visited after the one before it.

    It is, if rows see the last tile in part and the one before it as a whole. The first tile that a
    row sees gives the reference of its exponentials, and the maximum of few keys is soon exceeded.
    All rows of a program must agree, so `blocks` is the program's range. If there are more rows
    than a tile has keys, they never see the last tile but one as a whole.
    """
    before = blocks.end - 2
    sees_all = (before >= blocks.full_begin) & (before + 1 == blocks.full_end)
    return (before >= blocks.begin) & sees_all


@gluon.jit
def n_block_count(params, blocks):
    """How many key tiles are visited."""
    if blocks.visits is None:
        return blocks.end - blocks.begin
    else:
        return blocks.visits


@gluon.jit
def n_block_at(params, blocks, step):
    """The key tile of visit `step`."""
    if blocks.visits is None:
        in_order = blocks.end - 1 - step
        if blocks.swaps is None:
            return in_order
        else:
            return gl.where(blocks.swaps & (step < 2), blocks.end - 2 + step, in_order)
    else:
        visit = blocks.skipped + step
        before = blocks.end - blocks.begin
        later = blocks.first_end - 1 - (visit - before)
        return gl.where(visit < before, blocks.end - 1 - visit, later)


@gluon.jit
def part_of_blocks(blocks, part, PART_TILES: gl.constexpr):
    """The key tiles that are in a part, which begins at a fixed position of the sequence."""
    first = part * PART_TILES
    begin = gl.minimum(gl.maximum(blocks.begin, first), blocks.end)
    end = gl.maximum(gl.minimum(blocks.end, first + PART_TILES), begin)
    return NBlockRange(begin, blocks.full_begin, blocks.full_end, end)


@aggregate
class Turn:
    """A part of the keys of a work tile, whose parts a program takes from the last to the first.
    number: how many it took before. is_last: whether no other is to come."""

    part: gl.tensor
    number: gl.tensor
    is_last: gl.tensor


@gluon.jit
def turn_of(params, tile, number):
    """The part that comes after so many, of those that the program's rows see, and of the first if
    there is a sink, which enters it."""
    ROWS_OF_ALL: gl.constexpr = params.tile.CONSUMERS * ROWS // params.gqa.PACK_GQA
    blocks = n_block_range(params, tile, query_position(params, tile.row), ROWS_OF_ALL)
    first = blocks.begin // params.split.PART_TILES
    if params.mods.sink is not None:
        first = first * 0
    last = gl.maximum(gl.cdiv(blocks.end, params.split.PART_TILES) - 1, first)
    part = last - number
    return Turn(part, number, part <= first)


@gluon.jit
def program_n_block_range(params, tile, split, hulls):
    """The key tiles that all consumers of a program visit together. hulls: of `current_hulls`."""
    ROWS_OF_ALL: gl.constexpr = params.tile.CONSUMERS * ROWS // params.gqa.PACK_GQA
    place = query_position(params, tile.row)
    if len(hulls) > 0:
        blocks = hulls[0]
    else:
        blocks = n_block_range(params, tile, place, ROWS_OF_ALL)
    visits = n_block_count(params, blocks)
    first_end = blocks.first_end
    if params.mask.first is not None:
        seen = gl.minimum(params.mask.first, tile.seq.len_k)
        if params.mask.HAS_RIGHT:
            last = gl.minimum(place + ROWS_OF_ALL, tile.seq.len_q) - 1
            seen = gl.minimum(seen, gl.maximum(last + tile.seq.off + params.mask.right + 1, 0))
        first_end = gl.minimum(gl.cdiv(seen, params.tile.BLOCK_N), blocks.begin)
        visits += first_end
    skipped = gl.to_tensor(0)
    if params.split.held is not None:
        return part_of_blocks(blocks, split, params.split.PART_TILES)
    if params.split.splits is not None and params.split.PART_TILES is not None:
        return part_of_blocks(blocks, split, params.split.PART_TILES)
    if params.split.splits is not None:
        each = gl.cdiv(visits, params.split.splits)
        skipped = gl.minimum(split * each, visits)
        visits = gl.minimum(skipped + each, visits) - skipped
    if first_end is not None:
        return NBlockRange(
            blocks.begin, blocks.full_begin, blocks.full_end, blocks.end, first_end, skipped, visits
        )
    elif params.split.splits is not None:
        end = blocks.end - skipped
        return NBlockRange(end - visits, blocks.full_begin, blocks.full_end, end)
    elif params.tile.VISITS_SECOND:
        return with_swaps(blocks, visits_last_second(blocks))
    else:
        return blocks


@gluon.jit
def with_whole_tiles(blocks, mine):
    """The range of a program whose rows see two runs of keys, with those key tiles of the first run
    that the rows of one consumer see whole, by its own range. It visits all of the program's: two
    ranges for each consumer would take too many registers."""
    full_begin = gl.minimum(gl.maximum(mine.full_begin, blocks.begin), blocks.end)
    full_end = gl.minimum(gl.maximum(mine.full_end, full_begin), blocks.end)
    # Without one, both bounds of rows hide keys of any tile.
    has_full = full_begin < full_end
    full_begin = gl.where(has_full, full_begin, blocks.end)
    full_end = gl.where(has_full, full_end, blocks.begin)
    return NBlockRange(
        blocks.begin,
        full_begin,
        full_end,
        blocks.end,
        blocks.first_end,
        blocks.skipped,
        blocks.visits,
    )


@gluon.jit
def consumer_n_block_range(params, tile, row, program_blocks, hulls):
    """Those key tiles of a program that the rows of one consumer, from `row` on, see. hulls: of
    `current_hulls`."""
    if len(hulls) > 0:
        blocks = hulls[1]
    else:
        blocks = n_block_range(
            params, tile, query_position(params, row), ROWS // params.gqa.PACK_GQA
        )
    if program_blocks.visits is not None:
        return with_whole_tiles(program_blocks, blocks)
    else:
        if params.split.splits is not None or params.split.held is not None:
            end = gl.maximum(gl.minimum(blocks.end, program_blocks.end), program_blocks.begin)
            begin = gl.minimum(gl.maximum(blocks.begin, program_blocks.begin), end)
            return NBlockRange(begin, blocks.full_begin, blocks.full_end, end)
        elif params.tile.VISITS_SECOND:
            return with_swaps(blocks, program_blocks.swaps)
        else:
            return blocks
