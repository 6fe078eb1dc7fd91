"""The command line: inspect .s files and cubins, or the kernels of a problem, side by side.

python -m heedful.inspector ours.s theirs.s --lds 67520 --tiles 1 --segments --svg loop.svg
python -m heedful.inspector kernel.cubin
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heedful.emulator.program.asm import AsmError
from heedful.inspector.inspection import Inspection, inspect
from heedful.inspector.nvidia import NvidiaInspection, inspect_cubin, nvidia_rows
from heedful.inspector.tables import align, segments_table, table, to_json
from heedful.inspector.timeline import timeline_svg


def of_artifact(artifact: Any, label: str = "", tiles: int = 1) -> Inspection | NvidiaInspection:
    """Inspect a compiled kernel of the library (an Artifact of heedful.launch)."""
    label = label or f"{artifact.symbol} {artifact.target.split(':')[-1]}"
    if artifact.target.startswith("cuda"):
        return inspect_cubin(artifact.code, shared_bytes=artifact.shared_bytes, label=label)
    return inspect(artifact.text, lds_bytes=artifact.shared_bytes, label=label, tiles=tiles)


def of_program(program: Any, arch: str) -> list[Inspection | NvidiaInspection]:
    """Inspect every kernel that a launch program runs (a Program of heedful.launch), compiled for
    `arch`; no GPU needed."""
    from heedful.launch import compiler

    return [of_artifact(compiler.artifact(call, arch)) for call in program.calls]


def of_file(path: Path, lds_bytes: int = 0, tiles: int = 1) -> Inspection | NvidiaInspection:
    """Inspect AMD assembly (.s) or an NVIDIA binary (.cubin). Raises AsmError or OSError."""
    if path.suffix == ".cubin":
        return inspect_cubin(path.read_bytes(), shared_bytes=lds_bytes, label=path.stem)
    return inspect(path.read_text(), lds_bytes=lds_bytes, label=path.stem, tiles=tiles)


def render(
    inspections: Sequence[Inspection | NvidiaInspection],
    segments: bool = False,
    width: int | None = None,
) -> str:
    """Tables of AMD and of NVIDIA kernels, whichever there are; one below another where columns do
    not fit into a width."""
    amd = [i for i in inspections if isinstance(i, Inspection)]
    nvidia = [i for i in inspections if isinstance(i, NvidiaInspection)]
    parts = [table(amd, width)] if amd else []
    parts += [segments_table(amd, width)] if amd and segments else []
    parts += [align(nvidia_rows(nvidia), width)] if nvidia else []
    return "\n\n".join(parts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="heedful inspect", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("files", nargs="+", help="FILE.s (gfx942, gfx950) or FILE.cubin")
    add(
        "--lds", type=int, action="append", default=[], help="bytes of LDS, one per file or for all"
    )
    add("--tiles", type=int, action="append", default=[], help="key tiles per turn of the hot loop")
    add("--segments", action="store_true", help="also the hot loops cut at their barriers")
    add("--json", action="store_true", help="print JSON")
    add("--svg", help="write the timeline of the first AMD kernel's hot loop there")
    return parser


def _nth(values: Sequence[int], index: int, default: int) -> int:
    return values[min(index, len(values) - 1)] if values else default


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 if all went well, 2 if a file cannot be read."""
    options = _parser().parse_args(argv)
    inspections: list[Inspection | NvidiaInspection] = []
    try:
        for i, name in enumerate(options.files):
            inspections.append(
                of_file(Path(name), _nth(options.lds, i, 0), _nth(options.tiles, i, 1))
            )
    except (AsmError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    amd = [i for i in inspections if isinstance(i, Inspection)]
    if options.svg and amd:
        Path(options.svg).write_text(timeline_svg(amd[0]))
    sys.stdout.write(
        (to_json(inspections) if options.json else render(inspections, options.segments)) + "\n"
    )
    return 0
