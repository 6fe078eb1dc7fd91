"""Which tiles of queries see a tile of keys, where each row has ranges of keys.

`query_gradients` stores what its tile of queries sees, and `key_gradients` looks for its keys among
these entries. An entry has, in keys: begin and end of what is seen apart, of what is seen,
and of what every row sees of a tile whose rows all exist.
"""

import triton
import triton.language as tl

from heedful.kernels.args.portable import SeenKeys
from heedful.kernels.args.shared import PortableParams, Tile
from heedful.kernels.common.tile_range import TileRange

# Entries that are looked at together.
_CHUNK = tl.constexpr(128)


@triton.jit
def first_entry(seen: SeenKeys, h, place):
    """Where the entries of a sequence's tiles begin. Packed sequences each begin one entry later
    than their rows say, so that no two have an entry in common."""
    entry = h * seen.heads
    if seen.tiles is None:
        entry += place.seq.token_q // seen.ROWS + place.b
    else:
        entry += place.b * seen.tiles
    return seen.ptr + entry * 8


@triton.jit
def store_seen_keys(seen: SeenKeys, tiles, block, place, tile: Tile):
    """Stores the entry of a tile of queries. tiles: the key tiles that it visits."""
    at = first_entry(seen, place.h, place) + block * 8
    N: tl.constexpr = tile.BLOCK_N
    tl.store(at, tiles.first_begin * N)
    tl.store(at + 1, tiles.first_end * N)
    tl.store(at + 2, tiles.begin * N)
    tl.store(at + 3, tiles.end * N)
    exist = block * tile.BLOCK_M + tile.BLOCK_M <= place.seq.len_q
    tl.store(at + 4, tiles.full_begin * N)
    tl.store(at + 5, tl.where(exist, tiles.full_end, tiles.full_begin) * N)


@triton.jit
def seeing_tiles(col0, seen: SeenKeys, place, params: PortableParams, IS_GQA: tl.constexpr):
    """The `TileRange` of query tiles that see any key of a tile from `col0` on, of all query heads
    of the place's KV head. Full tiles are those whose rows all exist and see each of these keys, if
    they are one run."""
    M: tl.constexpr = params.tile.BLOCK_M
    ROWS: tl.constexpr = seen.ROWS
    len_q = place.seq.len_q
    stop = tl.minimum(col0 + params.tile.BLOCK_N, place.seq.len_k)
    count = tl.cdiv(len_q, ROWS)
    begin = count
    end = 0
    full_begin = 0
    full_end = count
    group = params.shape.heads_q // params.shape.heads_k if IS_GQA else 1
    for r in range(0, group):
        base = first_entry(seen, place.g * group + r, place)
        head_begin = count
        head_end = 0
        fulls = 0
        for first in range(0, count, _CHUNK):
            entries = first + tl.arange(0, _CHUNK)
            exists = entries < count
            at = base + entries * 8
            apart = tl.load(at, mask=exists, other=0) < stop
            apart &= tl.load(at + 1, mask=exists, other=0) > col0
            sees = tl.load(at + 2, mask=exists, other=0) < stop
            sees &= tl.load(at + 3, mask=exists, other=0) > col0
            sees |= apart
            begin = tl.minimum(begin, tl.min(tl.where(sees, entries, count), 0))
            end = tl.maximum(end, tl.max(tl.where(sees, entries + 1, 0), 0))
            full = tl.load(at + 4, mask=exists, other=0) <= col0
            full &= tl.load(at + 5, mask=exists, other=0) >= stop
            head_begin = tl.minimum(head_begin, tl.min(tl.where(full, entries, count), 0))
            head_end = tl.maximum(head_end, tl.max(tl.where(full, entries + 1, 0), 0))
            fulls += tl.sum(full.to(tl.int32), 0)
        if head_end - head_begin != fulls:
            head_end = 0
        full_begin = tl.maximum(full_begin, head_begin)
        full_end = tl.minimum(full_end, head_end)
    begin = begin * ROWS // M
    end = tl.maximum(tl.cdiv(tl.minimum(end * ROWS, len_q), M), begin)
    full_begin = tl.minimum(tl.maximum(tl.cdiv(full_begin * ROWS, M), begin), end)
    full_end = tl.minimum(tl.maximum(full_end * ROWS // M, full_begin), end)
    return TileRange(0, 0, begin, full_begin, full_end, end)
