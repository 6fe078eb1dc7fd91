"""`heedful support`: which kernel takes what on which architecture, on the screen or as a page."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from heedful.cli import matrix
from heedful.cli.console import level_text, out
from heedful.cli.given import writable, write
from heedful.core.registry.capability import LEVELS, VARIANTS, backends


def support(
    markdown: Annotated[
        Path | None, typer.Option(help="write the page of the documentation here instead")
    ] = None,
) -> None:
    """The support matrix: which kernel runs on which architecture, at which level."""
    writable(markdown, "--markdown")
    if markdown is not None:
        write(markdown, matrix.markdown())
        out.print(f"wrote {markdown}")
        return
    table = Table(
        title="Where a kernel runs", title_justify="left", title_style="bold", show_lines=True
    )
    for name in ("devices", "level", "kernels"):
        table.add_column(name)
    for arch, names in matrix.architectures().items():
        for level, kernels in _by_level(arch).items():
            table.add_row(f"{', '.join(names)} ({arch})", level_text(level), ", ".join(kernels))
    out.print(table)
    for name, words in LEVELS.items():
        out.print(f"  {level_text(name)}: {words}")


def _by_level(arch: str) -> dict[str, list[str]]:
    """By support level on an architecture the backends, of whose variants the first counts; which
    direction, where it has but one."""
    by_level: dict[str, list[str]] = {}
    for backend in backends():
        levels: dict[str, str] = {}
        for variant in VARIANTS:
            if variant.backend == backend and (level := matrix.level_on(variant, arch)):
                levels.setdefault(variant.direction, level)
        for level in dict.fromkeys(levels.values()):
            variant = [direction for direction in levels if levels[direction] == level]
            words = backend if len(variant) == 2 else f"{backend} ({variant[0]})"
            by_level.setdefault(level, []).append(words)
    return by_level
