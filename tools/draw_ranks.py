"""Draws the pictures of docs/context-parallel.md, for light and for dark pages: `make docs`.

Which rank holds which tokens, and which keys a step of a ring computes with, are those of
`heedful.distributed`; how wide a box is says nothing.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from draw_speed import COLOURS, Colours

RANKS, BLOCKS = 4, 40  # of the drawn batch: tiles of 128 tokens
LENGTHS = (19, 9, 5, 4, 2, 1)  # of its documents, in tiles
HEADS = 8  # of keys
FILLS = ("#0969da", "#bf8700", "#1a7f37", "#8250df")  # by rank, on either page
LEFT, WIDTH, HIGH = 110, 560, 18


class Box(NamedTuple):
    """rank, from 0; begin, end: places between 0 and 1; words; moves: whether it is a transfer."""

    rank: int
    begin: float
    end: float
    words: str
    moves: bool = False


def strips() -> Iterator[tuple[str, Sequence[int], list[Box]]]:
    """By layout its name, the batch's lengths in tiles, and the pieces of each rank."""
    from heedful.core.call.spread import BLOCK, CAUSAL
    from heedful.distributed.layouts import LAYOUTS

    for name, lengths in (
        ("zigzag", (BLOCKS,)),
        ("contiguous", (BLOCKS,)),
        ("contiguous", LENGTHS),
        ("documents", LENGTHS),
    ):
        made = LAYOUTS[name]([n * BLOCK for n in lengths], RANKS, CAUSAL)
        total, boxes = made.starts[-1], []
        for rank, shard in enumerate(made.shards):
            for piece in shard:
                start = made.starts[piece.document]
                ends = (start + piece.begin) / total, (start + piece.end) / total
                boxes.append(Box(rank, *ends, str(rank)))
        yield name, lengths, boxes


def _gather() -> Iterator[Box]:
    for rank in range(RANKS):
        yield Box(rank, 0.0, 0.2, "heads 0-1", True)
        yield Box(rank, 0.2, 0.45, "heads 0-1, all keys")
        yield Box(rank, 0.2, 0.45, "heads 2-7", True)
        yield Box(rank, 0.45, 1.0, "heads 2-7, all keys")


def _heads() -> Iterator[Box]:
    from heedful.core.call.spread import spread_heads

    for rank, heads in enumerate(spread_heads(4 * HEADS, HEADS, RANKS)):
        yield Box(rank, 0.0, 0.22, "q, k, v", True)
        yield Box(rank, 0.22, 0.85, f"heads {heads.keys[0]}-{heads.keys[1] - 1}, whole batch")
        yield Box(rank, 0.85, 1.0, "out", True)


def _ring(ranks: int, of: int, begin: float, end: float) -> Iterator[Box]:
    """of: how many ranks stand beside each other, which do the same."""
    from heedful.core.call.spread import BLOCK, CAUSAL
    from heedful.distributed.layouts import LAYOUTS
    from heedful.distributed.rings import ring_steps

    layout = LAYOUTS["zigzag"]([BLOCKS * BLOCK], ranks, CAUSAL)
    wide = (end - begin) / ranks
    for rank in range(ranks * of):
        steps = ring_steps(layout, CAUSAL, rank // of)
        for number, step in enumerate(steps):
            place = begin + number * wide
            whose = "own" if step.source == rank // of else f"{step.source}'s"
            yield Box(rank, place, place + wide, f"{whose} keys")
            if number + 1 < len(steps):
                yield Box(rank, place, place + wide, f"keys of {steps[number + 1].source}", True)


def _grid() -> Iterator[Box]:
    for rank in range(RANKS):
        yield Box(rank, 0.0, 0.2, "q, k, v in pairs", True)
        yield Box(rank, 0.85, 1.0, "out in pairs", True)
    yield from _ring(RANKS // 2, 2, 0.2, 0.85)


def schedules() -> dict[str, list[Box]]:
    """By strategy the boxes of all ranks."""
    return {
        "gather": [*_gather()],
        "heads": [*_heads()],
        "ring": [*_ring(RANKS, 1, 0.0, 1.0)],
        "heads x ring": [*_grid()],
    }


def _words(x: float, y: float, words: str, colour: str, size: int, more: str = "") -> str:
    place = f'x="{x:g}" y="{y:g}" font-size="{size}"'
    return f'<text {place} fill="{colour}"{more}>{escape(words)}</text>'


def _box(x: float, y: float, wide: float, box: Box, colours: Colours) -> Iterator[str]:
    high = HIGH - 5 if box.moves else HIGH
    fill = f'fill="none" stroke="{FILLS[box.rank]}"' if box.moves else f'fill="{FILLS[box.rank]}"'
    place = f'x="{x + 0.5:g}" y="{y:g}" width="{wide - 1:g}" height="{high:g}"'
    yield f"<rect {place} {fill}/>"
    colour = colours.text if box.moves else "#ffffff"
    size = 9 if box.moves else 10
    middle = ' text-anchor="middle"'
    if 5.2 * len(box.words) < wide:
        yield _words(x + wide / 2, y + high - 4, box.words, colour, size, middle)


def _svg(height: float, label: str, lines: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height:g}"'
        f' role="img" font-family="system-ui, sans-serif" aria-label="{escape(label)}">'
    )
    return "\n".join([head, *lines, "</svg>"]) + "\n"


def layouts_picture(colours: Colours) -> str:
    """Strips of the batch's tokens, coloured by the rank that holds them."""
    said = f"A batch from left to right; the number is the rank, of {RANKS}, that holds the tokens."
    lines, y = [_words(14, 16, said, colours.faint, 11)], 34.0
    for name, lengths, boxes in strips():
        lines.append(_words(14, y + 13, name, colours.text, 12, ' font-weight="600"'))
        for box in boxes:
            wide = (box.end - box.begin) * WIDTH
            lines += _box(LEFT + box.begin * WIDTH, y, wide, box, colours)
        ends, total = 0, sum(lengths)
        path = ""
        for length in lengths[:-1]:
            ends += length
            path += f"M{LEFT + ends / total * WIDTH:g} {y - 4:g}v{HIGH + 8}"
        stroke = f'stroke="{colours.text}" stroke-width="1.5"'
        lines += [f'<path fill="none" {stroke} d="{path}"/>'] if path else []
        y += HIGH + 18
    lines.append(_words(LEFT, y + 2, "Lines are borders of documents.", colours.faint, 11))
    return _svg(y + 14, said, lines)


def schedules_picture(colours: Colours) -> str:
    """By strategy what each rank does; time runs to the right."""
    said = "Time runs to the right: filled boxes are kernels, hollow ones what arrives meanwhile."
    lines, y = [_words(14, 16, said, colours.faint, 11)], 30.0
    for name, boxes in schedules().items():
        lines.append(_words(14, y + 13, name, colours.text, 12, ' font-weight="600"'))
        for rank in range(RANKS):
            lines.append(_words(LEFT - 44, y + 30, f"rank {rank}", colours.faint, 10))
            for box in boxes:
                if box.rank == rank:
                    wide, x = (box.end - box.begin) * WIDTH, LEFT + box.begin * WIDTH
                    lines += _box(x, y + 2 if box.moves else y + 17, wide, box, colours)
            y += 2 * HIGH + 4
        y += 12
    return _svg(y, said, lines)


def pictures() -> dict[str, str]:
    """The pictures by the names of their files."""
    return {
        f"{kind}-{colours.name}.svg": draw(colours)
        for kind, draw in (("layouts", layouts_picture), ("schedules", schedules_picture))
        for colours in COLOURS
    }
