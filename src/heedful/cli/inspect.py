"""`heedful inspect`: the machine code of a problem's kernels, read without a GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from heedful.cli.console import err, fail, out
from heedful.cli.given import planned_device, writable, write
from heedful.cli.options import ProblemOptions, with_problem
from heedful.core.planning.plan import plan

if TYPE_CHECKING:
    from heedful.inspector import Inspection, NvidiaInspection
    from heedful.validation.predicted import Predicted


@with_problem
def inspect(
    options: ProblemOptions,
    device: Annotated[
        str | None, typer.Option(help="compile the problem for H200, MI355X, gfx950, cuda ...")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="force this backend")] = None,
    against: Annotated[
        list[Path] | None, typer.Option(help="also FILE.s (gfx942, gfx950) or FILE.cubin")
    ] = None,
    segments: Annotated[bool, typer.Option("--segments", help="cut hot loops at barriers")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    svg: Annotated[
        Path | None, typer.Option(help="timeline of the first AMD kernel's hot loop")
    ] = None,
    time: Annotated[
        int, typer.Option(min=0, help="predict AMD launches, of which this many workgroups run")
    ] = 0,
    waves: Annotated[
        Path | None,
        typer.Option(help="with --time: picture of all waves of a unit (.svg, .png)"),
    ] = None,
    clocks: Annotated[str, typer.Option(help="that it shows, as FIRST-LAST")] = "0-4000",
) -> None:
    """Registers, spills, LDS, occupancy, instruction mix and hot-loop bound of a problem's kernels,
    beside each other and any other file of machine code. Compiles; needs no GPU."""
    from heedful.emulator.program.asm import AsmError
    from heedful.inspector import Inspection, command
    from heedful.inspector.tables import to_json
    from heedful.inspector.timeline import timeline_svg

    inspections, told = [], []
    writable(svg, "--svg")
    writable(waves, "--waves")
    try:
        span = _span(clocks)
        if time and device is None:
            raise ValueError("--time wants a problem's launches: give --device")
        if waves is not None and not time:
            raise ValueError("--waves is a picture of what --time replays: give both")
        if device is not None:
            inspections, told = _problem(options, device, backend, time, span[1] if waves else 0.0)
        inspections += [command.of_file(path) for path in against or ()]
        if waves is not None:
            _draw(waves, span, told)
    except (AsmError, OSError, RuntimeError, ValueError) as error:
        fail(escape(str(error)))
    if not inspections:
        fail("nothing to inspect: give --device for a problem's kernels, --against for files")
    amd = [kernel for kernel in inspections if isinstance(kernel, Inspection)]
    if not amd and (svg is not None or segments):
        fail("--svg and --segments want an AMD kernel, and there is none")
    if svg is not None:
        write(svg, timeline_svg(amd[0]))
        err.print(f"wrote {svg}")
    launches = [launch for _, each in told for launch in each.launches]
    if as_json:
        text = to_json(inspections, [prediction for _, prediction in launches])
    else:
        text = "\n\n".join([command.render(inspections, segments, out.width), *_times(told)])
    out.print(text, markup=False, soft_wrap=True)


def _span(clocks: str) -> tuple[float, float]:
    """The first clock and the last of a picture. Raises ValueError."""
    first, _, last = clocks.partition("-")
    if not (first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise ValueError(f"--clocks must be FIRST-LAST, as 20000-24000, got {clocks!r}")
    return float(first), float(last)


def _problem(
    options: ProblemOptions, device: str, backend: str | None, workgroups: int, window: float
) -> tuple[list["Inspection | NvidiaInspection"], list[tuple[str, "Predicted"]]]:
    """Inspections of the kernels of each direction of a problem, and predictions where some
    workgroups shall run. Raises ValueError."""
    from heedful.emulator.launch import LDS_LIMIT
    from heedful.inspector import command
    from heedful.launch.prebuild import compiling
    from heedful.launch.program.programs import program
    from heedful.validation.predicted import predicted

    chosen = plan(options.problem(), planned_device(device)[0], compiling(), backend)
    arch = chosen.device.arch
    if workgroups and arch not in LDS_LIMIT:
        raise ValueError(f"--time wants a device of {', '.join(LDS_LIMIT)}, got {device!r}: {arch}")
    inspections, told = [], []
    for direction in ("forward", "backward")[: 1 + bool(chosen.backward)]:
        inspections += command.of_program(program(chosen, direction), arch)
        if workgroups:
            each = predicted(chosen, direction, workgroups=workgroups, window=window)
            told.append((direction, each))
    return inspections, told


def _times(told: list[tuple[str, "Predicted"]]) -> Iterator[str]:
    """A line and a table for each direction."""
    from heedful.inspector.tables import times_table

    for direction, each in told:
        us = [1e6 * seconds for seconds in (each.seconds, each.low, each.high)]
        yield (
            f"{direction}: predicted {us[0]:.1f} us, between {us[1]:.1f} and {us[2]:.1f} "
            "(docs/clock.md says how wrong that is)"
        )
        yield times_table(each.launches, out.width)


def _draw(path: Path, span: tuple[float, float], told: list[tuple[str, "Predicted"]]) -> None:
    """The picture of the longest launch."""
    from heedful.emulator.clock.timeline import draw

    launches = [launch for _, each in told for launch in each.launches]
    name, longest = max(launches, key=lambda launch: launch[1].seconds)
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(longest.timing, span, path, f"{name}: the waves of one compute unit")
    err.print(f"wrote {path}")
