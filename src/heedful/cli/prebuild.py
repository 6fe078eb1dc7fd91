"""`heedful prebuild`: a list of problems in, a pack of compiled kernels out; no GPU needed."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from heedful.cli.console import err, fail, out
from heedful.cli.given import planned_device, writable


def prebuild(
    problems: Annotated[Path, typer.Argument(help="JSON, by hand or from heedful.record()")],
    pack: Annotated[Path, typer.Option("--out", "-o", help="folder of the pack")],
    device: Annotated[
        list[str], typer.Option(help="H200, MI355X, sm_90, cuda ...; may be given several times")
    ],
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="compilers at once")] = 0,
    backend: Annotated[str | None, typer.Option(help="force this backend")] = None,
) -> None:
    """Compile every kernel that a list of problems needs into a pack, for any devices.

    A deployment loads it with heedful.load_pack(folder) or HEEDFUL_PACK=folder, and compiles
    nothing.
    """
    # Here and not above: the other commands must not wait for what compiles.
    from heedful.launch.prebuild import prebuild as build
    from heedful.launch.record import load

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    writable(pack / "manifest.json", "--out")
    try:
        entries = load(problems)
        devices = [planned_device(name)[0] for name in device]
        with Progress(*columns, TimeElapsedColumn(), console=err) as bar:
            task = bar.add_task("compiling", total=None)
            count = build(
                entries,
                devices,
                pack,
                jobs or os.cpu_count() or 1,
                backend,
                lambda done, total, name: bar.update(
                    task, completed=done, total=total, description=name
                ),
            )
    except (OSError, ValueError, RuntimeError) as error:
        fail(escape(str(error)))
    size = sum(file.stat().st_size for file in pack.iterdir())
    out.print(f"{count} kernels, {size / 2**20:.1f} MiB, in {pack}")
