"""The strategy "ring" as a list of steps of a program that all devices run: made from a layout,
without devices. Which pairs of chunks see each other is decided as for processes
(`core.call.spread`).
"""

from functools import lru_cache
from typing import NamedTuple

from heedful.core.call.spread import Mask, Pair, Piece, pair_of
from heedful.jax.distributed.calls import FULL, LEADING, MASKED, OWN

# Keys that are sent begin at multiples of so many: kernels draw words of dropout by four.
_WORDS = 4


class Turn(NamedTuple):
    """One call of each device. queries: by device which one of its chunks; rows: [begin, end) of
    these in the chunk; keys: by device which one of the source's chunks. A device without work has
    a pair there of which the mask hides all. kind: as `calls.arguments` has it."""

    queries: tuple[int, ...]
    rows: tuple[int, int]
    keys: tuple[int, ...]
    kind: str


class Step(NamedTuple):
    """Each device has the keys of the one so many places before it, counted around: rows [begin,
    end) of each of its chunks."""

    distance: int
    rows: tuple[int, int]
    turns: tuple[Turn, ...]


# Chunks of queries and of keys, by their indices, and what they see of each other.
_Found = tuple[int, int, Pair]


@lru_cache(maxsize=64)
def steps(
    chunks: tuple[tuple[int, ...], ...], each: int, mask: Mask, is_packed: bool
) -> tuple[Step, ...]:
    """The steps in which any device has work. chunks: of each device, each of `each` tokens of the
    batch; is_packed: it holds several documents, of which lengths are not known here."""
    devices, made = len(chunks), []
    for distance in range(devices):
        both = [
            _pairs(chunks[d], chunks[(d - distance) % devices], each, mask, is_packed)
            for d in range(devices)
        ]
        near, leading = [pairs for pairs, _ in both], [pairs for _, pairs in both]
        turns = []
        if distance == 0:
            same = [[pair for pair in theirs if pair[2].is_own] for theirs in near]
            turns += _turns(same, near, each, OWN)
            near = [[pair for pair in theirs if not pair[2].is_own] for theirs in near]
        turns += _turns(near, near, each, MASKED) + _turns(leading, leading, each, LEADING)
        if turns:
            made.append(Step(distance, _sent(near, leading, each, distance), tuple(turns)))
    return tuple(made)


def _pairs(
    mine: tuple[int, ...], theirs: tuple[int, ...], each: int, mask: Mask, is_packed: bool
) -> tuple[list[_Found], list[_Found]]:
    """The pairs of one device and a source that see each other, and those of first keys."""
    near, leading = [], []
    for i, query in enumerate(mine):
        queries = Piece(0, query * each, (query + 1) * each)
        for j, key in enumerate(theirs):
            keys = Piece(0, key * each, (key + 1) * each)
            pair = pair_of(queries, keys, mask.left, mask.right)
            near += [(i, j, pair)] if pair else []
            if mask.left is None or not mask.first:
                continue
            # A document may begin anywhere.
            end = keys.end if is_packed else min(keys.end, mask.first)
            pair = pair_of(queries, Piece(0, keys.begin, end), None, -1 - mask.left)
            leading += [(i, j, pair)] if pair else []
    return near, leading


def _turns(work: list[list[_Found]], seen: list[list[_Found]], each: int, kind: str) -> list[Turn]:
    """The n-th pairs of all devices are one turn. work: by device; seen: all that see each other.
    A device with less work than another has a pair that it does not see."""
    turns = []
    for n in range(max(map(len, work))):
        pairs, begins, ends = [], [], []
        whole = kind == MASKED and all(len(theirs) > n for theirs in work)
        for theirs, sees in zip(work, seen, strict=True):
            if n < len(theirs):
                i, j, pair = theirs[n]
                begins.append(pair.queries.begin % each)
                ends.append((pair.queries.end - 1) % each + 1)
                whole = whole and pair.window == (-1, -1)
                pairs.append((i, j))
            else:
                pairs.append(_hidden(sees, work))
        rows = min(begins), max(ends)
        queries, keys = zip(*pairs, strict=True)
        turns.append(Turn(queries, rows, keys, FULL if whole and rows == (0, each) else kind))
    return turns


def _hidden(sees: list[_Found], work: list[list[_Found]]) -> tuple[int, int]:
    """Indices of chunks that do not see each other."""
    taken = {(i, j) for i, j, _ in sees}
    every = {(i, j) for theirs in work for i, j, _ in theirs}
    return min(every - taken)


def _sent(near, leading, each: int, distance: int) -> tuple[int, int]:
    """The rows of a chunk of keys that any device wants."""
    wanted = [pair.keys for theirs in (*near, *leading) for _, _, pair in theirs]
    if distance == 0 or not wanted:
        return 0, each
    begin = min(keys.begin % each for keys in wanted) // _WORDS * _WORDS
    return begin, max((keys.end - 1) % each + 1 for keys in wanted)
