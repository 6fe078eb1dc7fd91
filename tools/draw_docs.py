"""Draws the pages of docs/lab from their tables, and the lists of both folders: `make docs`.

A page is an entry of docs/lab/pages.toml and the CSV files of the folder of its name. A file begins
with lines `# key: value`; then comes the table.

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

DOCS = Path(__file__).parents[1] / "docs"
LAB, DECISIONS = DOCS / "lab", DOCS / "decisions"
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


def draw(name: str, page: dict[str, str]) -> str:
    """The page `name`."""
    drawn = [f"# {page['title']}", "", f"Drawn by `make docs` from `docs/lab/{name}/*.csv`.", ""]
    drawn += [page["about"].strip()]
    for path in sorted((LAB / name).glob("*.csv")):
        table = read(path)
        what = [table.head.get(key) for key in ("device", "date", "versions")]
        drawn += ["", f"## {table.head['title']}", ""]
        drawn += [f"{'; '.join(word for word in what if word)}.", ""]
        if "method" in table.head:
            drawn += [table.head["method"], ""]
        drawn += _list(table) if table.head.get("draw") == "list" else _table(table)
    return "\n".join(drawn) + "\n"


_LAB_HEAD = """\
# The lab

Drawn by `make docs` from `docs/lab/pages.toml`.

What was measured, with date, device and versions. Each entry is a lead for the next measurement,
not a promise. To add one, add a CSV file to a folder here and run `make docs`.

"""

_DECISIONS_HEAD = """\
# Decisions

Drawn by `make docs` from the files of this folder.

What was chosen where another way was possible, and on which evidence.

"""


def _lab(pages: dict[str, dict[str, str]]) -> str:
    """The list of the lab's pages."""
    titles = {name: page["title"].removeprefix("Lab: ") for name, page in pages.items()}
    return _LAB_HEAD + "".join(f"- [{title}]({name}.md)\n" for name, title in titles.items())


def _decisions() -> str:
    """The list of decisions."""
    paths = sorted(DECISIONS.glob("[0-9]*.md"))
    titles = {p.name: p.read_text(encoding="utf-8").splitlines()[0][2:] for p in paths}
    return _DECISIONS_HEAD + "".join(f"- [{title}]({name})\n" for name, title in titles.items())


def pages() -> dict[Path, str]:
    """Every drawn page's text, by its path."""
    lab = tomllib.loads((LAB / "pages.toml").read_text(encoding="utf-8"))
    drawn = {LAB / f"{name}.md": draw(name, page) for name, page in lab.items()}
    return {**drawn, LAB / "README.md": _lab(lab), DECISIONS / "README.md": _decisions()}


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote docs/{path.relative_to(DOCS).as_posix()}")


if __name__ == "__main__":
    main()
