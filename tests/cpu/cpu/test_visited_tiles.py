"""Which tiles the CPU backend visits: none that the mask hides, and each of the others once."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from heedful.core.call.mask import MaskSpec
from heedful.cpu import block_lists, blocks, tiled_backward, tiled_forward
from heedful.cpu.blocks import KEYS, ROWS, UNIT, Block
from heedful.cpu.scores import Tiles
from support.problems.cases import Case, build

# Masks by their bounds, each aligned at both ends, and lengths that fill units or do not.
BOUNDS = [(-1, -1), (-1, 0), (-1, 70), (0, 0), (70, 0), (200, 30), (130, -1), (90, 5, 70)]
BOUNDS += [(300, 0, 1), (-1, 3, 40), (64, 0, 200), (64, 64, 64)]
LENGTHS = [(300, 300), (130, 600), (600, 130), (1, 257), (256, 1), (1100, 64), (70, 513)]
MASKS = [
    replace(MaskSpec(*bounds), bottom_right=bottom_right, shift=shift)
    for bounds, (bottom_right, shift) in product(BOUNDS, [(True, 0), (False, 0), (True, -40)])
]


def block_of(mask: MaskSpec, len_q: int, len_k: int, heads_q: int = 1) -> Block:
    case = Case(batch=1, seqlen_q=len_q, seqlen_k=len_k, heads_q=heads_q, heads_k=1, head_dim=1)
    built = build(replace(case, backward=False))
    problem = replace(built.problem, mask=mask)
    return Block(problem, built.x, range(1), range(1), len_q, len_k)


def visible(block: Block) -> torch.Tensor:
    """Which keys each query sees by position, bool (len_q, len_k)."""
    mask = block.problem.mask
    i, j = torch.arange(block.len_q)[:, None], torch.arange(block.len_k)
    distance = j - i - mask.offset(block.len_q, block.len_k)
    right = torch.ones_like(distance, dtype=torch.bool)
    left = right.clone()
    if mask.right >= 0:
        right = distance <= mask.right
    if mask.left >= 0:
        left = (distance >= -mask.left) | (j < mask.first)
    return right & left


def span(which: torch.Tensor) -> range:
    """From the first to the last that is set."""
    found = which.nonzero().flatten().tolist()
    return range(found[0], found[-1] + 1) if found else range(0)


every_mask = pytest.mark.parametrize("mask", MASKS, ids=str)


@every_mask
def test_key_tiles_are_all_keys_that_are_seen_and_hardly_more(mask):
    for len_q, len_k in LENGTHS:
        block = block_of(mask, len_q, len_k)
        whole = visible(block)
        for rows in blocks.query_tiles(block):
            seen = whole[rows.start : rows.stop]
            tiles = list(blocks.key_tiles(block, rows))
            keys = [key for cols, _ in tiles for key in cols]
            assert keys == sorted(set(keys)) and all(0 <= key < len_k for key in keys)
            assert set(seen.any(0).nonzero().flatten().tolist()) <= set(keys)
            for cols, masked in tiles:
                assert 0 < len(cols) <= KEYS
                for start in range(cols.start, cols.stop, UNIT):
                    part = seen[:, start : min(start + UNIT, cols.stop)]
                    # No unit is visited for nothing, but beside keys that no window hides.
                    assert part.any() or (mask.first and mask.left >= 0)
                    if not masked:
                        assert part.all()
                    elif not mask.bounded:
                        raise AssertionError("nothing is hidden")
                    elif start >= mask.first and start + UNIT <= len_k:
                        # Where the position hides nothing, no pass over the scores is made.
                        assert not part.all()
            # Tiles are as long as may be: leading keys, and the mask's edges, have their own.
            assert len(tiles) <= -(-len(keys) // KEYS) + 3


@every_mask
def test_the_keys_that_a_block_holds_are_those_that_any_query_sees(mask):
    for len_q, len_k in LENGTHS:
        block = block_of(mask, len_q, len_k)
        want, got = span(visible(block).any(0)), block.seen()
        if not want:
            assert len(got) <= UNIT
            continue
        assert got.start <= want.start < want.stop <= got.stop <= len_k
        assert want.start - got.start < UNIT and got.stop - want.stop < UNIT
        for rows in blocks.query_tiles(block):
            for cols, _ in blocks.key_tiles(block, rows):
                assert got.start <= cols.start and cols.stop <= got.stop


@every_mask
def test_only_queries_that_see_a_tile_of_keys_are_multiplied_with_it(mask):
    for len_q, len_k in LENGTHS:
        block = block_of(mask, len_q, len_k)
        whole = visible(block)
        for rows, cols in product(blocks.parts(len_q, 200), blocks.parts(len_k, 100)):
            want = span(whole[rows.start : rows.stop, cols.start : cols.stop].any(1))
            got = block.rows_that_see(rows, cols)
            if mask.first and mask.left >= 0 and cols.start < mask.first < cols.stop:
                assert not want or set(range(rows.start, rows.stop)) >= set(got)
                assert {rows.start + i for i in want} <= set(got)
            else:
                assert [i - rows.start for i in got] == list(want)
            # Of a group that is folded into rows, a part of the queries is no slice.
            folded = block_of(mask, len_q, len_k, heads_q=2)
            assert folded.rows_that_see(rows, cols) == rows


@every_mask
def test_a_backward_visits_each_pair_of_tiles_that_see_each_other_once(mask):
    for len_q, len_k in LENGTHS:
        block = block_of(mask, len_q, len_k)
        whole = visible(block)
        tiles = Tiles(block.problem, block.x)
        dout = torch.zeros(1, len_q, 1, 1)
        pass_ = tiled_backward._BlockBackward(tiles, block, dout, None)
        parts = list(tiled_backward._parts(len_k))
        assert [key for cols in parts for key in cols] == list(range(len_k))
        assert all(len(cols) == KEYS for cols in parts[:-1]) and len(parts[-1]) <= KEYS
        for cols in parts:
            found = dict(pass_._query_tiles(cols))
            for index, rows in enumerate(pass_.rows):
                part = whole[rows.start : rows.stop, cols.start : cols.stop]
                if index not in found:
                    assert not part.any()
                elif not found[index]:
                    assert part.all()
                elif cols.stop % UNIT == 0 and not (mask.first and mask.left >= 0):
                    assert not part.all()
                if index in found and not mask.first:
                    assert part.any()


@every_mask
def test_the_first_tile_has_a_key_for_each_row_or_there_is_no_first(mask):
    for len_q, len_k in LENGTHS:
        block = block_of(mask, len_q, len_k)
        whole = visible(replace(block, problem=replace(block.problem, mask=replace(mask, first=0))))
        for rows in blocks.query_tiles(block):
            tiles = list(blocks.key_tiles(block, rows))
            ordered = tiled_forward._with_a_key_first(block, rows, tiles)
            good = [
                number
                for number, (cols, _) in enumerate(tiles)
                if whole[rows.start : rows.stop, cols.start : cols.stop].any(1).all()
            ]
            if not good:
                assert ordered == []
            else:
                first = good[0]
                assert ordered == [tiles[first], *tiles[:first], *tiles[first + 1 :]]


def test_sides_of_tiles_are_whole_units():
    assert ROWS % UNIT == 0 and KEYS % UNIT == 0 and UNIT % 16 == 0
    # Torch's kernels take up to 64 elements at a time.
    assert blocks.VECTOR % 64 == 0
    for count in range(200):
        assert 0 <= blocks.whole_vectors(count) - count < blocks.VECTOR
        assert blocks.whole_vectors(count) % blocks.VECTOR == 0


def test_a_group_is_folded_into_the_rows_of_a_tile():
    for group, rows in ((1, 512), (2, 256), (3, 170), (512, 1), (1000, 1)):
        problem = build(Case(heads_q=group, heads_k=1, head_dim=1, backward=False)).problem
        assert blocks.query_rows(problem) == rows
        block = block_of(MaskSpec(), 700, 10, group)
        tiles = list(blocks.query_tiles(block))
        assert [row for tile in tiles for row in tile] == list(range(700))
        assert {len(tile) for tile in tiles[:-1]} <= {rows}


# Masks as lists of tiles.

SIDE, ROW_TILES, KEY_TILES = 32, 3, 4
HEADS, HEADS_K = 4, 2


def listed(batch: int, heads: int, seed: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Lists and bits that are drawn; which keys each query sees, (batch, heads, queries, keys); and
    which tiles are listed. A tile is seen whole, in part, or not at all."""
    drawn = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (3, SIDE, 1), generator=drawn).int()
    unpacked = (bits[..., None] >> torch.arange(32) & 1).flatten(-2).bool()
    lists = torch.zeros(batch, heads, ROW_TILES, 2 + 2 * KEY_TILES, dtype=torch.int32)
    # Entries that are not in use point to tiles all the same.
    lists[..., 2::2] = torch.randint(0, KEY_TILES, (KEY_TILES,), generator=drawn).int()
    seen = torch.zeros(batch, heads, ROW_TILES, SIDE, KEY_TILES, SIDE, dtype=torch.bool)
    has = torch.zeros(batch, heads, ROW_TILES, KEY_TILES, dtype=torch.bool)
    for place in product(range(batch), range(heads), range(ROW_TILES)):
        count = int(torch.randint(0, KEY_TILES, (), generator=drawn))
        tiles = torch.randperm(KEY_TILES, generator=drawn)[:count].tolist()
        indices = torch.randint(-1, 3, (count,), generator=drawn).tolist()
        whole = sum(index == -1 for index in indices)
        lists[place][:2] = torch.tensor([whole, count - whole])
        for number, (tile, index) in enumerate(zip(tiles, indices, strict=True)):
            lists[place][2 + 2 * number : 4 + 2 * number] = torch.tensor([tile, index])
            b, h, row = place
            seen[b, h, row, :, tile] = True if index == -1 else unpacked[index]
            has[b, h, row, tile] = True
    keys = torch.zeros(batch, heads, KEY_TILES, 2)
    made = SimpleNamespace(block_rows=lists, block_keys=keys, block_bits=bits)
    return made, seen.flatten(4).flatten(2, 3), has


WINDOWS = [(0, 96, 0, 128), (0, 32, 0, 32), (32, 64, 64, 96), (40, 50, 70, 71), (20, 70, 33, 97)]
WINDOWS += [(95, 96, 127, 128), (64, 96, 0, 31), (0, 1, 32, 128)]


@pytest.mark.parametrize("repeated", ["", "batch", "heads", "both"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_tiles_of_lists_show_the_keys_of_their_bits_and_no_others(window, repeated):
    begin, end, first, last = window
    rows, cols = range(begin, end), range(first, last)
    batch = 1 if repeated in ("batch", "both") else 3
    heads = 1 if repeated in ("heads", "both") else HEADS
    x, seen, has = listed(batch, heads, seed=7)
    x.block_rows = x.block_rows.expand(3, HEADS, -1, -1)
    # Two sequences, and the query heads of the last KV head.
    batches = range(1, 3) if batch > 1 else range(1)
    of_heads = range(2, 4) if heads > 1 else range(1)
    block: Any = SimpleNamespace(
        x=x, batches=range(1, 3), query_heads=range(2, 4), kv_heads=range(1, 2)
    )
    found = block_lists.shown(block, rows, cols)
    wanted = seen[batches.start : batches.stop, of_heads.start : of_heads.stop]
    wanted = wanted[..., begin:end, first:last]
    assert found.shape == (len(batches), 1, len(of_heads), len(rows), len(cols))
    assert torch.equal(found[:, 0], wanted)
    touched = has[batches.start : batches.stop, of_heads.start : of_heads.stop]
    touched = touched[..., begin // 32 : -(-end // 32), first // 32 : -(-last // 32)]
    assert block_lists.is_listed(block, rows, cols) == bool(touched.any())


@pytest.mark.parametrize("tile", range(KEY_TILES))
def test_only_the_tile_of_keys_that_is_listed_is_visited(tile):
    lists = torch.zeros(1, 1, ROW_TILES, 4, dtype=torch.int32)
    lists[0, 0, 1] = torch.tensor([1, 0, tile, -1])
    keys, bits = torch.zeros(1, 1, KEY_TILES, 2), torch.zeros(1, SIDE, 1, dtype=torch.int32)
    x = SimpleNamespace(block_rows=lists, block_keys=keys, block_bits=bits)
    block: Any = SimpleNamespace(x=x, batches=range(1), query_heads=range(1), kv_heads=range(1))
    for row, col in product(range(ROW_TILES), range(KEY_TILES)):
        tiles = range(32 * row, 32 * row + 32), range(32 * col, 32 * col + 32)
        assert block_lists.is_listed(block, *tiles) == ((row, col) == (1, tile))
        assert bool(block_lists.shown(block, *tiles).all()) == ((row, col) == (1, tile))
