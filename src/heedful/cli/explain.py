"""`heedful explain`: a problem in, the chosen kernels and the reasons against the others out."""

import dataclasses
import json
import math
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from heedful.bench.harness import machine
from heedful.cli.console import TRITON_HELPS, fail, level_text, out
from heedful.cli.given import planned_device
from heedful.cli.options import ProblemOptions, with_problem
from heedful.core.base.arrays import item_bytes
from heedful.core.base.device import MIB, DeviceSpec
from heedful.core.call.problem import ITEM_BITS, AttentionProblem
from heedful.core.planning.plan import (
    Plan,
    plan,
    rejected_together,
    shown_configs,
    words_of_sequences,
)
from heedful.core.planning.sizes import Workspace
from heedful.core.registry.capability import Toolchain
from heedful.launch.program.programs import as_run, program
from heedful.launch.spec import Program


@with_problem
def explain(
    options: ProblemOptions,
    device: Annotated[
        str | None,
        typer.Option(help="H200, MI355X, sm_90, cpu ...; cuda, cuda:1; this machine's by default"),
    ] = None,
    backend: Annotated[str | None, typer.Option(help="force this backend")] = None,
    triton: Annotated[str | None, typer.Option(help="plan for this Triton version")] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="predict a forward of the sequences over so many GPUs, too"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Which kernel runs a problem on a device, with which tiles, and why the others do not."""
    try:
        problem = options.problem()
        spread = [] if ranks is None else _over_ranks(problem, ranks)
        target, tools = planned_device(device)
        decision = as_run(plan(problem, target, _with_triton(tools, triton), backend))
        compiler = f"Triton {triton}" if triton else _compiler(tools)
    except ValueError as error:
        fail(escape(str(error)))
    if as_json:
        data = {**as_data(decision), "compiler": compiler}
        out.print_json(json.dumps(data if ranks is None else {**data, "ranks": spread}))
    else:
        _show(decision, compiler)
        for line in spread:
            out.print(escape(line), soft_wrap=True)


def _over_ranks(problem: AttentionProblem, ranks: int) -> list[str]:
    """The prediction for the sequences under context parallelism. Needs torch."""
    from heedful.distributed.cost import predicted
    from heedful.distributed.plan import mask_of

    if problem.seqlen_q != problem.seqlen_k:
        raise ValueError("ranks must come with as many keys as queries: leave out --seqlen-k")
    spec = problem.mask
    mask = mask_of(False, (spec.left, spec.right, spec.first))
    heads, dims = (problem.heads_q, problem.heads_k), (problem.head_dim, problem.head_dim_v)
    lengths = [problem.seqlen_q] * problem.batch
    return predicted(lengths, ranks, mask, heads, dims, ITEM_BITS[problem.dtype] // 8)


def _compiler(tools: Toolchain) -> str:
    """The Triton that is planned for, in words."""
    if tools.triton == Toolchain().triton:
        return "the newest Triton"
    return machine.compiler() or "no Triton"


def _with_triton(tools: Toolchain, triton: str | None) -> Toolchain:
    """The same versions with another Triton."""
    if triton is not None:
        try:
            version = tuple(int(part) for part in triton.split("."))
        except ValueError:
            raise ValueError(f"triton must be a version such as 3.6, got {triton!r}") from None
        tools = dataclasses.replace(tools, triton=version)
    return tools


def as_data(decision: Plan) -> dict:
    """A plan as plain data, for JSON."""
    kernels = {
        name: {**_plain(config), "measured": decision.measured[name]}
        for name, config in shown_configs(decision).items()
    }
    return {
        "problem": {**_plain(decision.problem), "key": decision.problem.key()},
        "device": _plain(decision.device),
        "forward": _kernel(decision, "forward"),
        "backward": decision.backward and _kernel(decision, "backward"),
        "num_splits": decision.num_splits,
        "short_q": decision.short_q,
        "kernels": kernels,
        "launches": {
            direction: [{"kernel": call.kernel.function, "grid": call.grid} for call in made.calls]
            for direction, made in _programs(decision).items()
        },
        "scratch": {
            direction: [_scratch(workspace) for workspace in made.workspaces]
            for direction, made in _programs(decision).items()
        },
        "rejected": [_plain(rejection) for rejection in decision.rejected],
        "notes": list(decision.notes),
    }


def _programs(decision: Plan) -> dict[str, Program]:
    """The programs of a plan by direction, without directions that launch no kernels."""
    chosen = {"forward": decision.backend, "backward": decision.backward}
    return {
        direction: program(decision, direction)
        for direction, backend in chosen.items()
        if backend and decision.variant_of(direction).program
    }


def _scratch(workspace: Workspace) -> dict:
    spec = workspace.buffer
    nbytes = math.prod(spec.shape) * item_bytes(spec.dtype)
    facts = {"name": workspace.name, "shape": spec.shape, "dtype": spec.dtype, "bytes": nbytes}
    return {**facts, "zeroed": workspace.zeroed}


def _kernel(decision: Plan, direction: str) -> dict:
    kernel = decision.variant_of(direction)
    level = decision.level if direction == "forward" else decision.backward_level
    return {"backend": kernel.backend, "variant": kernel.name, "level": level}


def _plain(value) -> dict:
    return dataclasses.asdict(value)


def _show(decision: Plan, compiler: str) -> None:
    out.print(f"[bold]{escape(decision.problem.key())}[/] on {_device_words(decision.device)}\n")
    facts = Table.grid(padding=(0, 2))
    facts.add_row("forward", _bold(decision, "forward"), level_text(decision.level))
    if decision.backward and decision.backward_level:
        facts.add_row("backward", _bold(decision, "backward"), level_text(decision.backward_level))
    if decision.num_splits > 1:
        facts.add_row("splits", f"keys in {decision.num_splits} parts, then one combine", "")
    if decision.short_q:
        facts.add_row("sequences", words_of_sequences(decision), "")
    for note in decision.notes:
        facts.add_row("note", escape(note), "")
    out.print(facts)
    if decision.configs:
        out.print(_tiles(decision))
        for kernel, measured in decision.measured.items():
            out.print(f"  {kernel}: [dim]{escape(measured)}[/]")
        out.print()
    if programs := _programs(decision):
        out.print(f"compiled by {escape(compiler)}", soft_wrap=True)
        out.print(_launches(programs))
        for line in _scratch_words(programs):
            out.print(f"  {line}")
        out.print()
    if decision.rejected:
        out.print(_rejections(decision))
        if any("needs triton" in why and "got" not in why for why in _reasons(decision)):
            out.print(f"[bold yellow]![/] {escape(TRITON_HELPS)}", soft_wrap=True)


def _reasons(decision: Plan) -> list[str]:
    return [reason for rejection in decision.rejected for reason in rejection.reasons]


def _bold(decision: Plan, direction: str) -> str:
    return f"[bold]{decision.variant_of(direction).label}[/]"


def _device_words(device: DeviceSpec) -> str:
    words = f"{device.name} ({device.arch})"
    return words if device.vendor == "cpu" else f"{words}, {device.units} units"


def _tiles(decision: Plan) -> Table:
    table = Table(title="Tiles", title_justify="left", title_style="bold")
    table.add_column("kernel", overflow="fold")
    for name in ("queries x keys", "warps", "stages", "more"):
        table.add_column(name)
    for kernel, config in shown_configs(decision).items():
        cells = (kernel, f"{config.block_m} x {config.block_n}", config.num_warps)
        cells += (config.num_stages, config.words().replace(" ", ", "))
        table.add_row(*(escape(str(cell)) for cell in cells))
    return table


def _launches(programs: dict[str, Program]) -> Table:
    table = Table(title="Launches", title_justify="left", title_style="bold")
    for name in ("direction", "kernel", "grid"):
        table.add_column(name)
    for direction, made in programs.items():
        for call in made.calls:
            grid = " x ".join(map(str, call.grid)).removesuffix(" x 1").removesuffix(" x 1")
            table.add_row(direction, call.kernel.function, grid)
    return table


def _scratch_words(programs: dict[str, Program]) -> list[str]:
    """A line a direction: its arrays of scratch with their sizes."""
    lines = []
    for direction, made in programs.items():
        facts = [_scratch(workspace) for workspace in made.workspaces]
        arrays = (f"{f['name']} {f['bytes'] / MIB:.3g} MiB" for f in facts)
        lines.append(f"scratch {direction}: {', '.join(arrays) or 'none'}")
    return lines


def _rejections(decision: Plan) -> Table:
    table = Table(title="Not chosen", title_justify="left", title_style="bold")
    for name in ("kernels", "direction", "why"):
        table.add_column(name)
    for (direction, reasons), names in rejected_together(decision).items():
        why = "\n".join(escape(reason) for reason in reasons)
        table.add_row(", ".join(names), direction, why)
    return table
