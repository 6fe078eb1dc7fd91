"""Numbers of what each rank sends, receives and computes, made from a layout without processes.

Rows are numbered in the order in which a rank holds them.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice

import numpy as np

from heedful.core.call.spread import BLOCK, Mask, Piece
from heedful.distributed.layouts import Layout


@dataclass(frozen=True)
class Call:
    """Packed sequences that one kernel call takes. is_local: whether its keys are rows that this
    rank holds, else rows of those that it gathers; rows: this rank's rows, a slice; keys: a slice,
    too; lengths_q, lengths_k: of each sequence, whose keys may belong to nobody; pieces, firsts: of
    those with queries what they are, and the position in its document of the first key; window:
    (left, right) or (left, right, first) as that call takes it. First keys that lie apart come at
    the front of a sequence's keys, perhaps with others behind them that its mask hides."""

    is_local: bool
    rows: slice
    keys: slice
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    pieces: tuple[Piece, ...]
    firsts: tuple[int, ...]
    window: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """One rank's part of the strategy "gather". It gathers, in the order of the batch, the rows
    whose keys its calls see, but for local ones, and those that it sends.

    count: how many rows that are. own: (rows of this rank, where they lie among the gathered),
    slices; sent[r], received[r]: slices of the gathered rows that rank r gets, or gives; there[r]:
    the same as slices of what rank r gathers. calls: what it computes, local ones first. The same
    on each rank: rounds, the most slices that one sends to another; most_received, the most rows
    that one gets; counts, of each how many it gathers; fewest, the fewest tiles of local calls that
    one has, and of the others; longest, of the largest call on any rank how large a part of its
    tiles one tile of keys may be; back: how gradients travel.
    """

    count: int
    own: tuple[tuple[slice, slice], ...]
    sent: tuple[tuple[slice, ...], ...]
    received: tuple[tuple[slice, ...], ...]
    there: tuple[tuple[tuple[slice, ...], tuple[slice, ...]], ...]
    calls: tuple[Call, ...]
    rounds: int
    most_received: int
    counts: tuple[int, ...]
    fewest: tuple[int, int]
    longest: float
    back: "Returned"

    @property
    def rows_received(self) -> int:
        """How many rows this rank gets."""
        return sum(run.stop - run.start for runs in self.received for run in runs)


@dataclass(frozen=True)
class Sum:
    """Rows of this rank, and where parts of their gradients are: in rows of its gradients, and in
    those that it receives; is_local: and in what local calls write."""

    rows: slice
    is_local: bool
    own: tuple[slice, ...]
    received: tuple[slice, ...]


@dataclass(frozen=True)
class Returned:
    """How gradients of keys travel. Each call but local ones has rows of its own for those of its
    keys, one call's after another's. places: of each such call; counts: how many rows each rank
    has. sent[r]: slices of these that rank r gets; received[r]: slices of the rows that this rank
    receives, `parts` together; there[r]: the same as slices of what rank r has. sums: of each row
    of this rank one. rounds: the most slices that one sends to another."""

    places: tuple[slice, ...]
    counts: tuple[int, ...]
    parts: int
    sent: tuple[tuple[slice, ...], ...]
    received: tuple[tuple[slice, ...], ...]
    there: tuple[tuple[slice, ...], ...]
    sums: tuple[Sum, ...]
    rounds: int


# Rows of the batch: the first, and the one after the last.
Rows = tuple[int, int]


class Places:
    """Where rows of the batch lie that are held in runs, one run after the other."""

    def __init__(self, runs: Iterable[Rows]):
        held, begin = [], 0
        for start, end in runs:
            held.append((start, begin))
            begin += end - start
        self.count, self._held = begin, sorted(held)
        self._starts = [start for start, _ in self._held]

    def of(self, rows: Rows) -> slice:
        """Rows of one run."""
        start, begin = self._held[bisect_right(self._starts, rows[0]) - 1]
        return slice(begin + rows[0] - start, begin + rows[1] - start)


@dataclass(frozen=True)
class Crossing:
    """The rows that ranks need of each other. local[r], remote[r]: the pieces of rank r that see
    keys of their own piece alone, and the others; seen[r]: the rows whose keys the others see, in
    order; runs[a][b]: the rows that rank a sends to rank b, each one slice of either's rows;
    received[r]: how many rank r gets; needed[r]: the rows that it gathers; fewest: as in a
    Schedule."""

    local: tuple[tuple[Piece, ...], ...]
    remote: tuple[tuple[Piece, ...], ...]
    seen: tuple[tuple[Rows, ...], ...]
    runs: tuple[tuple[tuple[Rows, ...], ...], ...]
    fewest: tuple[int, int]
    received: tuple[int, ...]
    needed: tuple[tuple[Rows, ...], ...]

    @property
    def most_received(self) -> int:
        return max(self.received)

    @property
    def rounds(self) -> int:
        return max(len(runs) for theirs in self.runs for runs in theirs)


@lru_cache(maxsize=8)
def crossing(layout: Layout, mask: Mask) -> Crossing:
    """The rows that ranks need of each other: the same on each."""
    ranks = range(len(layout.shards))
    local, remote = zip(*(_split(layout, mask, rank) for rank in ranks), strict=True)
    seen = tuple(_seen(layout, mask, pieces) for pieces in remote)
    held = [[batch_rows(layout, piece) for piece in shard] for shard in layout.shards]
    runs = tuple(tuple(runs_of(held[a], seen[b]) if a != b else () for b in ranks) for a in ranks)
    return Crossing(
        local,
        remote,
        seen,
        runs,
        fewest=(_fewest(layout, mask, local), _fewest(layout, mask, remote)),
        received=tuple(sum(b - a for theirs in runs for a, b in theirs[rank]) for rank in ranks),
        needed=tuple(union([*seen[r], *(run for sent in runs[r] for run in sent)]) for r in ranks),
    )


def gathered(layout: Layout, mask: Mask, rank: int, one_by_one: bool = False) -> Schedule:
    """The schedule of a rank. one_by_one: a call for each piece, where what a call takes once, such
    as the place of its dropout mask, differs between them."""
    between = crossing(layout, mask)
    sent, ranks, needed = between.runs[rank], range(len(layout.shards)), between.needed[rank]

    def there(other: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        place = Places(between.needed[other])
        return tuple(map(place.of, sent[other])), tuple(map(place.of, between.runs[other][rank]))

    rows = [batch_rows(layout, piece) for piece in layout.shards[rank]]
    place, held = Places(needed), Places(rows)
    local = _calls(layout, mask, between.local[rank], held, held, one_by_one)
    remote = [_remote(layout, mask, r, one_by_one) for r in ranks]
    return Schedule(
        count=place.count,
        own=tuple((held.of(run), place.of(run)) for run in runs_of(rows, needed)),
        sent=tuple(tuple(map(place.of, runs)) for runs in sent),
        received=tuple(tuple(map(place.of, between.runs[other][rank])) for other in ranks),
        there=tuple(map(there, ranks)),
        calls=(*local, *remote[rank]),
        rounds=between.rounds,
        most_received=between.most_received,
        counts=tuple(sum(b - a for a, b in rows) for rows in between.needed),
        fewest=between.fewest,
        longest=max(_longest(layout, mask, theirs) for theirs in remote),
        back=_returned(layout, between.needed, remote, [call.keys for call in local], rank),
    )


def _remote(layout: Layout, mask: Mask, rank: int, one_by_one: bool) -> list[Call]:
    """The calls of a rank with keys that it gathers."""
    between, held = crossing(layout, mask), _held(layout, rank)
    place = Places(between.needed[rank])
    return _calls(layout, mask, between.remote[rank], held, place, one_by_one)


@lru_cache(maxsize=64)
def calls_of(layout: Layout, mask: Mask, rank: int) -> tuple[Call, ...]:
    """The calls of a rank's schedule."""
    held = _held(layout, rank)
    local = _calls(layout, mask, crossing(layout, mask).local[rank], held, held, False)
    return (*local, *_remote(layout, mask, rank, False))


def _longest(layout: Layout, mask: Mask, calls: Sequence[Call]) -> float:
    """How large a part one tile of keys may be of the tiles of the largest call."""
    work = [
        (sum(mask.tiles(p, layout.lengths[p.document]) for p in call.pieces), call)
        for call in calls
    ]
    tiles, call = max(work, key=lambda both: both[0], default=(0, None))
    return max(len(p) for p in call.pieces) / BLOCK / tiles if call and tiles else 0.0


def _held(layout: Layout, rank: int) -> Places:
    return Places([batch_rows(layout, piece) for piece in layout.shards[rank]])


# A part of what a rank's calls find: the rank whose rows they are, these rows, and where they lie
# among the rank's rows of gradients.
_Found = tuple[int, slice, slice]


def _returned(
    layout: Layout,
    needed: Sequence[tuple[Rows, ...]],
    calls: Sequence[Sequence[Call]],
    local: Sequence[slice],
    rank: int,
) -> Returned:
    """needed, calls: of each rank. local: the keys of this rank's local calls."""
    owners = sorted(
        (*batch_rows(layout, piece), r, held.of(batch_rows(layout, piece)).start)
        for r, held in enumerate(_held(layout, r) for r in range(len(layout.shards)))
        for piece in layout.shards[r]
    )
    found = [_found_by(owners, rows, theirs) for rows, theirs in zip(needed, calls, strict=True)]
    ranks = range(len(found))
    moved = [[_moved(found[a], b) if a != b else [] for b in ranks] for a in ranks]
    ends = [sum(call.keys.stop - call.keys.start for call in theirs) for theirs in calls]
    received, begin, taken = [], 0, []
    for r in ranks:
        runs = []
        for run in moved[r][rank]:
            runs.append(slice(begin, begin + run.stop - run.start))
            begin = runs[-1].stop
        received.append(tuple(runs))
        if r != rank:
            first = runs[0].start if runs else 0
            for owner, rows, _ in found[r]:
                if owner == rank:
                    taken.append((rows, slice(first, first + rows.stop - rows.start)))
                    first = taken[-1][1].stop
    own = [(rows, place) for owner, rows, place in found[rank] if owner == rank]
    return Returned(
        places=tuple(_places(call.keys for call in calls[rank])),
        counts=tuple(ends),
        parts=begin,
        sent=tuple(map(tuple, moved[rank])),
        received=tuple(received),
        there=tuple(tuple(moved[r][rank]) for r in ranks),
        sums=_sums(layout.tokens(rank), local, own, taken),
        rounds=max(len(runs) for theirs in moved for runs in theirs),
    )


def _places(runs: Iterable[slice]) -> list[slice]:
    """Slices as long as these, one after the other."""
    ends = [0, *accumulate(run.stop - run.start for run in runs)]
    return [slice(*both) for both in zip(ends, ends[1:], strict=False)]


def _found_by(owners: Sequence[tuple], needed: Sequence[Rows], calls: Sequence[Call]) -> list:
    """All that a rank's calls find, in the order of its gradients. owners: (begin, end, rank, its
    row) of rows of the batch, in order."""
    found: list[_Found] = []
    starts = [begin for begin, *_ in owners]
    gathered = [*zip(needed, _places(slice(*run) for run in needed), strict=True)]
    for call, place in zip(calls, _places(call.keys for call in calls), strict=True):
        for (begin, _), held in gathered:
            low, high = max(held.start, call.keys.start), min(held.stop, call.keys.stop)
            row, end = begin + low - held.start, begin + high - held.start
            while row < end:
                _, stop, owner, first = owners[index := bisect_right(starts, row) - 1]
                stop, first = min(stop, end), first + row - starts[index]
                to = place.start + low - call.keys.start
                rows = slice(first, first + stop - row), slice(to, to + stop - row)
                if found and _follow(found[-1], (owner, *rows)):
                    rows = (
                        slice(found[-1][1].start, rows[0].stop),
                        slice(found.pop()[2].start, rows[1].stop),
                    )
                found.append((owner, *rows))
                low, row = low + stop - row, stop
    return found


def _follow(a: _Found, b: _Found) -> bool:
    return a[0] == b[0] and a[1].stop == b[1].start and a[2].stop == b[2].start


def _moved(found: Sequence[_Found], rank: int) -> list[slice]:
    """The rows of gradients that a rank gets, as few slices."""
    moved: list[slice] = []
    for owner, _, place in found:
        if owner == rank:
            if moved and moved[-1].stop == place.start:
                place = slice(moved.pop().start, place.stop)
            moved.append(place)
    return moved


def _sums(count: int, local: Sequence[slice], own: Sequence, taken: Sequence) -> tuple[Sum, ...]:
    """own, taken: (rows, where they are)."""
    runs = [*local, *(rows for rows, _ in (*own, *taken))]
    cuts = sorted({0, count, *(run.start for run in runs), *(run.stop for run in runs)})

    def within(parts: Sequence, begin: int, end: int) -> tuple[slice, ...]:
        return tuple(
            slice(place.start + begin - rows.start, place.start + end - rows.start)
            for rows, place in parts
            if rows.start <= begin and end <= rows.stop
        )

    return tuple(
        Sum(
            slice(begin, end),
            any(run.start <= begin and end <= run.stop for run in local),
            within(own, begin, end),
            within(taken, begin, end),
        )
        for begin, end in zip(cuts, cuts[1:], strict=False)
    )


def batch_rows(layout: Layout, piece: Piece) -> Rows:
    """The rows of the batch that are a piece."""
    start = layout.starts[piece.document]
    return start + piece.begin, start + piece.end


def _fewest(layout: Layout, mask: Mask, pieces: Sequence[Sequence[Piece]]) -> int:
    """The fewest tiles of any rank. pieces: of each."""
    lengths = layout.lengths
    return min(sum(mask.tiles(piece, lengths[piece.document]) for piece in p) for p in pieces)


def union(runs: Iterable[Rows]) -> tuple[Rows, ...]:
    """All rows of the runs, in order, as few runs."""
    found: list[Rows] = []
    for begin, end in sorted(runs):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif begin < end:
            found.append((begin, end))
    return tuple(found)


def runs_of(held: Sequence[Rows], taken: tuple[Rows, ...]) -> tuple[Rows, ...]:
    """The taken ones of the rows that a rank holds, as runs that follow one another both in the
    batch and on the rank."""
    found: list[Rows] = []
    before = None
    for start, stop in held:
        index = max(0, bisect_right(taken, (start, start)) - 1)
        for begin, end in islice(taken, index, None):
            begin, end = max(begin, start), min(end, stop)
            if begin < end and begin == before:
                found[-1] = found[-1][0], end
            elif begin < end:
                found.append((begin, end))
            if end == stop:
                break
        # The next piece goes on with this run if both have its border.
        before = stop if found and found[-1][1] == stop else None
    return tuple(found)


def _split(layout: Layout, mask: Mask, rank: int) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
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
    return tuple(local), tuple(remote)


def _inner(mask: Mask, piece: Piece, length: int) -> tuple[int, int]:
    """[begin, end) of the rows of a piece that see no keys outside of it, cut at tiles."""
    begin, end = piece.begin, piece.end
    if begin > 0:
        if mask.left is None or mask.first:
            begin = end
        else:
            first = -(-begin // mask.unit) * mask.unit
            begin = first + -(-mask.left // BLOCK) * BLOCK
    if end < length:
        end = begin if mask.right is None else end - -(-mask.right // BLOCK) * BLOCK
    return begin, end


def _calls(
    layout: Layout, mask: Mask, pieces: Sequence[Piece], held: Places, place: Places, one_by_one
) -> list[Call]:
    """Pieces whose rows follow one another, and whose keys come one after the other, are one call:
    sequences without queries lie between their keys."""
    calls: list[Call] = []
    for piece in pieces:
        length, start = layout.lengths[piece.document], layout.starts[piece.document]
        first, end = mask.keys(piece, length)
        keys = place.of((start + first, start + end))
        if mask.leading(piece, length):
            first, keys = 0, slice(place.of((start, start + 1)).start, keys.stop)
        call = Call(
            is_local=place is held,
            rows=held.of(batch_rows(layout, piece)),
            keys=keys,
            lengths_q=(len(piece),),
            lengths_k=(keys.stop - keys.start,),
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


def _window(mask: Mask, piece: Piece, length: int) -> tuple[int, ...]:
    """The mask as the call of a piece takes it: the last query lies on the last key there, `extra`
    keys further to the right than its own."""
    extra = mask.keys(piece, length)[1] - piece.end
    left = -1 if mask.left is None else mask.left + extra
    right = -1 if mask.right is None else mask.right - extra
    return (left, right, mask.first) if mask.first else (left, right)


def _seen(layout: Layout, mask: Mask, pieces: Sequence[Piece]) -> tuple[Rows, ...]:
    """The rows of the batch whose keys queries of these pieces see."""
    found = []
    for piece in pieces:
        start, length = layout.starts[piece.document], layout.lengths[piece.document]
        begin, end = mask.keys(piece, length)
        found += [(start, start + mask.leading(piece, length)), (start + begin, start + end)]
    return union(found)


def places_of(layout: Layout, rank: int) -> tuple[tuple[slice, slice], ...]:
    """Where a rank's rows lie in the batch: (its rows, those of the batch), as few slices."""
    pieces = [batch_rows(layout, piece) for piece in layout.shards[rank]]
    held = Places(pieces)
    return tuple((held.of(run), slice(*run)) for run in runs_of(pieces, union(pieces)))


def rows_of(layout: Layout, rank: int) -> np.ndarray:
    """The rows of the whole batch that a rank holds, int64, in its order."""
    starts = layout.starts
    spans = [np.arange(p.begin, p.end) + starts[p.document] for p in layout.shards[rank]]
    return np.concatenate(spans) if spans else np.zeros(0, np.int64)
