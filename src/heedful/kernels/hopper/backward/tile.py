"""Work tiles of the backward: a key tile of a KV head. All queries that see it stream past it, of
every query head that shares it. To process one query tile is a visit.

M query rows, N keys.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.common.row_hulls import first_entry, row_hulls
from heedful.kernels.common.sequences import Seqlens, diagonal_offset, within
from heedful.kernels.hopper.sm90.compat import aggregate
from heedful.kernels.hopper.sm90.mma import ROWS
from heedful.kernels.hopper.sm90.sequences import sequence
from heedful.kernels.hopper.sm90.tile_scheduler import TileScheduler, l2_swizzle


class KeyTile(NamedTuple):
    """Keys from `col` on, of one KV head of a sequence (`Seqlens`). accum_row: the sequence's first
    row in dq_accum. split: which split of its visits. slot: which of the split tiles it is, where
    only the last ones are split; -1 for a whole one."""

    batch: Any
    kv_head: Any
    col: Any
    seq: Any
    accum_row: Any
    split: Any
    slot: Any


@aggregate
class MBlockRange:
    """Query tiles [begin, end) see some of the keys; all but [full_begin, full_end) need a mask.
    By key_ranges, some rows of those from whole_end on, if it is there, see no key of a tile. The
    producer takes their probabilities away, by a log-sum-exp of inf, so that consumers need no
    mask."""

    begin: gl.tensor
    full_begin: gl.tensor
    full_end: gl.tensor
    end: gl.tensor
    whole_end: gl.tensor | gl.constexpr = None


@gluon.jit
def accum_begin(batch, start, cu_seqlens, seqlen, BLOCK: gl.constexpr):
    """A sequence's first row in dq_accum, or in partials, where each sequence is rounded up to
    whole tiles."""
    if cu_seqlens is not None:
        return (start // BLOCK + batch) * BLOCK
    else:
        return batch * (gl.cdiv(seqlen, BLOCK) * BLOCK)


@gluon.jit
def partial_row(params, tile):
    """A work tile's first row in partials."""
    seqs = params.seqs
    if params.order.parts.whole is not None:
        row = tile.split.to(gl.int64) * params.order.parts.rows
        return row + tile.slot * params.tile.BLOCK_N
    begin = accum_begin(tile.batch, tile.seq.token_k, seqs.cu_k, seqs.seqlen_k, params.tile.BLOCK_N)
    head = tile.split.to(gl.int64) * params.sizes.heads_k + tile.kv_head
    return head * params.order.parts.rows + begin + tile.col


@gluon.jit
def work_tiles(params):
    """How many work tiles there are."""
    tiles = params.order.tiles
    if params.order.varlen_tiles is not None:
        tiles = gl.load(params.order.varlen_tiles) * params.sizes.heads_k
    if params.order.parts.whole is not None:
        tiles += (tiles - params.order.parts.whole) * (params.order.parts.splits - 1)
    elif params.order.parts.partials is not None:
        tiles *= params.order.parts.splits
    return tiles


@gluon.jit
def work_scheduler(params, READERS: gl.constexpr):
    """The scheduler of work tiles. READERS: warpgroups and warps that read the producer's ring."""
    tiles = work_tiles(params)
    if params.order.tile_counter is None:
        return TileScheduler(tiles, tiles)
    else:
        return TileScheduler.dynamic(tiles, tiles, params.order.tile_counter, READERS)


@gluon.jit
def stride_before():
    """The number that is one stride before a program's first work tile."""
    return gl.program_id(0) - gl.num_programs(0)


@gluon.jit
def next_index(scheduler, index, state):
    """The work tile after `index`, for roles that read the producer's ring."""
    index = scheduler.get_current_work(index, state)
    if scheduler.tile_counter is not None:
        scheduler.consumer_release(state)
    return index


@gluon.jit
def turn_of(params, tile, head, block):
    """How many key tiles are added to a query tile before this one. Those that the query tile
    visits are added from the last under a diagonal, else from the first. Any of its rows counts,
    even one past the last, as in `m_block_range`. A tile that key_ranges have visited in vain adds
    zeros, has no turn and gets -1."""
    if params.mask.RANGES:
        return turn_by_ranges(params, tile, head, block)
    else:
        return turn_by_position(params, tile, block)


@gluon.jit
def turn_by_ranges(params, tile, head, block):
    """`turn_of` where rows have key_ranges: a place in their two runs of key tiles."""
    BLOCK_M: gl.constexpr = params.tile.BLOCK_M
    N: gl.constexpr = params.tile.BLOCK_N
    key_block = tile.col // N
    at = first_entry(params.order.hulls.of_keys, tile.seq, tile.batch, head)
    count: gl.constexpr = BLOCK_M // ROWS
    hulls = row_hulls(at, block * BLOCK_M, tile.seq.len_q, count, params.mask.RANGES)
    end = gl.cdiv(hulls.end, N)
    begin = gl.minimum(hulls.begin // N, end)
    later_end = gl.maximum(gl.cdiv(hulls.later_end, N), end)
    later_begin = gl.minimum(gl.maximum(hulls.later_begin // N, end), later_end)
    is_later = key_block >= end
    turn = key_block - gl.where(is_later, later_begin - (end - begin), begin)
    if params.mask.HAS_RIGHT:
        turn = (end - begin) + (later_end - later_begin) - 1 - turn
    first = gl.where(is_later, later_begin, begin)
    return gl.where((key_block >= first) & (key_block < later_end), turn, -1)


@gluon.jit
def turn_by_position(params, tile, block):
    """`turn_of` of rows without key_ranges."""
    BLOCK_M: gl.constexpr = params.tile.BLOCK_M
    BLOCK_N: gl.constexpr = params.tile.BLOCK_N
    key_block = tile.col // BLOCK_N
    if params.mask.HAS_RIGHT:
        last_key = block * BLOCK_M + BLOCK_M - 1 + tile.seq.off + params.mask.right
        return gl.minimum(last_key, tile.seq.len_k - 1) // BLOCK_N - key_block
    elif params.mask.HAS_LEFT:
        first_key = block * BLOCK_M + tile.seq.off - params.mask.left
        return key_block - gl.maximum(first_key, 0) // BLOCK_N
    else:
        return key_block


@gluon.jit
def key_tile(params, index):
    """The `KeyTile` of work tile `index`. Tiles go by groups of KV heads, and in each group key
    tiles go from the first, which most causal queries see. With turns, they go from the tile whose
    turn comes first. Splits of a key tile's visits are neighbours, so that they share its keys."""
    split = gl.to_tensor(0)
    slot = gl.to_tensor(-1)
    if params.order.parts.whole is not None:
        part = index - params.order.parts.whole
        if part >= 0:
            slot = part // params.order.parts.splits
            split = part - slot * params.order.parts.splits
            index = params.order.parts.whole + slot
    elif params.order.parts.partials is not None:
        split = index % params.order.parts.splits
        index //= params.order.parts.splits
    key_blocks = params.order.key_blocks
    heads = params.order.tiles // key_blocks
    batch = gl.to_tensor(0)
    if params.order.varlen_tiles is not None:
        heads = params.sizes.heads_k
        entry = params.order.varlen_tiles + 1 + 2 * (index // heads)
        batch = gl.load(entry)
        index -= gl.load(entry + 1) * heads
        length = sequence(params.seqs.cu_k, batch, params.seqs.seqlen_k)[1]
        key_blocks = gl.cdiv(length, params.tile.BLOCK_N)
    head, block = l2_swizzle(
        index, key_blocks, heads, params.order.l2_heads, params.order.l2_groups
    )
    # Under a diagonal the last keys are added first.
    if params.order.turns is not None and params.mask.HAS_RIGHT:
        block = key_blocks - 1 - block
    if params.order.varlen_tiles is None:
        batch = head // params.sizes.heads_k
        head -= batch * params.sizes.heads_k
    token_q, stored_q = sequence(params.seqs.cu_q, batch, params.seqs.seqlen_q)
    token_k, stored_k = sequence(params.seqs.cu_k, batch, params.seqs.seqlen_k)
    len_q = stored_q
    len_k = stored_k
    if params.seqs.used_q is not None:
        len_q = within(gl.load(params.seqs.used_q + batch), 0, len_q)
    if params.seqs.leftpad_k is not None:
        token_k = within(gl.load(params.seqs.leftpad_k + batch), 0, stored_k)
        stored_k -= token_k
        len_k = stored_k
    if params.seqs.used_k is not None:
        len_k = within(gl.load(params.seqs.used_k + batch), 0, len_k)
    if params.mods.longest_k is not None:
        # A bias has only so many rows and keys.
        len_q = gl.minimum(len_q, params.mods.longest_q)
        len_k = gl.minimum(len_k, params.mods.longest_k)
    off = diagonal_offset(batch, len_q, len_k, params.mask)
    row = accum_begin(batch, token_q, params.seqs.cu_q, params.seqs.seqlen_q, params.tile.BLOCK_M)
    return KeyTile(
        batch=batch,
        kv_head=head,
        col=block * params.tile.BLOCK_N,
        seq=Seqlens(
            token_q=token_q,
            len_q=len_q,
            stored_q=stored_q,
            token_k=token_k,
            len_k=len_k,
            stored_k=stored_k,
            off=off,
        ),
        accum_row=row,
        split=split,
        slot=slot,
    )


@gluon.jit
def m_block_range(params, tile):
    """The query tiles that see any of a tile's keys, and those whose queries all see all of them.
    A tile of which only rows past the last query see keys may be among the former; `turn_of` counts
    it, too. Among the latter such rows do not count: their log-sum-exp makes their probabilities
    0."""
    if params.mask.blocks.SIDE:
        return places_in_list(params, tile)
    elif params.mask.RANGES:
        return m_blocks_of_ranges(params, tile)
    else:
        return m_blocks_by_position(params, tile)


@gluon.jit
def list_of_visits(params, tile):
    """Where `list_visits` stored the visits of a work tile's keys."""
    lists = params.order.lists
    block = gl.minimum(tile.col // params.tile.BLOCK_N, lists.blocks - 1)
    at = lists.visits + tile.batch.to(gl.int64) * lists.stride_b
    return at + tile.kv_head.to(gl.int64) * lists.stride_h + block.to(gl.int64) * lists.stride_n


@gluon.jit
def places_in_list(params, tile):
    """`m_block_range` of places in a list."""
    at = list_of_visits(params, tile)
    end = gl.load(at)
    return MBlockRange(gl.to_tensor(0), gl.load(at + 1), end, end)


@gluon.jit
def listed_visit(params, tile, blocks, number):
    """(which of the heads that have this list, place in it, where its entry is) of a visit."""
    NUMBERS: gl.constexpr = 3 if params.tile.BLOCK_N > params.mask.blocks.SIDE else 2
    ahead = number // blocks.end
    place = number - ahead * blocks.end
    return ahead, place, list_of_visits(params, tile) + 2 + place * NUMBERS


@gluon.jit
def m_blocks_of_ranges(params, tile):
    """`m_block_range` as `query_hulls` stored it."""
    hulls = params.order.hulls
    entry = tile.seq.token_k // params.tile.BLOCK_N + tile.batch
    if params.seqs.cu_k is None:
        entry = tile.batch.to(gl.int64) * params.order.key_blocks
    if hulls.entries is not None:
        entry += tile.kv_head.to(gl.int64) * hulls.entries
    if params.order.hulls.HIDES_ROWS:
        at = hulls.query_hulls + (entry + tile.col // params.tile.BLOCK_N) * 5
        begin, full_begin, full_end = gl.load(at), gl.load(at + 1), gl.load(at + 2)
        return MBlockRange(begin, full_begin, full_end, gl.load(at + 3), gl.load(at + 4))
    else:
        at = hulls.query_hulls + (entry + tile.col // params.tile.BLOCK_N) * 4
        return MBlockRange(gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3))


@gluon.jit
def m_blocks_by_position(params, tile):
    """`m_block_range` of rows without key_ranges."""
    BLOCK_M: gl.constexpr = params.tile.BLOCK_M
    BLOCK_N: gl.constexpr = params.tile.BLOCK_N
    col = tile.col
    last = gl.minimum(col + BLOCK_N, tile.seq.len_k) - 1
    begin = gl.to_tensor(0)
    end = gl.where(last < col, 0, gl.cdiv(tile.seq.len_q, BLOCK_M))
    full_begin = begin
    full_end = end
    if params.mask.HAS_RIGHT:
        diagonal = tile.seq.off + params.mask.right
        begin = gl.minimum(gl.maximum(col - diagonal, 0) // BLOCK_M, end)
        full_begin = gl.cdiv(gl.maximum(last - diagonal, 0), BLOCK_M)
        full_begin = gl.minimum(gl.maximum(full_begin, begin), end)
    if params.mask.HAS_LEFT:
        diagonal = tile.seq.off - params.mask.left
        stop = gl.maximum(gl.minimum(tile.seq.len_q, last - diagonal + 1), 0)
        end = gl.maximum(gl.minimum(gl.cdiv(stop, BLOCK_M), end), begin)
        full_begin = gl.minimum(full_begin, end)
        stop = gl.maximum(col - diagonal + 1, 0)
        full_end = gl.where(stop < tile.seq.len_q, stop // BLOCK_M, end)
    full_end = gl.minimum(gl.maximum(full_end, full_begin), end)
    # Keys past the last one must be masked for every query.
    full_end = gl.where(col + BLOCK_N > tile.seq.len_k, full_begin, full_end)
    return MBlockRange(begin, full_begin, full_end, end)


@gluon.jit
def is_masked(blocks, block):
    """Whether a query tile needs a mask."""
    return (block < blocks.full_begin) | (block >= blocks.full_end)


@gluon.jit
def needs_no_mask(blocks):
    """Whether no query tile of a work tile does."""
    return (blocks.full_begin == blocks.begin) & (blocks.full_end == blocks.end)


@gluon.jit
def heads_in_turn(params):
    """Query heads of a KV head that have the same visits, one head after the other."""
    if params.mask.blocks.SIDE:
        return params.order.lists.shared
    else:
        return params.sizes.group


@gluon.jit
def visit_range(params, tile, blocks):
    """Numbers [first, end) of a work tile's visits: query tiles of all its heads that see its keys,
    or one split of them."""
    first = gl.to_tensor(0)
    end = (blocks.end - blocks.begin) * heads_in_turn(params)
    if params.order.parts.partials is not None:
        splits = params.order.parts.splits
        if params.order.parts.whole is not None:
            splits = gl.where(tile.slot < 0, 1, splits)
        first = end * tile.split // splits
        end = end * (tile.split + 1) // splits
    return first, end


@gluon.jit
def is_visited(params, tile, blocks):
    """Whether a work tile has visits."""
    if params.order.parts.partials is None:
        return blocks.end > blocks.begin
    else:
        first, end = visit_range(params, tile, blocks)
        return end > first


@gluon.jit
def query_tile(params, tile, blocks, number):
    """(query head, query tile) of a work tile's visit."""
    if params.mask.blocks.SIDE:
        ahead, _place, at = listed_visit(params, tile, blocks, number)
        entry = gl.load(at)
        heads = params.order.lists.list_heads
        head = tile.kv_head * params.sizes.group + ahead + entry % heads
        return head, entry // heads
    elif params.ways.HEADS_INNERMOST:
        group = params.sizes.group
        turn = number // group
        # At a time, each query head is that of other key tiles.
        ahead = (number + tile.col // params.tile.BLOCK_N) % group
        block = gl.where(walks_down(params, tile), blocks.end - 1 - turn, blocks.begin + turn)
        return tile.kv_head * group + ahead, block
    else:
        count = blocks.end - blocks.begin
        ahead = number // count
        head = tile.kv_head * params.sizes.group + ahead
        place = number - ahead * count
        if params.ways.ROTATES:
            # At a time, key tiles visit different query tiles.
            turned = tile.col // params.tile.BLOCK_N * count // params.order.key_blocks
            if params.mask.HAS_RIGHT:
                turned = gl.where(needs_no_mask(blocks), turned, 0)
            place += turned
            place = gl.where(place < count, place, place - count)
        return head, blocks.begin + place


@gluon.jit
def walks_down(params, tile):
    """Whether a work tile's visits go from the last query tile to the first, each of all heads.
    Tiles of the first half of keys begin together and do. Those of the other half, which begin
    where one of these ends, go up: under a causal mask the query tile where each of them is does
    not depend on when it began."""
    return tile.col < params.order.key_blocks // 2 * params.tile.BLOCK_N
