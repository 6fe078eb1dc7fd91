"""`heedful support`: which kernel takes what on which architecture, on the screen or as a page."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from heedful.cli import matrix
from heedful.cli.console import level_text, out
from heedful.core.registry.capability import LEVELS, ROWS, backends


def support(
    markdown: Annotated[
        Path | None, typer.Option(help="write the page of the documentation here instead")
    ] = None,
) -> None:
    """The support matrix: which kernel runs on which architecture, at which level."""
    if markdown is not None:
        markdown.write_text(matrix.markdown(), encoding="utf-8")
        out.print(f"wrote {markdown}")
        return
    table = Table(title="Where a kernel runs", title_justify="left", title_style="bold")
    for name in ("device", "arch", *backends()):
        table.add_column(name)
    for arch, names in matrix.architectures().items():
        table.add_row(", ".join(names), arch, *(_cell(backend, arch) for backend in backends()))
    out.print(table)
    for name, words in LEVELS.items():
        out.print(f"  {level_text(name)}: {words}")


def _cell(backend: str, arch: str) -> str:
    """The level of a backend on an architecture; which direction, where it has but one of them."""
    levels = {row.direction: matrix.level_on(row, arch) for row in ROWS if row.backend == backend}
    shown = {direction: level_text(level) for direction, level in levels.items() if level}
    if not shown:
        return "-"
    if len(shown) == 2 and len(set(shown.values())) == 1:
        return next(iter(shown.values()))
    return "\n".join(f"{level} ({direction})" for direction, level in shown.items())
