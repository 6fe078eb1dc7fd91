"""Draws the picture of docs/masks.md, one square for each kind of mask, for light and for dark
pages: `make docs`.

A mask is drawn from its definition, a function of a query i and a key j. That the call of its name
shows the same is a test (tests/cpu/masks/test_pictures.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from draw_speed import COLOURS, Colours

SIDE = 32  # of the tiles of block masks
SQUARE, PITCH, ROOM = 126, 160, 178  # sizes of a mask, and from one to the next
LEFT, TOP, COLUMNS = 14, 50, 5

DOCUMENTS = (0, 7, 11, 24)  # where documents begin, and the end of the last
PARENTS = (-1, 0, 0, 1, 1, 2, 4, 4)  # of each token of a draft
ANSWERS = (6, 15, 24)  # where the answers to one question begin, and the end
IMAGE = (8, 12)  # rows and columns of an image's patches, in this order
LISTS = ((0,), (0, 1), (0, 2), (2, 3, 0), (0, 4, 1), (5, 4, 0))  # tiles of keys by those of queries


@dataclass(frozen=True)
class Kind:
    """name, words: above its square. sees(i, j): whether query i sees key j. tiled: whether tiles
    are drawn, those that any query of a tile sees in a faint colour."""

    name: str
    words: str
    sees: Callable[[int, int], bool]
    queries: int = 24
    keys: int = 24
    tiled: bool = False


def _document(place: int) -> int:
    return sum(place >= begin for begin in DOCUMENTS)


def _answer(place: int) -> int:
    return sum(place >= begin for begin in ANSWERS)


def _is_draft(i: int, j: int) -> bool:
    """Whether token j of a draft is token i, or one that it follows."""
    while i > j:
        i = PARENTS[i]
    return i == j


def _is_near(i: int, j: int) -> bool:
    """Whether patch j of an image lies within one row and two columns of patch i."""
    (row, column), (other_row, other) = divmod(i, IMAGE[1]), divmod(j, IMAGE[1])
    return abs(row - other_row) <= 1 and abs(column - other) <= 2


KINDS = (
    Kind("causal", "causal=True", lambda i, j: j <= i),
    Kind("window", "window_size=(5, 0)", lambda i, j: i - 5 <= j <= i),
    Kind(
        "documents",
        "masks.documents, causal",
        lambda i, j: _document(i) == _document(j) and j <= i,
    ),
    Kind("prefix", "masks.prefix", lambda i, j: j < 8 or j <= i),
    Kind("chunks", "masks.chunks", lambda i, j: i // 6 == j // 6 and j <= i),
    Kind("padding", "masks.padding, causal", lambda i, j: 5 <= j <= i),
    Kind("local and global", "masks.local_global", lambda i, j: (i - 4 <= j or j < 3) and j <= i),
    Kind(
        "shared question",
        "masks.from_flashmask",
        lambda i, j: (_answer(j) in (0, _answer(i))) and j <= i,
    ),
    Kind("neighbours of a patch", "BlockMask.of", _is_near, 96, 96, tiled=True),
    Kind(
        "lists of tiles",
        "BlockMask.of_lists",
        lambda i, j: j // SIDE in LISTS[i // SIDE],
        192,
        192,
        tiled=True,
    ),
    Kind(
        "tree of a draft",
        "tree_mask",
        lambda i, j: j < 16 or _is_draft(i, j - 16),
        queries=8,
    ),
)


def _runs(sees: Callable[[int, int], bool], rows: int, columns: int) -> Iterator[tuple[int, ...]]:
    """Rectangles (column, row, width, height) that cover what is seen: runs of a row, of equal rows
    together."""
    first, last = 0, [sees(0, j) for j in range(columns)]
    for i in range(1, rows + 1):
        row = [sees(i, j) for j in range(columns)] if i < rows else None
        if row == last:
            continue
        begin = 0
        for j in range(1, columns + 1):
            if j < columns and last[j] == last[begin]:
                continue
            if last[begin]:
                yield begin, first, j - begin, i - first
            begin = j
        if row is not None:
            first, last = i, row


def _area(rectangles: Iterator[tuple[int, ...]], colour: str) -> str:
    path = "".join(f"M{x} {y}h{w}v{h}h-{w}z" for x, y, w, h in rectangles)
    return f'<path fill="{colour}" d="{path}"/>'


def _words(x: float, y: float, words: str, colour: str, size: int, more: str = "") -> str:
    place = f'x="{x:g}" y="{y:g}" font-size="{size}"'
    return f'<text {place} fill="{colour}"{more}>{escape(words)}</text>'


def _square(kind: Kind, x: float, y: float, colours: Colours) -> Iterator[str]:
    yield _words(x, y - 20, kind.name, colours.text, 12, ' font-weight="600"')
    yield _words(x, y - 6, kind.words, colours.faint, 11)
    scale = SQUARE / kind.keys
    yield f'<g transform="translate({x:g} {y:g}) scale({scale:g})" shape-rendering="crispEdges">'
    if kind.tiled:
        sees, side = kind.sees, range(SIDE)

        def is_listed(m: int, n: int) -> bool:
            return any(sees(m * SIDE + i, n * SIDE + j) for i in side for j in side)

        tiles = _runs(is_listed, kind.queries // SIDE, kind.keys // SIDE)
        yield _area((tuple(n * SIDE for n in tile) for tile in tiles), colours.bars[2])
    yield _area(_runs(kind.sees, kind.queries, kind.keys), colours.bars[0])
    lines = f"M0 0h{kind.keys}v{kind.queries}h-{kind.keys}z"
    if kind.tiled:
        for place in range(SIDE, kind.keys, SIDE):
            lines += f"M{place} 0v{kind.queries}M0 {place}h{kind.keys}"
    stroke = f'stroke="{colours.faint}" stroke-width="{0.7 / scale:.2g}"'
    yield f'<path fill="none" {stroke} d="{lines}"/></g>'


def picture(colours: Colours) -> str:
    """The SVG file."""
    rows = -(-len(KINDS) // COLUMNS)
    width, height = LEFT + COLUMNS * PITCH, TOP + rows * ROOM
    label = "What queries see of the keys, by kind of mask: " + ", ".join(k.name for k in KINDS)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        f' font-family="system-ui, sans-serif" aria-label="{escape(label)}">'
    ]
    words = "Queries from the top down, keys from left to right; what is seen is coloured."
    lines.append(_words(LEFT, 16, words, colours.faint, 11))
    for number, kind in enumerate(KINDS):
        row, column = divmod(number, COLUMNS)
        lines += _square(kind, LEFT + column * PITCH, TOP + 14 + row * ROOM, colours)
    return "\n".join([*lines, "</svg>"]) + "\n"


def pictures() -> dict[str, str]:
    """The pictures by the names of their files."""
    return {f"masks-{colours.name}.svg": picture(colours) for colours in COLOURS}
