"""A batch that is spread over devices: tokens of its documents, which of them see each other, and
which heads a device computes. Arithmetic, for every framework.
"""

from dataclasses import dataclass

# Rows and keys of a kernel's tile, which is also the unit of work.
BLOCK = 128


@dataclass(frozen=True)
class Piece:
    """Tokens [begin, end) of a document."""

    document: int
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Mask:
    """Which keys of its document a query at position i sees: those from i - left to i + right; None
    means no bound. Left of it the `first` keys of the document stay visible. unit: calls get keys
    from a multiple of it on, at a window's left end too, hidden ones among them."""

    left: int | None = None
    right: int | None = 0
    first: int = 0
    unit: int = 1

    def keys(self, piece: Piece, length: int) -> tuple[int, int]:
        """[begin, end) of the keys that a piece of a document of this length sees, but for those of
        `leading`."""
        begin = 0 if self.left is None else max(0, piece.begin - self.left)
        begin -= begin % self.unit
        end = length if self.right is None else min(length, piece.end + self.right)
        return 0 if begin <= self.first else begin, end

    def leading(self, piece: Piece, length: int) -> int:
        """How many of the first keys it sees that lie apart from `keys`."""
        return self.first if self.keys(piece, length)[0] else 0

    def tiles(self, piece: Piece, length: int) -> int:
        """How many tiles of BLOCK rows and BLOCK keys a piece's attention computes."""
        count = 0
        for begin in range(piece.begin, piece.end, BLOCK):
            rows = Piece(piece.document, begin, min(begin + BLOCK, piece.end))
            first, end = self.keys(rows, length)
            count += -(-end // BLOCK) - first // BLOCK + -(-self.leading(rows, length) // BLOCK)
        return count


CAUSAL = Mask()


@dataclass(frozen=True)
class Pair:
    """Queries of one document, and keys of which each is seen, and each sees one; window: the mask
    as a call of these has it, -1 where a bound hides none of these keys."""

    queries: Piece
    keys: Piece
    window: tuple[int, int]
    is_own: bool


def pair_of(queries: Piece, keys: Piece, left: int | None, right: int | None) -> Pair | None:
    """Both without rows that see no key, and keys that no row sees. left, right: as in a
    Mask; right may be below 0."""
    begin, end, first, last = queries.begin, queries.end, keys.begin, keys.end
    if right is not None:
        begin = max(begin, first - right)
        last = min(last, end + right)
    if left is not None:
        end = min(end, keys.end + left)
        first = max(first, begin - left)
    if begin >= end or first >= last:
        return None
    # In the call the last query lies on the last key there, so many keys to the left of its own.
    extra = end - last
    window = (
        -1 if left is None or end - 1 - left <= first else left - extra,
        -1 if right is None or begin + right >= last - 1 else right + extra,
    )
    pieces = Piece(queries.document, begin, end), Piece(queries.document, first, last)
    return Pair(*pieces, window, queries == keys)


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
