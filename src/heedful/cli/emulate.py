"""`heedful emulate`: runs AMD machine code on this machine's CPU and reports what silicon hides."""

from typing import Annotated

import typer


def emulate(
    arguments: Annotated[
        list[str], typer.Argument(help="as `python -m heedful.emulator`; -- --help shows them")
    ],
) -> None:
    """Run a code object (--object FILE.co), a .s file or a kernel of a Python file (FILE.py:KERNEL)
    on a gfx942 or gfx950 emulator: results, hazards, races, bounds."""
    from heedful.emulator.command import main

    raise typer.Exit(main(arguments))
