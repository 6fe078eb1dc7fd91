"""Layouts of small batches, piece by piece, and the grid in which ranks of "heads x ring" stand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from heedful.core.call.spread import CAUSAL, Mask, Piece
from heedful.distributed import grids
from heedful.distributed.grids import Side, grid, split, width_of
from heedful.distributed.layouts import LAYOUTS, Layout, documents

# By layout, lengths and ranks: (document, begin, end) of the pieces of each rank, in order.
PIECES: dict[tuple[str, tuple[int, ...], int], list[list[tuple[int, int, int]]]] = {
    # The later chunk of a document that is cut comes first; neighbouring chunks are one piece.
    ("zigzag", (1024,), 2): [[(0, 768, 1024), (0, 0, 256)], [(0, 256, 768)]],
    # Two tiles lie in the second and the last of four chunks.
    ("zigzag", (200,), 2): [[(0, 128, 200)], [(0, 0, 128)]],
    ("zigzag", (100,), 2): [[(0, 0, 100)], []],
    ("zigzag", (0, 100), 1): [[(1, 0, 100)]],
    # Documents of equal lengths stay in the order of the batch,
    ("zigzag", (1024, 1024), 2): [
        [(0, 0, 256), (0, 768, 1024), (1, 0, 256), (1, 768, 1024)],
        [(0, 256, 768), (1, 256, 768)],
    ],
    # others by what their keys are: later chunks, then earlier ones.
    ("zigzag", (1024, 1152), 2): [
        [(0, 768, 1024), (1, 768, 1152), (0, 0, 256), (1, 0, 256)],
        [(0, 256, 768), (1, 256, 768)],
    ],
    # Row 400 is the 100th of its document: the nearest cut is after 128.
    ("contiguous", (300, 500), 2): [[(0, 0, 300), (1, 0, 128)], [(1, 128, 500)]],
    ("contiguous", (100, 100), 2): [[(0, 0, 100)], [(1, 0, 100)]],
    ("contiguous", (200,), 3): [[(0, 0, 128)], [], [(0, 128, 200)]],
    ("contiguous", (100,), 4): [[], [], [(0, 0, 100)], []],
    ("contiguous", (0, 256), 2): [[(1, 0, 128)], [(1, 128, 256)]],
    # As even if one is cut: then none is.
    ("documents", (128, 128, 128), 2): [[(0, 0, 128), (2, 0, 128)], [(1, 0, 128)]],
    # Whole ones come first; the one with most tiles is cut.
    ("documents", (128, 1024, 100), 2): [
        [(0, 0, 128), (1, 768, 1024), (1, 0, 256)],
        [(2, 0, 100), (1, 256, 768)],
    ],
    ("documents", (100, 0, 300), 2): [[(0, 0, 100), (2, 256, 300)], [(2, 0, 256)]],
    ("documents", (128, 0, 128), 2): [[(0, 0, 128)], [(2, 0, 128)]],
    # With both cut the busiest rank has 9 tiles, with the longest cut 11, and with neither 10.
    ("documents", (100, 500, 300), 2): [
        [(0, 0, 100), (1, 384, 500), (2, 256, 300), (1, 0, 128)],
        [(1, 128, 384), (2, 0, 256)],
    ],
}


@pytest.mark.parametrize(("name", "lengths", "ranks"), PIECES, ids=str)
def test_ranks_hold_the_pieces_that_a_layout_says(name, lengths, ranks):
    made = LAYOUTS[name](lengths, ranks, CAUSAL)
    found = [[(p.document, p.begin, p.end) for p in shard] for shard in made.shards]
    assert found == PIECES[name, lengths, ranks]
    assert made.lengths == lengths and made.starts[-1] == sum(lengths)


def test_of_many_documents_the_64_longest_may_be_cut():
    """66 ranks are busy evenly only if every document is cut; with 65 of them they stay whole."""
    few, many = (documents([132 * 128] * count, 66, CAUSAL) for count in (64, 65))
    # Two chunks each, which are neighbours on the last rank.
    assert sorted(map(len, few.shards)) == [64] + [128] * 65
    assert sorted(map(len, many.shards)) == [0] + [1] * 65


@pytest.mark.parametrize(
    ("lengths", "cuts", "mask", "balance"),
    [
        # A causal document of two tiles a side has three.
        ([256], [128], CAUSAL, 3 / (2 * 2)),
        ([256], [128], Mask(None, None), 4 / (2 * 2)),
        # A cut within a tile costs one more row of tiles.
        ([256], [64], CAUSAL, 3 / (2 * 4)),
        ([256], [256], CAUSAL, 1 / 2),
        ([0], [0], CAUSAL, 1.0),
    ],
)
def test_balance_is_the_share_of_the_busiest_ranks_tiles_that_are_needed(
    lengths, cuts, mask, balance
):
    (length,), (cut,) = lengths, cuts
    made = Layout((length,), ((Piece(0, 0, cut),), (Piece(0, cut, length),)))
    assert made.balance(mask) == balance


@pytest.mark.parametrize(
    ("ranks", "heads", "asked", "width"),
    [
        (8, 8, None, 4),
        (8, 2, None, 2),
        (12, 6, None, 6),
        (12, 6, 3, 3),
        (12, 4, None, 4),
        (4, 4, 2, 2),
    ],
)
def test_a_row_has_the_most_ranks_that_divide_both_or_as_many_as_asked(ranks, heads, asked, width):
    assert width_of(ranks, heads, asked) == width


@pytest.mark.parametrize(
    ("ranks", "heads", "asked", "fits"),
    [
        (3, 3, None, []),
        (2, 2, 2, []),
        (8, 8, 8, [2, 4]),
        (8, 8, 1, [2, 4]),
        (8, 2, 4, [2]),
        (6, 4, 3, [2]),
    ],
)
def test_a_row_of_other_ranks_is_refused_and_says_which_fit(ranks, heads, asked, fits):
    with pytest.raises(ValueError) as caught:
        width_of(ranks, heads, asked)
    words = f"heads_ranks must be one of {fits} for {ranks} ranks and {heads} KV heads, got {asked}"
    assert str(caught.value).startswith(words)


# By pieces of a shard: after how many of its rows it is cut, for each number of ranks.
CUTS: dict[tuple[tuple[int, int], ...], dict[int, list[int]]] = {
    ((0, 300),): {2: [128], 3: [128, 256]},
    # A document's end is nearer than the next tile.
    ((0, 100),): {2: [0], 4: [0, 0, 100]},
    # Cuts lie at tiles of documents, which are no tiles of the shard's rows.
    ((768, 1024), (0, 256)): {2: [256], 4: [128, 256, 384]},
    ((128, 230), (0, 400)): {2: [102 + 128], 3: [102 + 128, 102 + 256]},
    (): {2: [0]},
}


@pytest.mark.parametrize("pieces", CUTS, ids=str)
def test_a_shard_is_cut_at_tiles_of_its_documents_nearest_to_even_parts(pieces):
    shard = tuple(Piece(d, *rows) for d, rows in enumerate(pieces))
    rows = [(p.document, row) for p in shard for row in range(p.begin, p.end)]
    for width, cuts in CUTS[pieces].items():
        made = split(Layout((1024, 1024), (shard, ())), width)
        assert made.lengths == (1024, 1024) and len(made.shards) == 2 * width
        ends = [0, *cuts, len(rows)]
        for part, begin, end in zip(made.shards[:width], ends, ends[1:], strict=False):
            held = [(p.document, row) for p in part for row in range(p.begin, p.end)]
            assert held == rows[begin:end]
            assert all(len(p) for p in part)
        assert made.shards[width:] == ((),) * width


@pytest.fixture
def ranks(monkeypatch) -> Any:
    """The rank of a group of four, and the groups that are made: which ranks are in one. Ranks of
    the group are others of all processes."""
    said = SimpleNamespace(rank=0, made=[], backend="gloo", devices=[])
    options = SimpleNamespace(_timeout="a while")

    class Group:
        def _get_backend(self, device: torch.device) -> Any:
            said.devices.append(device.type)
            return SimpleNamespace(options=options)

    def new_group(members, **more):
        assert more == {"timeout": "a while", "use_local_synchronization": True}
        said.made.append(members)
        return tuple(members)

    said.group = Group()
    monkeypatch.setattr(grids, "_GROUPS", {})
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=Group()))
    monkeypatch.setattr(dist, "get_rank", lambda group=None: said.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: said.backend)
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: 10 + rank)
    monkeypatch.setattr(dist, "new_group", new_group)
    return said


# Parts of both rows' shards, in tokens.
PARTS = ((256, 172), (128, 244))


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_stands_in_a_row_that_shares_a_shard_and_in_a_column_that_passes_keys(ranks, rank):
    ranks.rank = rank
    shards = LAYOUTS["contiguous"]([300, 500], 2, CAUSAL)
    made = grid(ranks.group, shards, 2, (4, 2))
    line, place = divmod(rank, 2)
    first, second = PARTS[line]
    places = (
        ((slice(0, first), slice(0, first)),),
        ((slice(0, second), slice(first, first + second)),),
    )
    row = (10 + 2 * line, 11 + 2 * line)
    assert made.row == Side(row, place, 2, (4, 2), PARTS[line][place], first + second, places, 1)
    column = (10 + place, 12 + place)
    assert made.column == Side(column, line, 2, (4, 2), first + second, 800, (), 0)
    assert made.shards is shards
    assert [sum(map(len, part)) for part in split(shards, 2).shards] == [*PARTS[0], *PARTS[1]]


def test_groups_of_a_grid_are_made_once_for_each_group_and_width(ranks):
    shards = LAYOUTS["contiguous"]([300, 500], 2, CAUSAL)
    first = grid(None, shards, 2, (4, 2))
    assert grid(None, shards, 2, (8, 2)).row.group is first.row.group and len(ranks.made) == 2
    assert ranks.devices == ["cpu", "cpu"]
    ranks.backend = "nccl"
    grid(ranks.group, shards, 2, (4, 2))
    assert len(ranks.made) == 4 and ranks.devices[2:] == ["cuda", "cuda"]
    grid(None, LAYOUTS["contiguous"]([300, 500], 1, CAUSAL), 4, (4, 4))
    assert len(ranks.made) == 6 and ranks.made[4:] == [[10, 11, 12, 13], [10]]
