"""The strategy "heads x ring": ranks stand in a grid. Those of a row hold one shard of the batch
together and exchange its tokens for heads; those of a column have the same heads, and pass keys on
as a ring (USP, arXiv 2405.07719)."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from heedful.core.call.spread import BLOCK, Piece
from heedful.distributed.layouts import Layout

# Groups of rows and columns, by group and how many ranks a row has. They live as long as the group.
_GROUPS: dict[tuple[Any, int], tuple[Any, Any]] = {}


@dataclass(frozen=True)
class Side:
    """One row or one column of ranks, with what the strategies ask of a plan: places are by rank
    those of its rows in the rows that the side holds together."""

    group: Any
    rank: int
    ranks: int
    heads: tuple[int, int]
    tokens: int
    total_tokens: int
    places: tuple[tuple[tuple[slice, slice], ...], ...]
    rounds: int


@dataclass(frozen=True)
class Grid:
    """shards: the layout of the rows of the grid, each as one rank; row, column: those of this
    rank."""

    shards: Layout
    row: Side
    column: Side


def width_of(ranks: int, heads_k: int, asked: int | None) -> int:
    """How many ranks a row has: by default the most that divide ranks and KV heads, but not all.

    Raises ValueError where there is no grid.
    """
    fits = [n for n in range(2, ranks) if ranks % n == 0 and heads_k % n == 0]
    if asked is None and fits:
        return fits[-1]
    if asked not in fits:
        raise ValueError(
            f"heads_ranks must be one of {fits} for {ranks} ranks and {heads_k} KV heads, got"
            f" {asked}: strategy 'heads x ring' takes a grid of two ranks or more to each side"
        )
    return asked


def split(shards: Layout, width: int) -> Layout:
    """The layout over all ranks: the rows of each shard in so many parts of neighbouring rows."""
    return Layout(
        shards.lengths,
        tuple(part for shard in shards.shards for part in _parts(shards.lengths, shard, width)),
    )


def _parts(lengths: Sequence[int], shard: Sequence[Piece], width: int) -> list[tuple[Piece, ...]]:
    ends = [0, *accumulate(map(len, shard))]
    cuts = sorted(_cut(lengths, shard, ends, ends[-1] * n // width) for n in range(1, width))
    parts = []
    for begin, stop in zip([0, *cuts], [*cuts, ends[-1]], strict=True):
        part = []
        for piece, start, end in zip(shard, ends, ends[1:], strict=False):
            low, high = max(begin, start), min(stop, end)
            if low < high:
                first = piece.begin - start
                part.append(Piece(piece.document, first + low, first + high))
        parts.append(tuple(part))
    return parts


def _cut(lengths: Sequence[int], shard: Sequence[Piece], ends: Sequence[int], row: int) -> int:
    """The nearest row at which a piece may be cut."""
    if not shard:
        return 0
    index = min(len(shard) - 1, bisect_right(ends, row) - 1)
    piece, start = shard[index], ends[index]
    position = (piece.begin + row - start + BLOCK // 2) // BLOCK * BLOCK
    return start + min(max(position, piece.begin), piece.end) - piece.begin


def grid(group: Any, shards: Layout, width: int, heads: tuple[int, int]) -> Grid:
    """The grid of a group. Its groups are made at the first use, by all ranks."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    row, column = _groups(group, rank, ranks, width)
    place, line = rank % width, rank // width
    counts = [sum(map(len, part)) for part in _parts(shards.lengths, shards.shards[line], width)]
    ends = [0, *accumulate(counts)]
    places = tuple(
        ((slice(0, count), slice(begin, begin + count)),)
        for count, begin in zip(counts, ends, strict=False)
    )
    held = counts[place], ends[-1]
    return Grid(
        shards,
        Side(row, place, width, heads, *held, places, 1),
        Side(column, line, ranks // width, heads, held[1], shards.starts[-1], (), 0),
    )


def _groups(group: Any, rank: int, ranks: int, width: int) -> tuple[Any, Any]:
    key = dist.group.WORLD if group is None else group, width
    if key not in _GROUPS:
        row = range(rank // width * width, rank // width * width + width)
        _GROUPS[key] = _made(group, row), _made(group, range(rank % width, ranks, width))
    return _GROUPS[key]


def _made(group: Any, members: Sequence[int]) -> Any:
    whole = dist.group.WORLD if group is None else group
    assert whole is not None
    is_gpu = dist.get_backend(whole) == "nccl"
    backend: Any = whole._get_backend(torch.device("cuda" if is_gpu else "cpu"))
    return dist.new_group(
        [dist.get_global_rank(whole, each) for each in members],
        timeout=backend.options._timeout,
        use_local_synchronization=True,
    )
