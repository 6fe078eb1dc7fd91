"""Draws the README's picture of the speed against peers, for light and for dark pages: `make docs`.

A page of measurements/pages.toml with a `picture` has a panel. That file's table has the columns
keys, heads, dim and mask, and times of heedful and its peers in us. A bar is the geometric mean of
the TFLOP/s of all rows of one head dim and mask. `products`: how many matrix products count.
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from xml.sax.saxutils import escape

NAMES = ("heedful", "cuDNN", "FA4")
WIDTH, HEIGHT = 820, 330
TOP, BASE = 84, 262  # of bars, in units of the picture
BAR, GAP, LEFT = 15, 14, 34
PANEL = 400


@dataclass(frozen=True)
class Colours:
    """name: of the file. bars: of NAMES, in their order. The page shows through the background."""

    name: str
    text: str
    faint: str
    bars: tuple[str, str, str]


COLOURS = (
    Colours("light", "#1f2328", "#59636e", ("#0969da", "#9aa4af", "#d0d7de")),
    Colours("dark", "#f0f6fc", "#9198a1", ("#4493f8", "#6e7681", "#3d444d")),
)


@dataclass(frozen=True)
class Panel:
    """facts: when and with what it was measured. bars: TFLOP/s of NAMES by group."""

    title: str
    facts: str
    bars: dict[str, tuple[float, ...]]


def tflops(row: Mapping[str, str], name: str, products: int) -> float:
    """A row's speed by its column of us: the products of all scores, of half of them if causal."""
    batch, keys = map(int, row["keys"].split(" x "))
    heads, dim = int(row["heads"].split("/")[0]), int(row["dim"])
    flops = products * 2 * batch * heads * keys**2 * dim / (2 if row["mask"] == "causal" else 1)
    return flops / float(row[name]) / 1e6


def panel(title: str, facts: str, rows: list[dict[str, str]], products: int) -> Panel:
    """The panel of a table; every row counts."""
    bars = {}
    for dim, mask in dict.fromkeys((row["dim"], row["mask"]) for row in rows):
        own = [row for row in rows if (row["dim"], row["mask"]) == (dim, mask)]
        bars[f"D{dim} {mask}"] = tuple(
            statistics.geometric_mean(tflops(row, name, products) for row in own) for name in NAMES
        )
    return Panel(title, facts, bars)


def _words(x: float, y: float, words: str, colour: str, size: int = 11, more: str = "") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size}"{more}>{escape(words)}</text>'
    )


def _panel(drawn: Panel, x: float, most: float, colours: Colours) -> Iterator[str]:
    bold, middle = ' font-weight="600"', ' text-anchor="middle"'
    yield _words(x + LEFT, 22, drawn.title, colours.text, 14, bold)
    yield _words(x + LEFT, HEIGHT - 12, drawn.facts, colours.faint, 10)
    for number, (group, speeds) in enumerate(drawn.bars.items()):
        first = x + LEFT + number * (len(NAMES) * BAR + GAP)
        for place, (speed, colour) in enumerate(zip(speeds, colours.bars, strict=True)):
            height = (BASE - TOP) * speed / most
            yield (
                f'<rect x="{first + place * BAR:g}" y="{BASE - height:.1f}" width="{BAR - 1}"'
                f' height="{height:.1f}" fill="{colour}"/>'
            )
        middle_x, top = first + len(NAMES) * BAR / 2, BASE - (BASE - TOP) * max(speeds) / most
        yield _words(middle_x, top - 6, f"{speeds[0]:.0f}", colours.bars[0], 11, middle + bold)
        for line, words in enumerate(group.split(" ", 1)):
            yield _words(middle_x, BASE + 16 + 14 * line, words, colours.text, 11, middle)


def picture(panels: list[Panel], colours: Colours) -> str:
    """The SVG file. Panels share their scale, which begins at 0."""
    most = max(max(speeds) for drawn in panels for speeds in drawn.bars.values())
    label = "; ".join(
        f"{drawn.title}: "
        + ", ".join(
            f"{group} " + " ".join(f"{n} {v:.0f}" for n, v in zip(NAMES, speeds, strict=True))
            for group, speeds in drawn.bars.items()
        )
        for drawn in panels
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' font-family="system-ui, sans-serif" aria-label="{escape(label)}">'
    ]
    for number, drawn in enumerate(panels):
        lines += _panel(drawn, number * PANEL, most, colours)
    for number, (name, colour) in enumerate(zip(NAMES, colours.bars, strict=True)):
        x = LEFT + number * 90
        lines.append(f'<rect x="{x}" y="36" width="11" height="11" fill="{colour}"/>')
        lines.append(_words(x + 16, 46, name, colours.text))
    what = "TFLOP/s in bfloat16, higher is better; numbers are heedful's"
    lines.append(_words(LEFT + 90 * len(NAMES), 46, what, colours.faint))
    return "\n".join([*lines, "</svg>"]) + "\n"
