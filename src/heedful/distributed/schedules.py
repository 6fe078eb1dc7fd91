"""Numbers of what each rank sends, receives and computes, made from a layout without processes.

Rows are numbered in the order in which a rank holds them.
"""

from dataclasses import dataclass

import numpy as np

from heedful.distributed.layouts import BLOCK, Layout, Mask, Piece


@dataclass(frozen=True)
class Call:
    """Packed sequences that one kernel call takes. is_local: whether its keys are rows that this
    rank holds, else rows of those that it gathers; rows: this rank's rows, a slice; keys: a slice,
    too; lengths_q, lengths_k: of each sequence, whose keys may belong to nobody; pieces, firsts: of
    those with queries what they are, and the position in its document of the first key; window:
    (left, right) as that call takes it."""

    is_local: bool
    rows: slice
    keys: slice
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    pieces: tuple[Piece, ...]
    firsts: tuple[int, ...]
    window: tuple[int, int]


@dataclass(frozen=True)
class Schedule:
    """One rank's part of the strategy "gather". It gathers, in the order of the batch, the rows
    whose keys its calls see, but for local ones, and those that it sends.

    count: how many rows that are. own: (rows of this rank, where they lie among the gathered),
    slices; sent[r], received[r]: slices of the gathered rows that rank r gets, or gives. calls:
    what it computes, local ones first. The same on each rank: rounds, the most slices that one
    sends to another; most_received, the most rows that one gets; fewest, the fewest tiles of local
    calls that one has, and of the others.
    """

    count: int
    own: tuple[tuple[slice, slice], ...]
    sent: tuple[tuple[slice, ...], ...]
    received: tuple[tuple[slice, ...], ...]
    calls: tuple[Call, ...]
    rounds: int
    most_received: int
    fewest: tuple[int, int]

    @property
    def rows_received(self) -> int:
        """How many rows this rank gets."""
        return sum(run.stop - run.start for runs in self.received for run in runs)


def gathered(layout: Layout, mask: Mask, rank: int, one_by_one: bool = False) -> Schedule:
    """The schedule of a rank. one_by_one: a call for each piece, where what a call takes once, such
    as the place of its dropout mask, differs between them."""
    ranks = range(len(layout.shards))
    pieces = [_split(layout, mask, r) for r in ranks]
    rows = [rows_of(layout, r) for r in ranks]
    seen = [_seen(layout, mask, remote) for _, remote in pieces]
    crossing = [[_runs_of(rows[a], seen[b]) if a != b else [] for b in ranks] for a in ranks]
    needed = seen[rank].copy()
    for run in (run for runs in crossing[rank] for run in runs):
        needed[run.start : run.stop] = True
    place = np.cumsum(needed) - 1
    held = np.full(layout.starts[-1], -1, np.int64)
    held[rows[rank]] = np.arange(len(rows[rank]))
    own = _runs_of(rows[rank], needed)
    local, remote = pieces[rank]
    return Schedule(
        count=int(needed.sum()),
        own=tuple((_at(held, run), _at(place, run)) for run in own),
        sent=tuple(tuple(_at(place, run) for run in crossing[rank][r]) for r in ranks),
        received=tuple(tuple(_at(place, run) for run in crossing[r][rank]) for r in ranks),
        calls=(
            *_calls(layout, mask, local, held, held, True, one_by_one),
            *_calls(layout, mask, remote, held, place, False, one_by_one),
        ),
        rounds=max(len(runs) for theirs in crossing for runs in theirs),
        most_received=max(sum(len(run) for a in ranks for run in crossing[a][r]) for r in ranks),
        fewest=(
            _fewest(layout, mask, [a for a, _ in pieces]),
            _fewest(layout, mask, [b for _, b in pieces]),
        ),
    )


def _fewest(layout: Layout, mask: Mask, pieces: list[list[Piece]]) -> int:
    """The fewest tiles of any rank. pieces: of each."""
    lengths = layout.lengths
    return min(sum(mask.tiles(piece, lengths[piece.document]) for piece in p) for p in pieces)


def _at(place: np.ndarray, run: range) -> slice:
    """Where a run of rows of the batch lies."""
    first = int(place[run.start])
    return slice(first, first + len(run))


def _runs_of(rows: np.ndarray, is_taken: np.ndarray) -> list[range]:
    """The taken ones of the rows of the batch that a rank holds, as runs that follow one another
    both in the batch and on the rank."""
    held = np.flatnonzero(is_taken[rows])
    taken = rows[held]
    ends = np.flatnonzero((np.diff(taken) != 1) | (np.diff(held) != 1)) + 1
    parts = np.split(taken, ends) if len(taken) else []
    return [range(int(part[0]), int(part[-1]) + 1) for part in parts]


def _split(layout: Layout, mask: Mask, rank: int) -> tuple[list[Piece], list[Piece]]:
    """A rank's pieces, cut into those that see keys of their own piece alone, and the others."""
    local, remote = [], []
    for piece in layout.shards[rank]:
        begin, end = _inner(mask, piece, layout.lengths[piece.document])
        if begin < end:
            local.append(Piece(piece.document, begin, end))
            cuts = (piece.begin, begin), (end, piece.end)
        else:
            cuts = ((piece.begin, piece.end),)
        remote += [Piece(piece.document, a, b) for a, b in cuts if a < b]
    return local, remote


def _inner(mask: Mask, piece: Piece, length: int) -> tuple[int, int]:
    """[begin, end) of the rows of a piece that see no keys outside of it, cut at tiles."""
    begin, end = piece.begin, piece.end
    if begin > 0:
        begin = end if mask.left is None else begin + -(-mask.left // BLOCK) * BLOCK
    if end < length:
        end = begin if mask.right is None else end - -(-mask.right // BLOCK) * BLOCK
    return begin, end


def _calls(
    layout: Layout, mask: Mask, pieces: list[Piece], held, place, is_local: bool, one_by_one: bool
) -> list[Call]:
    """Pieces whose rows follow one another, and whose keys come one after the other, are one call:
    sequences without queries lie between their keys."""
    calls: list[Call] = []
    for piece in pieces:
        length, start = layout.lengths[piece.document], layout.starts[piece.document]
        first, end = mask.keys(piece, length)
        call = Call(
            is_local=is_local,
            rows=_at(held, range(start + piece.begin, start + piece.end)),
            keys=_at(place, range(start + first, start + end)),
            lengths_q=(len(piece),),
            lengths_k=(end - first,),
            pieces=(piece,),
            firsts=(first,),
            window=_window(mask, piece, length),
        )
        joined = _joined(calls[-1], call) if calls and not one_by_one else None
        calls[-1 if joined else len(calls) :] = [joined or call]
    return calls


def _joined(a: Call, b: Call) -> Call | None:
    gap = b.keys.start - a.keys.stop
    if a.window != b.window or a.rows.stop != b.rows.start or gap < 0:
        return None
    between = (gap,) if gap else ()
    return Call(
        is_local=a.is_local,
        rows=slice(a.rows.start, b.rows.stop),
        keys=slice(a.keys.start, b.keys.stop),
        lengths_q=(*a.lengths_q, *(0 for _ in between), *b.lengths_q),
        lengths_k=(*a.lengths_k, *between, *b.lengths_k),
        pieces=a.pieces + b.pieces,
        firsts=a.firsts + b.firsts,
        window=a.window,
    )


def _window(mask: Mask, piece: Piece, length: int) -> tuple[int, int]:
    """The mask as the call of a piece takes it: the last query lies on the last key there, `extra`
    keys further to the right than its own."""
    extra = mask.keys(piece, length)[1] - piece.end
    left = -1 if mask.left is None else mask.left + extra
    right = -1 if mask.right is None else mask.right - extra
    return left, right


def _seen(layout: Layout, mask: Mask, pieces: list[Piece]) -> np.ndarray:
    """For each row of the whole batch whether queries of these pieces see its key."""
    seen = np.zeros(layout.starts[-1], bool)
    for piece in pieces:
        begin, end = mask.keys(piece, layout.lengths[piece.document])
        start = layout.starts[piece.document]
        seen[start + begin : start + end] = True
    return seen


def rows_of(layout: Layout, rank: int) -> np.ndarray:
    """The rows of the whole batch that a rank holds, int64, in its order."""
    starts = layout.starts
    spans = [np.arange(p.begin, p.end) + starts[p.document] for p in layout.shards[rank]]
    return np.concatenate(spans) if spans else np.zeros(0, np.int64)


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
