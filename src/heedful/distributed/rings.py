"""The strategy "ring" as a list of steps, made from a layout without processes.

In step s a rank computes with the keys of the rank s before it, counted around: those of its own
in step 0, and in each later step rows that their holder sends it. No rank forwards rows, so that
only rows that are seen travel, and a step depends on no earlier one.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache

from heedful.core.call.spread import Mask, Pair, Piece, pair_of
from heedful.distributed.layouts import Layout
from heedful.distributed.schedules import Places, Rows, batch_rows, runs_of, union


@dataclass(frozen=True)
class Part:
    """Packed sequences that one kernel call takes: rows of this rank, and keys of one rank. rows:
    a slice of this rank's; keys: a slice of those that a step has; lengths_q, lengths_k: of each
    sequence; window: (left, right) as that call takes it; begins: of each sequence with queries its
    document, and there the positions of its first query and its first key. is_own: whether keys are
    those of the queries' own pieces: each row has one such part, its first."""

    rows: slice
    keys: slice
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    window: tuple[int, int]
    begins: tuple[tuple[int, int, int], ...]
    is_own: bool


@dataclass(frozen=True)
class Step:
    """One step of a rank. source, target: the ranks from which it gets rows of keys, and to which
    it sends. count: how many it gets. sent: slices of this rank's rows; received: slices of those
    that it gets, in the order in which the source has them. rounds: the most slices that one rank
    sends in this step, the same on each. parts: what it computes; in step 0 keys are its own rows.
    """

    source: int
    target: int
    count: int
    sent: tuple[slice, ...]
    received: tuple[slice, ...]
    rounds: int
    parts: tuple[Part, ...]


def ring_steps(layout: Layout, mask: Mask, rank: int, one_by_one: bool = False) -> tuple[Step, ...]:
    """The steps of a rank, but for those in which no rank sends anything. one_by_one: a call for
    each pair of pieces, where what a call takes once, such as the place of its dropout mask,
    differs between them."""
    ranks = len(layout.shards)
    steps = []
    for distance in range(ranks):
        source, target = (rank - distance) % ranks, (rank + distance) % ranks
        needed = _needed(layout, mask, rank, source)
        sent = _needed(layout, mask, target, rank) if distance else ()
        every = [_needed(layout, mask, r, (r - distance) % ranks) for r in range(ranks)]
        rounds = max(map(len, every)) if distance else 0
        if distance and not rounds:
            continue
        place = _held(layout, source) if distance == 0 else Places(needed)
        steps.append(
            Step(
                source,
                target,
                count=place.count,
                sent=tuple(map(_held(layout, rank).of, sent)),
                received=tuple(map(place.of, needed)) if distance else (),
                rounds=rounds,
                parts=_parts(layout, mask, rank, source, place, one_by_one),
            )
        )
    return tuple(steps)


@lru_cache(maxsize=256)
def _pairs(layout: Layout, mask: Mask, rank: int, source: int) -> tuple[Pair, ...]:
    """All pairs of pieces of a rank's queries and a source's keys that see each other, in the order
    of the rank's rows, then of the source's. First keys are a pair of their own: those left of a
    row's window."""
    keys: dict[int, list[Piece]] = defaultdict(list)
    for piece in layout.shards[source]:
        keys[piece.document].append(piece)
    found = []
    for queries in layout.shards[rank]:
        for piece in keys[queries.document]:
            found.append(pair_of(queries, piece, mask.left, mask.right))
            if mask.left is not None and piece.begin < mask.first:
                leading = replace(piece, end=min(piece.end, mask.first))
                pair = pair_of(queries, leading, None, -1 - mask.left)
                found.append(pair and replace(pair, is_own=False))
    return tuple(pair for pair in found if pair)


@lru_cache(maxsize=256)
def _held(layout: Layout, rank: int) -> Places:
    return Places(batch_rows(layout, piece) for piece in layout.shards[rank])


@lru_cache(maxsize=8192)
def _needed(layout: Layout, mask: Mask, rank: int, source: int) -> tuple[Rows, ...]:
    """The rows of the batch that a rank gets from another, as runs of the source's rows."""
    pairs = _pairs(layout, mask, rank, source)
    seen = union(batch_rows(layout, pair.keys) for pair in pairs)
    return runs_of([batch_rows(layout, piece) for piece in layout.shards[source]], seen)


def _parts(
    layout: Layout, mask: Mask, rank: int, source: int, place: Places, one_by_one: bool
) -> tuple[Part, ...]:
    """Few calls. Pairs with the same mask are one call if their rows follow one another, and their
    keys, too."""
    held, parts = _held(layout, rank), []
    for pair in _pairs(layout, mask, rank, source):
        q, k = pair.queries, pair.keys
        new = Part(
            rows=held.of(batch_rows(layout, q)),
            keys=place.of(batch_rows(layout, k)),
            lengths_q=(len(q),),
            lengths_k=(len(k),),
            window=pair.window,
            begins=((q.document, q.begin, k.begin),),
            is_own=pair.is_own,
        )
        latest = range(max(0, len(parts) - _OPEN), len(parts)) if not one_by_one else ()
        both = ((index, _joined(parts[index], new)) for index in latest)
        index, part = next((found for found in both if found[1]), (len(parts), new))
        parts[index : index + 1] = [part]
    # The parts with a row's own keys are first: others are merged into what they wrote.
    return tuple(sorted(parts, key=lambda part: not part.is_own))


# How many parts a pair is tried with: documents have two pieces a rank.
_OPEN = 8


def _joined(a: Part, b: Part) -> Part | None:
    """Both as one call, whose last sequence may grow where no key is hidden."""
    if a.window != b.window or a.is_own != b.is_own:
        return None
    if a.window == (-1, -1):
        last_q, last_k = a.lengths_q[-1], a.lengths_k[-1]
        is_wider = b.rows == slice(a.rows.stop - last_q, a.rows.stop)
        if is_wider and b.keys.start == a.keys.stop:
            lengths = *a.lengths_k[:-1], last_k + b.lengths_k[0]
            return replace(a, keys=slice(a.keys.start, b.keys.stop), lengths_k=lengths)
        is_taller = b.keys == slice(a.keys.stop - last_k, a.keys.stop)
        if is_taller and b.rows.start == a.rows.stop:
            lengths = *a.lengths_q[:-1], last_q + b.lengths_q[0]
            return replace(a, rows=slice(a.rows.start, b.rows.stop), lengths_q=lengths)
    gap = b.keys.start - a.keys.stop
    if b.rows.start != a.rows.stop or gap < 0:
        return None
    # A sequence without queries lies between their keys.
    between = (gap,) if gap else ()
    return replace(
        a,
        rows=slice(a.rows.start, b.rows.stop),
        keys=slice(a.keys.start, b.keys.stop),
        lengths_q=(*a.lengths_q, *(0 for _ in between), *b.lengths_q),
        lengths_k=(*a.lengths_k, *between, *b.lengths_k),
        begins=a.begins + b.begins,
    )
