"""`heedful toolchain`: Tritons that worker processes compile with, apart from the process's own."""

from typing import Annotated, Literal

import typer
from rich.markup import escape
from rich.table import Table

from heedful.cli.console import fail, out
from heedful.core.base import installed


def toolchain(
    action: Annotated[Literal["list", "install", "remove", "path"], typer.Argument()] = "list",
    what: Annotated[
        str | None,
        typer.Argument(help="a version (install: 3.9.0 by default), or a wheel file to install"),
    ] = None,
) -> None:
    """Tritons for worker processes: newer ones than torch brings, each in a folder of its own."""
    from heedful.launch.worker import toolchains

    try:
        if action == "install":
            made = toolchains.install(what, lambda words: out.print(escape(words)))
            out.print(escape(f"{made.words()}"), soft_wrap=True)
        elif action == "remove":
            if what is None:
                raise ValueError("remove wants a version: `heedful toolchain list` shows them")
            out.print(escape(f"removed {toolchains.remove(what)}"), soft_wrap=True)
        elif action == "path":
            out.print(escape(str(toolchains.named(what).root)), soft_wrap=True)
        elif what is not None:
            raise ValueError(f"list takes nothing more, got {what!r}")
        else:
            _show()
    except (OSError, ValueError, RuntimeError) as error:
        fail(escape(str(error)))


def _show() -> None:
    chosen = installed.compiler()
    table = Table(title="Toolchains", title_justify="left", title_style="bold")
    for name in ("Triton", "folder", "for this Python"):
        table.add_column(name, overflow="fold")
    for one in installed.toolchains():
        fits = "yes" if one.root.name.endswith(installed.python_tag()) else "no"
        table.add_row(one.version, escape(str(one.root)), fits)
    if table.row_count:
        out.print(table)
    else:
        out.print("no toolchain is installed: `heedful toolchain install`")
    here = installed.triton_version()
    out.print(f"this process's own: {f'Triton {here}' if here else 'none'}")
    words = escape(chosen.words()) if chosen else "nothing"
    out.print(f"compiles here: {words}", soft_wrap=True)
