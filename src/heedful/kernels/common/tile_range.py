"""Which key tiles a tile of queries visits, and which query tiles a tile of keys visits. The
portable and CDNA kernels loop over these ranges."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from heedful.kernels.args.shared import BlockLists, Mask, Tile
from heedful.kernels.common.block_lists import list_of, listed, step_of
from heedful.kernels.common.key_range import key_bounds
from heedful.kernels.common.row_ranges import range_hulls
from heedful.kernels.common.scores import with_bits


class TileRange(NamedTuple):
    """Tiles [begin, end) are visited, and [full_begin, full_end) of them need no mask. Tiles
    [first_begin, first_end), none of which is among those, are visited too."""

    first_begin: Any
    first_end: Any
    begin: Any
    full_begin: Any
    full_end: Any
    end: Any


@triton.jit
def key_tiles(row, place, mask: Mask, tile: Tile):
    """The key tiles that a tile of queries from `row` on visits."""
    if mask.blocks.SIDE:
        return listed_tiles(row, place, mask.blocks, tile)
    elif mask.RANGES:
        return ranged_tiles(row, place, mask, tile)
    else:
        return tiles_by_position(row, place, mask, tile)


@triton.jit
def ranged_tiles(row, place, mask: Mask, tile: Tile):
    """`key_tiles` of rows that have key_ranges."""
    hull, other = range_hulls(row, place, mask, tile)
    full_end = hull.full_end
    if mask.tree.ptr is not None:
        full_end = before_tree(full_end, hull.full_begin, place, tile)
    return TileRange(other.begin, other.end, hull.begin, hull.full_begin, full_end, hull.end)


@triton.jit
def listed_tiles(row, place, blocks: BlockLists, tile: Tile):
    """`key_tiles` of rows that have a list, by their places in it: `key_tile` says which tiles they
    are. Those seen whole need no mask where neither positions nor the last keys are hidden."""
    STEPS: tl.constexpr = blocks.SIDE // tile.BLOCK_N
    whole, part = listed(list_of(place.b, place.h, row, blocks), blocks)
    is_any = (row < place.seq.len_q) & (place.seq.len_k > 0)
    end = tl.where(is_any, (whole + part) * STEPS, 0)
    full_end = 0
    if blocks.IS_PLAIN:
        full_end = tl.where(place.seq.len_k % blocks.SIDE == 0, tl.minimum(whole * STEPS, end), 0)
    return TileRange(0, 0, 0, 0, full_end, end)


@triton.jit
def key_tile(visit, row, place, head, params, IS_MASKED: tl.constexpr):
    """(first key, `HeadMods`) of a visited tile, which is a place in the list of rows that have
    one. IS_MASKED: keys that do not exist are hidden. params: with mask and tile."""
    N: tl.constexpr = params.tile.BLOCK_N
    if params.mask.blocks.SIDE:
        tiles_of = list_of(place.b, place.h, row, params.mask.blocks)
        len_k = place.seq.len_k
        col, bits = step_of(tiles_of, visit, len_k, params.mask.blocks, N, IS_MASKED)
        return col, with_bits(head, bits)
    else:
        return visit * N, head


@triton.jit
def before_tree(full_end, full_begin, place, tile: Tile):
    """The end of full tiles where a tree covers the last len_q keys: tiles that hold any of them
    need a mask."""
    keys = tl.maximum(place.seq.len_k - place.seq.len_q, 0)
    return tl.maximum(tl.minimum(full_end, keys // tile.BLOCK_N), full_begin)


@triton.jit
def tiles_by_position(row, place, mask: Mask, tile: Tile):
    """`key_tiles` of rows that have none."""
    len_k = place.seq.len_k
    last = tl.minimum(row + tile.BLOCK_M, place.seq.len_q) - 1
    bounds = key_bounds(row, last, place.seq.off, len_k, mask)
    first_end = 0
    begin = 0
    full_begin = 0
    end = tl.cdiv(bounds.stop_last, tile.BLOCK_N)
    full_end = bounds.stop_first // tile.BLOCK_N
    if mask.HAS_LEFT:
        begin = tl.minimum(bounds.start_first // tile.BLOCK_N, end)
        full_begin = tl.cdiv(bounds.start_last, tile.BLOCK_N)
        full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
        seen = tl.minimum(mask.first, bounds.stop_last)
        first_end = tl.minimum(tl.cdiv(seen, tile.BLOCK_N), begin)
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    if last < row:
        first_end = 0
        begin = 0
        full_begin = 0
        full_end = 0
        end = 0
    if mask.tree.ptr is not None:
        full_end = before_tree(full_end, full_begin, place, tile)
    return TileRange(0, first_end, begin, full_begin, full_end, end)


@triton.jit
def masked_count(tiles):
    """How many of the visited tiles need a mask."""
    first = tiles.first_end - tiles.first_begin
    return first + (tiles.full_begin - tiles.begin) + (tiles.end - tiles.full_end)


@triton.jit
def any_tile(visit, tiles):
    """The key tile of a visit, where full ones and masked ones are counted together."""
    first = tiles.first_end - tiles.first_begin
    tile = visit + tiles.first_begin
    if visit >= first:
        tile = visit - first + tiles.begin
    return tile


@triton.jit
def visited_tile(visit, tiles, mask: Mask, IS_MASKED: tl.constexpr):
    """The key tile of a visit. Visits are counted apart for tiles that need a mask (IS_MASKED) and
    for those that need none."""
    if not IS_MASKED:
        return visit + tiles.full_begin
    elif mask.HAS_LEFT or mask.RANGES:
        return masked_tile(visit, tiles)
    else:
        return visit + tiles.full_end


@triton.jit
def masked_tile(index, tiles):
    """The key tile of visit `index` among those that need a mask."""
    before = tiles.full_begin - tiles.begin
    first = tiles.first_end - tiles.first_begin
    tile = index + tiles.first_begin
    if index >= first + before:
        tile = index - first - before + tiles.full_end
    elif index >= first:
        tile = index - first + tiles.begin
    return tile


@triton.jit
def query_tiles(col, place, mask: Mask, tile: Tile):
    """The query tiles that see any key of a tile from `col` on. Full tiles are those whose rows all
    exist and see each of these keys."""
    off, len_q = place.seq.off, place.seq.len_q
    last = tl.minimum(col + tile.BLOCK_N, place.seq.len_k) - 1
    begin = 0
    full_begin = 0
    end = tl.cdiv(len_q, tile.BLOCK_M)
    full_end = len_q // tile.BLOCK_M
    if mask.HAS_RIGHT:
        begin = tl.minimum(tl.maximum(col - off - mask.right, 0) // tile.BLOCK_M, end)
        full_begin = tl.cdiv(tl.maximum(last - off - mask.right, 0), tile.BLOCK_M)
        full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    if mask.HAS_LEFT:
        if col >= mask.first:
            stop = tl.maximum(tl.minimum(len_q, last - off + mask.left + 1), 0)
            end = tl.cdiv(stop, tile.BLOCK_M)
        if last >= mask.first:
            stop = tl.maximum(tl.minimum(len_q, col - off + mask.left + 1), 0)
            full_end = stop // tile.BLOCK_M
        end = tl.maximum(end, begin)
        full_begin = tl.minimum(full_begin, end)
    if last < col:
        begin = 0
        full_begin = 0
        full_end = 0
        end = 0
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    if mask.tree.ptr is not None:
        full_end = tl.where(last >= place.seq.len_k - len_q, full_begin, full_end)
    return TileRange(0, 0, begin, full_begin, full_end, end)
