"""`heedful explain`: a problem in, the chosen kernels and the reasons against the others out."""

import dataclasses
import json
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from heedful.bench.harness import machine
from heedful.cli.console import fail, level_text, out
from heedful.cli.options import ProblemOptions, with_problem
from heedful.core.base.device import DeviceSpec, by_name
from heedful.core.planning.plan import Plan, plan, words_of_sequences
from heedful.core.registry.capability import Toolchain


@with_problem
def explain(
    options: ProblemOptions,
    device: Annotated[
        str | None, typer.Option(help="H200, MI355X, sm_90, cpu ...; this machine's if not given")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="force this backend")] = None,
    triton: Annotated[str | None, typer.Option(help="plan for this Triton version")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Which kernel runs a problem on a device, with which tiles, and why the others do not."""
    try:
        problem = options.problem()
        target = machine.devices()[0] if device is None else by_name(device)
        decision = plan(problem, target, _toolchain(device, triton), backend)
    except ValueError as error:
        fail(escape(str(error)))
    if as_json:
        out.print_json(json.dumps(as_data(decision)))
    else:
        _show(decision)


def _toolchain(device: str | None, triton: str | None) -> Toolchain:
    """This machine's versions for its own device; the newest for a device that is elsewhere."""
    tools = machine.toolchain() if device is None else Toolchain()
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
        for name, config in decision.configs.items()
    }
    return {
        "problem": {**_plain(decision.problem), "key": decision.problem.key()},
        "device": _plain(decision.device),
        "forward": {"backend": decision.backend, "level": decision.level},
        "backward": decision.backward
        and {"backend": decision.backward, "level": decision.backward_level},
        "num_splits": decision.num_splits,
        "short_q": decision.short_q,
        "kernels": kernels,
        "rejected": [_plain(rejection) for rejection in decision.rejected],
        "notes": list(decision.notes),
    }


def _plain(value) -> dict:
    return dataclasses.asdict(value)


def _show(decision: Plan) -> None:
    out.print(f"[bold]{escape(decision.problem.key())}[/] on {_device_words(decision.device)}\n")
    facts = Table.grid(padding=(0, 2))
    facts.add_row("forward", f"[bold]{decision.backend}[/]", level_text(decision.level))
    if decision.backward and decision.backward_level:
        facts.add_row(
            "backward", f"[bold]{decision.backward}[/]", level_text(decision.backward_level)
        )
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
    if decision.rejected:
        out.print(_rejections(decision))


def _device_words(device: DeviceSpec) -> str:
    words = f"{device.name} ({device.arch})"
    return words if device.vendor == "cpu" else f"{words}, {device.units} units"


def _tiles(decision: Plan) -> Table:
    table = Table(title="Tiles", title_justify="left", title_style="bold")
    for name in ("kernel", "queries x keys", "warps", "stages", "more"):
        table.add_column(name)
    for kernel, config in decision.configs.items():
        cells = (kernel, f"{config.block_m} x {config.block_n}", config.num_warps)
        cells += (config.num_stages, config.words().replace(" ", ", "))
        table.add_row(*(escape(str(cell)) for cell in cells))
    return table


def _rejections(decision: Plan) -> Table:
    table = Table(title="Not chosen", title_justify="left", title_style="bold")
    for name in ("kernel", "direction", "why"):
        table.add_column(name)
    for rejection in decision.rejected:
        reasons = "\n".join(escape(reason) for reason in rejection.reasons)
        table.add_row(rejection.backend, rejection.direction, reasons)
    return table
