"""Which tokens of which document each rank holds.

A document is cut only at multiples of BLOCK tokens from its start: a kernel's tile then holds rows
of one piece, and a piece's keys begin at a tile of the whole document.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from heedful.core.call.spread import BLOCK, CAUSAL, Mask, Piece

# The most documents that `documents` may cut: with more, short pieces cost more tiles than balance
# saves.
_MOST_CUT = 64


@dataclass(frozen=True)
class Layout:
    """lengths: tokens of each document; shards: the pieces of each rank, in the order of its
    rows (`_in_order`)."""

    lengths: tuple[int, ...]
    shards: tuple[tuple[Piece, ...], ...]

    def tokens(self, rank: int) -> int:
        """How many rows a rank holds."""
        return sum(map(len, self.shards[rank]))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The row of each document's first token in the whole batch, and the number of rows."""
        return (0, *accumulate(self.lengths))

    def tiles(self, mask: Mask) -> tuple[int, ...]:
        """The tiles that each rank computes."""
        return tuple(
            sum(mask.tiles(piece, self.lengths[piece.document]) for piece in shard)
            for shard in self.shards
        )

    def balance(self, mask: Mask) -> float:
        """The tiles of the uncut batch, divided by the number of ranks and by the tiles of the
        busiest rank: 1 if the work is even and cuts cost no tiles."""
        whole = sum(mask.tiles(Piece(d, 0, n), n) for d, n in enumerate(self.lengths))
        busiest = max(self.tiles(mask))
        return whole / (len(self.shards) * busiest) if busiest else 1.0


def zigzag(lengths: Sequence[int], ranks: int, mask: Mask = CAUSAL) -> Layout:
    """Every document in 2 * ranks chunks; rank r holds the chunks r and 2 * ranks - 1 - r, which
    see as many keys together as those of any other rank under a causal mask."""
    shards: list[list[Piece]] = [[] for _ in range(ranks)]
    for document, length in enumerate(lengths):
        for rank, pieces in enumerate(_zigzag(document, length, ranks)):
            shards[rank] += pieces
    return _in_order(lengths, shards)


def contiguous(lengths: Sequence[int], ranks: int, mask: Mask = CAUSAL) -> Layout:
    """Rank r holds the r-th part of the batch's tokens, in order. This suits windows, and layers
    with a state that runs along the sequence."""
    starts = (0, *accumulate(lengths))
    shards: list[list[Piece]] = [[] for _ in range(ranks)]
    cuts = [_cut(starts, starts[-1] * rank // ranks) for rank in range(ranks)] + [starts[-1]]
    for document, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        for rank in range(ranks):
            begin, stop = max(start, cuts[rank]), min(end, cuts[rank + 1])
            if begin < stop:
                shards[rank].append(Piece(document, begin - start, stop - start))
    return Layout(tuple(lengths), tuple(map(tuple, shards)))


def documents(lengths: Sequence[int], ranks: int, mask: Mask = CAUSAL) -> Layout:
    """Cuts the longest documents into zigzag chunks and keeps the others whole. Whole documents
    with most tiles are placed first, each on the rank with the least work. The number of cut
    documents is the one with which the busiest rank has least work."""
    tiles = [mask.tiles(Piece(d, 0, length), length) for d, length in enumerate(lengths)]
    order = sorted(range(len(lengths)), key=lambda d: (-tiles[d], d))
    load = [0] * ranks
    best: tuple[int, int] | None = None
    for cut in range(min(len(order), _MOST_CUT) + 1):
        busiest = max(_placed(load, order[cut:], tiles)[0])
        if best is None or busiest < best[0]:
            best = busiest, cut
        if cut == len(order):
            break
        chunks = _zigzag(order[cut], lengths[order[cut]], ranks)
        for rank, pieces in enumerate(chunks):
            load[rank] += sum(mask.tiles(piece, lengths[piece.document]) for piece in pieces)
    assert best is not None
    return _cut_longest(lengths, ranks, mask, order, tiles, best[1])


def _cut_longest(lengths, ranks, mask, order, tiles, cut: int) -> Layout:
    shards: list[list[Piece]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for document in order[:cut]:
        for rank, pieces in enumerate(_zigzag(document, lengths[document], ranks)):
            shards[rank] += pieces
            load[rank] += sum(mask.tiles(piece, lengths[document]) for piece in pieces)
    for document, rank in _placed(load, order[cut:], tiles)[1].items():
        if lengths[document]:
            shards[rank].append(Piece(document, 0, lengths[document]))
    return _in_order(lengths, shards)


def _in_order(lengths: Sequence[int], shards: Sequence[Sequence[Piece]]) -> Layout:
    """Whole documents come first, since they need no other rank's keys, then the later chunks of
    cut ones, which see most keys, then the earlier: few kernel calls take neighbouring rows, and
    short work tiles come last. Documents of equal lengths stay in the order of the batch, so that
    they are rows of a batch on each rank, too."""
    is_batch = len(lengths) > 1 and len(set(lengths)) == 1

    def place(piece: Piece, last: int) -> tuple[int, int, int]:
        length = lengths[piece.document]
        kind = 0 if is_batch or len(piece) == length else 1 if piece.begin == last else 2
        return kind, piece.document, piece.begin

    ordered = []
    for shard in shards:
        last = {piece.document: piece.begin for piece in sorted(shard, key=lambda p: p.begin)}
        ordered.append(tuple(sorted(shard, key=lambda p: place(p, last[p.document]))))
    return Layout(tuple(lengths), tuple(ordered))


def _placed(load, documents, tiles) -> tuple[list[int], dict[int, int]]:
    """The load of each rank, and the rank of each of these documents."""
    load, placed = list(load), {}
    for document in documents:
        rank = min(range(len(load)), key=lambda r: (load[r], r))
        load[rank] += tiles[document]
        placed[document] = rank
    return load, placed


def _zigzag(document: int, length: int, ranks: int) -> list[list[Piece]]:
    blocks, chunks = -(-length // BLOCK), 2 * ranks
    cuts = [min(length, blocks * chunk // chunks * BLOCK) for chunk in range(chunks + 1)]
    cuts[-1] = length
    pieces = [Piece(document, *cut) for cut in zip(cuts, cuts[1:], strict=False)]
    both = ((pieces[rank], pieces[chunks - 1 - rank]) for rank in range(ranks))
    return [_joined([piece for piece in pair if len(piece)]) for pair in both]


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Joins two pieces if the second begins where the first ends."""
    if len(pieces) == 2 and pieces[0].end == pieces[1].begin:
        return [Piece(pieces[0].document, pieces[0].begin, pieces[1].end)]
    return pieces


def _cut(starts: Sequence[int], row: int) -> int:
    """The nearest row at which the document of this row may be cut."""
    document = max(d for d, start in enumerate(starts[:-1]) if start <= row)
    start, end = starts[document], starts[document + 1]
    return min(end, start + (row - start + BLOCK // 2) // BLOCK * BLOCK)


LAYOUTS: dict[str, Callable[[Sequence[int], int, Mask], Layout]] = {
    "zigzag": zigzag,
    "contiguous": contiguous,
    "documents": documents,
}
