"""`heedful inspect`: the machine code of a problem's kernels, read without a GPU."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from heedful.cli.console import err, fail, out
from heedful.cli.given import planned_device, writable, write
from heedful.cli.options import ProblemOptions, with_problem
from heedful.core.planning.plan import plan


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
) -> None:
    """Registers, spills, LDS, occupancy, instruction mix and hot-loop bound of a problem's kernels,
    beside each other and any other file of machine code. Compiles; needs no GPU."""
    from heedful.emulator.program.asm import AsmError
    from heedful.inspector import Inspection, command
    from heedful.inspector.tables import to_json
    from heedful.inspector.timeline import timeline_svg
    from heedful.launch.prebuild import compiling
    from heedful.launch.program.programs import program

    inspections = []
    writable(svg, "--svg")
    try:
        if device is not None:
            chosen = plan(options.problem(), planned_device(device)[0], compiling(), backend)
            for direction in ("forward", "backward")[: 1 + bool(chosen.backward)]:
                inspections += command.of_program(program(chosen, direction), chosen.device.arch)
        inspections += [command.of_file(path) for path in against or ()]
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
    text = to_json(inspections) if as_json else command.render(inspections, segments, out.width)
    out.print(text, markup=False, soft_wrap=True)
