"""Draws the pages of measurements/ from their tables, the lists of them and of the decisions, the
README's picture and those of docs/masks.md and docs/context-parallel.md: `make docs`.

A page is an entry of measurements/pages.toml and the CSV files of the folder of its name. The
entry's `summary` names the file whose table docs/measurements.md shows, `picture` one that
draw_speed.py draws. docs/decisions/index.toml
has the headings of the decisions, and one answer for each. A CSV file begins with lines
`# key: value`; then comes the table.

    title, device   what was measured, and on what
    date, versions  when, and with what; columns of these names instead where rows differ
    method          how, in sentences
    numbers         the columns that hold measurements, between `;` or spaces: see `is_measurement`
    draw            `list`: a row is a paragraph, not a line of a table
"""

import csv
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import draw_masks
import draw_ranks
import draw_speed

ROOT = Path(__file__).parents[1]
DOCS, MEASUREMENTS = ROOT / "docs", ROOT / "measurements"
DECISIONS, SUMMARIES = DOCS / "decisions", DOCS / "measurements.md"
KEYS = {"title", "date", "device", "versions", "method", "numbers", "draw"}

_NUMBER = r"[+-]?\d+(?:\.\d+)?"
_MEASUREMENT = re.compile(rf"{_NUMBER}(?:\.\.{_NUMBER}| -> {_NUMBER})?(?: %)?")


@dataclass(frozen=True)
class Table:
    """One file: what its head says, the names of its columns, its rows."""

    head: dict[str, str]
    columns: list[str]
    rows: list[dict[str, str]]

    @property
    def numbers(self) -> list[str]:
        """The columns that hold measurements."""
        text = self.head.get("numbers", "")
        return [name.strip() for name in text.split(";")] if ";" in text else self._found(text)

    def _found(self, text: str) -> list[str]:
        return [text] if text in self.columns else text.split()


def is_measurement(cell: str) -> bool:
    """Whether a cell is empty, a number, a range `low..high` or a change `before -> after`, all of
    them perhaps with ` %` behind."""
    return cell == "" or _MEASUREMENT.fullmatch(cell) is not None


def read(path: Path) -> Table:
    """A file's table. Raises ValueError where it is not as the module's docstring says."""
    lines = path.read_text(encoding="utf-8").splitlines()
    count = next(i for i, line in enumerate(lines) if not line.startswith("# "))
    head = dict(line[2:].split(": ", 1) for line in lines[:count])
    rows = list(csv.reader(lines[count:], strict=True))
    columns, *rows = rows
    if unknown := head.keys() - KEYS:
        raise ValueError(f"{path}: unknown keys {sorted(unknown)}")
    for name in ("title", "device", "date", "versions"):
        if name not in head and name not in columns:
            raise ValueError(f"{path}: says no {name}")
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"{path}: {len(row)} cells for {len(columns)} columns: {row}")
    table = Table(head, columns, [dict(zip(columns, row, strict=True)) for row in rows])
    for name in table.numbers:
        if name not in columns:
            raise ValueError(f"{path}: no column {name!r}")
        for row in table.rows:
            if not is_measurement(row[name]):
                raise ValueError(f"{path}: {row[name]!r} in column {name!r} is no measurement")
    return table


def _table(table: Table) -> list[str]:
    # GitHub and MkDocs align a column to the right by the colon.
    rules = ["--:" if name in table.numbers else "---" for name in table.columns]
    rows = [table.columns, rules, *(list(row.values()) for row in table.rows)]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]


def _list(table: Table) -> list[str]:
    """Findings, in the order of the file, each with when and with what it was seen."""
    return [f"- {r['date']}, {r['versions']}: {r['finding']}" for r in table.rows]


def _facts(table: Table) -> str:
    """On what, when and with what a table was measured."""
    facts = [table.head.get(key) for key in ("device", "date", "versions")]
    return f"{'; '.join(fact for fact in facts if fact)}."


def draw(name: str, page: dict[str, str]) -> str:
    """The page `name`."""
    drawn = [f"# {page['title']}", "", f"Drawn by `make docs` from `measurements/{name}/*.csv`."]
    drawn += ["", page["about"].strip()]
    for path in sorted((MEASUREMENTS / name).glob("*.csv")):
        table = read(path)
        drawn += ["", f"## {table.head['title']}", "", _facts(table), ""]
        if "method" in table.head:
            drawn += [table.head["method"], ""]
        drawn += _list(table) if table.head.get("draw") == "list" else _table(table)
    return "\n".join(drawn) + "\n"


_MEASUREMENTS_HEAD = """\
# Measurements

Drawn by `make docs` from `measurements/pages.toml`.

Each table says what was measured, with date, device and versions. An entry is a lead for the next
measurement, not a promise. To add one, add a CSV file to a folder here and run `make docs`.
[The summary](../docs/measurements.md) has one table a family.

"""

_SUMMARIES_HEAD = """\
# Measurements in short

Drawn by `make docs` from `measurements/`.

Each kernel family has one table here. The link below it leads to how it was measured, and to all
other measurements of the family.
"""

_DECISIONS_HEAD = """\
# Decisions

Drawn by `make docs` from the files of this folder and `docs/decisions/index.toml`.

A decision says which of several ways was chosen, and on which evidence. This list has the answers.
"""


def _measurements(pages: dict[str, dict[str, str]]) -> str:
    """The list of the pages of measurements."""
    titles = {name: page["title"] for name, page in pages.items()}
    links = (f"- [{title}]({name}.md)\n" for name, title in titles.items())
    return _MEASUREMENTS_HEAD + "".join(links)


def _summaries(pages: dict[str, dict[str, str]]) -> str:
    """One table a family, and links to the other pages."""
    drawn, others = [], []
    for name, page in pages.items():
        link = f"[{page['title']}](../measurements/{name}.md)"
        if "summary" not in page:
            others.append(f"- {link}")
            continue
        table = read(MEASUREMENTS / name / page["summary"])
        drawn += ["", f"## {page['title']}", "", f"{table.head['title']}. {page['unit']}", ""]
        drawn += [_facts(table), "", *_table(table), "", f"More: {link}."]
    return _SUMMARIES_HEAD + "\n".join([*drawn, "", "## Other pages", "", *others]) + "\n"


def _decisions() -> str:
    """The decisions under their headings, each with its answer."""
    index = tomllib.loads((DECISIONS / "index.toml").read_text(encoding="utf-8"))
    paths = {path.name[:3]: path for path in sorted(DECISIONS.glob("[0-9]*.md"))}
    listed = [number for answers in index.values() for number in answers]
    if sorted(listed) != sorted(paths):
        wrong = sorted(set(listed) ^ set(paths)) or "a number twice"
        raise ValueError(f"docs/decisions/index.toml: has another list than the folder: {wrong}")
    drawn = []
    for heading, answers in index.items():
        drawn += ["", f"## {heading}", ""]
        for number, answer in answers.items():
            title = paths[number].read_text(encoding="utf-8").splitlines()[0][2:]
            drawn.append(f"- [{title}]({paths[number].name}): {answer}")
    return _DECISIONS_HEAD + "\n".join(drawn) + "\n"


def _pictures(pages: dict[str, dict]) -> dict[Path, str]:
    """The picture of the speed against peers, in the colours of light and of dark pages."""
    panels = []
    for name, page in pages.items():
        if "picture" in page:
            table = read(MEASUREMENTS / name / page["picture"])
            title = f"{page['title']}, {table.head['device']}"
            peers = re.findall(r"(?:cuDNN|FA4) [\w.]+", table.head["versions"])
            facts = ", ".join([table.head["date"], *peers, "D: head dim"])
            panels.append(draw_speed.panel(title, facts, table.rows, page["products"]))
    return {
        DOCS / f"speed-{colours.name}.svg": draw_speed.picture(panels, colours)
        for colours in draw_speed.COLOURS
    }


def pages() -> dict[Path, str]:
    """Every drawn page's text, by its path."""
    pages = tomllib.loads((MEASUREMENTS / "pages.toml").read_text(encoding="utf-8"))
    return {
        **{MEASUREMENTS / f"{name}.md": draw(name, page) for name, page in pages.items()},
        MEASUREMENTS / "README.md": _measurements(pages),
        SUMMARIES: _summaries(pages),
        DECISIONS / "README.md": _decisions(),
        **_pictures(pages),
        **{DOCS / name: text for name, text in draw_masks.pictures().items()},
        **{DOCS / name: text for name, text in draw_ranks.pictures().items()},
    }


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT).as_posix()}")


if __name__ == "__main__":
    main()
