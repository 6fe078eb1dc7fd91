"""Numbers of what each rank sends, receives and computes, made from a layout without processes.

Rows are numbered in the order in which a rank holds them.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from heedful.distributed.layouts import Layout, Mask, Piece


@dataclass(frozen=True)
class Call:
    """Packed sequences that one kernel call takes. rows: this rank's rows, a slice; lengths_q,
    lengths_k: of each sequence; keys: for each key its row in the keys that the rank has, its own
    first; firsts: the position in its document of each sequence's first key; window: (left, right)
    as that call takes it; pieces: what the sequences are."""

    rows: slice
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    keys: np.ndarray
    firsts: tuple[int, ...]
    window: tuple[int, int]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Schedule:
    """One rank's part of the strategy "gather". sent[r]: its rows that rank r gets; received[r]:
    how many it gets of rank r, which follow its own rows in this order; most_received:
    of all ranks the most that one gets, the same on each; calls: what it computes."""

    sent: tuple[np.ndarray, ...]
    received: tuple[int, ...]
    most_received: int
    calls: tuple[Call, ...]

    @cached_property
    def sent_rows(self) -> np.ndarray:
        return np.concatenate(self.sent) if self.sent else np.zeros(0, np.int64)


def gathered(layout: Layout, mask: Mask, rank: int, one_by_one: bool = False) -> Schedule:
    """The schedule of a rank. one_by_one: a call for each piece, where what a call takes once, such
    as the place of its dropout mask, differs between them."""
    needs = [_needed(layout, mask, r) for r in range(len(layout.shards))]
    rows = [rows_of(layout, r) for r in range(len(layout.shards))]
    sent = tuple(
        _held(rows[rank], needs[other]) if other != rank else np.zeros(0, np.int64)
        for other in range(len(layout.shards))
    )
    got = [
        rows[other][_held(rows[other], needs[rank])] if other != rank else rows[rank][:0]
        for other in range(len(layout.shards))
    ]
    present = np.concatenate([rows[rank], *got])
    place = np.full(layout.starts[-1], -1, np.int64)
    # A rank's own rows are used as they are; no rank sends it these.
    place[present[::-1]] = np.arange(len(present))[::-1]
    calls = _calls(layout, mask, rank, place, one_by_one)
    most = max(int(need.sum() - need[held].sum()) for need, held in zip(needs, rows, strict=True))
    return Schedule(sent, tuple(map(len, got)), most, calls)


def _calls(layout: Layout, mask: Mask, rank: int, place, one_by_one: bool) -> tuple[Call, ...]:
    """Neighbouring pieces under one window are one call."""
    groups: list[tuple[tuple[int, int], int, list[Piece]]] = []
    row = 0
    for piece in layout.shards[rank]:
        window = _window(mask, piece, layout.lengths[piece.document])
        if groups and groups[-1][0] == window and not one_by_one:
            groups[-1][2].append(piece)
        else:
            groups.append((window, row, [piece]))
        row += len(piece)
    calls = []
    for window, begin, pieces in groups:
        ranges = [mask.keys(piece, layout.lengths[piece.document]) for piece in pieces]
        starts = [layout.starts[piece.document] for piece in pieces]
        keys = [np.arange(s + a, s + b) for s, (a, b) in zip(starts, ranges, strict=True)]
        found = place[np.concatenate(keys)]
        assert (found >= 0).all()
        lengths_q = tuple(map(len, pieces))
        rows = slice(begin, begin + sum(lengths_q))
        lengths_k = tuple(end - first for first, end in ranges)
        firsts = tuple(first for first, _ in ranges)
        calls.append(Call(rows, lengths_q, lengths_k, found, firsts, window, tuple(pieces)))
    return tuple(calls)


def _window(mask: Mask, piece: Piece, length: int) -> tuple[int, int]:
    """The mask as the call of a piece takes it: the last query lies on the last key there, `extra`
    keys further to the right than its own."""
    extra = mask.keys(piece, length)[1] - piece.end
    left = -1 if mask.left is None else mask.left + extra
    right = -1 if mask.right is None else mask.right - extra
    return left, right


def rows_of(layout: Layout, rank: int) -> np.ndarray:
    """The rows of the whole batch that a rank holds, int64, in its order."""
    starts = layout.starts
    spans = [np.arange(p.begin, p.end) + starts[p.document] for p in layout.shards[rank]]
    return np.concatenate(spans) if spans else np.zeros(0, np.int64)


def _needed(layout: Layout, mask: Mask, rank: int) -> np.ndarray:
    """For each row of the whole batch whether a rank's queries see its key."""
    seen = np.zeros(layout.starts[-1], bool)
    for piece in layout.shards[rank]:
        begin, end = mask.keys(piece, layout.lengths[piece.document])
        start = layout.starts[piece.document]
        seen[start + begin : start + end] = True
    return seen


def _held(rows: np.ndarray, needed: np.ndarray) -> np.ndarray:
    """Which of a rank's rows are needed."""
    return np.flatnonzero(needed[rows])


@dataclass(frozen=True)
class Heads:
    """Which heads a rank computes under the strategy "heads": [begin, end) of each kind."""

    queries: tuple[int, int]
    keys: tuple[int, int]


def spread_heads(heads_q: int, heads_k: int, ranks: int) -> tuple[Heads, ...]:
    """The heads of every rank. Fewer KV heads than ranks are replicated.

    Raises ValueError where a rank would get parts of groups that differ in size, or none at all.
    """
    group = heads_q // heads_k
    if heads_k >= ranks:
        cuts = [heads_k * rank // ranks for rank in range(ranks + 1)]
        spans = list(zip(cuts, cuts[1:], strict=False))
        return tuple(Heads((a * group, b * group), (a, b)) for a, b in spans)
    copies = ranks // heads_k
    if ranks % heads_k or group % copies:
        raise ValueError(
            f"strategy 'heads' cannot spread {heads_q} query heads and {heads_k} KV heads over"
            f" {ranks} ranks: take 'gather'"
        )
    part = group // copies
    return tuple(
        Heads((rank * part, (rank + 1) * part), (rank // copies, rank // copies + 1))
        for rank in range(ranks)
    )
