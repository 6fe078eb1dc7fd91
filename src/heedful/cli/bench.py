"""`heedful bench`: cases x peers, interleaved, each figure after a reference check."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from heedful.bench.harness.cases import GROUPS, Case, cases
from heedful.cli.console import err, fail, out
from heedful.cli.given import torch_device, writable
from heedful.cli.options import dtype_name

if TYPE_CHECKING:
    from heedful.bench.harness.peers import Peer
    from heedful.bench.harness.run import Outcome


def bench(
    groups: Annotated[
        str | None,
        typer.Option("--cases", help=f"comma list of {', '.join(GROUPS)}; cpu where no GPU is"),
    ] = None,
    match: Annotated[str, typer.Option(help="only cases whose name has this, e.g. d128")] = "",
    peers: Annotated[
        str | None, typer.Option(help="comma list, heedful:BACKEND forces one; see --list")
    ] = None,
    base: Annotated[str | None, typer.Option(help="peer that ratios are over")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16 on a GPU, fp32 on a CPU")] = None,
    input_scale: Annotated[float, typer.Option(help="q and k are normal values times this")] = 1.0,
    rounds: Annotated[int, typer.Option(min=5, help="interleaved rounds")] = 7,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1, cpu")] = None,
    compilers: Annotated[
        int, typer.Option("--jobs", "-j", min=0, help="first compile our kernels, so many at once")
    ] = 0,
    json_lines: Annotated[Path | None, typer.Option(help="append a record a figure here")] = None,
    png: Annotated[Path | None, typer.Option(help="draw the figures here")] = None,
    listing: Annotated[bool, typer.Option("--list", help="list cases and peers, run none")] = False,
) -> None:
    """Time heedful against its peers. A result that fails the reference check gets no figure."""
    try:
        from heedful.bench.harness import peers as peer_module
    except ImportError as error:
        fail(f'bench needs {error.name}: pip install "heedful\\[cpu]", or \\[cuda]')
    where = torch_device(device)
    names = groups or ("cpu" if where.type == "cpu" else "forward,backward,decode,overhead")
    element = dtype_name(dtype or ("fp32" if where.type == "cpu" else "bf16"))
    try:
        chosen = [c for name in names.split(",") for c in cases(name, element, input_scale)]
        named = [peer_module.find(name) for name in peers.split(",")] if peers else None
        chosen = [case for case in chosen if match in case.name]
        _check_base(base, chosen, named, where)
    except ValueError as error:
        fail(escape(str(error)))
    if listing:
        _list(chosen, peer_module.PEERS)
        return
    if not chosen:
        fail(f"no case of {names} has {match!r} in its name; see --list")
    if compilers and where.type == "cpu":
        fail(f"--jobs compiles a GPU's kernels, and there are none to compile on {where}")
    writable(json_lines, "--json-lines")
    writable(png, "--png")
    if compilers:
        _compile_first(chosen, named, where, compilers)
    outcomes = _run(chosen, named, where, rounds, base, json_lines)
    _report(outcomes, where, png)
    if any(figure.wrong for outcome in outcomes for figure in outcome.figures):
        raise typer.Exit(1)


def _list(chosen: list[Case], peers: "dict[str, Peer]") -> None:
    for case in chosen:
        out.print(f"[bold]{case.group}[/]  {case.name}")
    for peer in peers.values():
        out.print(f"[bold]{peer.name}[/]: {peer.words}")


def _check_base(base: str | None, chosen: list[Case], named: "list[Peer] | None", where) -> None:
    """Raises ValueError for a base that no case times."""
    from heedful.bench.harness.peers import defaults

    peers = named or [peer for case in chosen for peer in defaults(case, where)]
    timed = dict.fromkeys(peer.name for peer in peers)
    if base is not None and chosen and base not in timed:
        raise ValueError(
            f"base must be among the peers that are timed, {', '.join(timed)}, got {base!r}"
            " (--peers names others)"
        )


def _compile_first(chosen: list[Case], named: "list[Peer] | None", where, jobs: int) -> None:
    """Compiles heedful's kernels of all cases and peers into the cache."""
    from heedful.bench.harness.peers import chosen_by, defaults
    from heedful.launch.prebuild import compile_all, kernels
    from heedful.launch.record import Entry
    from heedful.torch.base.device import device_spec

    spec, wanted = device_spec(where), {}
    for case in chosen:
        directions = dict.fromkeys(("forward", case.direction))
        for peer in named if named is not None else defaults(case, where):
            is_own = peer.name.partition(":")[0] == "heedful"
            if not is_own or peer.why_not(case, where) is not None:
                continue
            for direction in directions:
                entry = Entry(case.problem, direction, None, spec)
                try:
                    wanted |= kernels([entry], [spec], chosen_by(peer.name))[0]
                except ValueError:  # compiled when it is called, or refused then
                    continue
    err.print(f"compiling {len(wanted)} kernels, {jobs} at once")
    compile_all(list(wanted.values()), jobs)


def _run(
    chosen: list[Case], named: "list[Peer] | None", where, rounds: int, base: str | None, json_lines
) -> "list[Outcome]":
    from heedful.bench.harness import report
    from heedful.bench.harness.peers import defaults
    from heedful.bench.harness.run import BASES, measure, records

    outcomes = []
    bases = (base, *BASES) if base else BASES
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=err, transient=True) as progress:
        task = progress.add_task("", total=len(chosen))
        for case in chosen:
            progress.update(task, description=case.name)
            peers = named if named is not None else defaults(case, where)
            outcome = measure(case, peers, where, rounds, bases)
            outcomes.append(outcome)
            if not err.is_terminal:
                err.print(report.line(outcome), soft_wrap=True)
            if json_lines is not None:
                report.append_json_lines(json_lines, records(outcome, where))
            progress.advance(task)
    return outcomes


def _report(outcomes: "list[Outcome]", where, png: Path | None) -> None:
    from heedful.bench.harness import report
    from heedful.bench.harness.run import surroundings

    facts = surroundings(where)
    words = report.footer(facts)
    for group in dict.fromkeys(outcome.case.group for outcome in outcomes):
        members = [outcome for outcome in outcomes if outcome.case.group == group]
        out.print(report.table(group, members, out.width))
        for line in report.summary(members):
            out.print(f"  {line}")
    absences = report.absences(outcomes)
    if absences:
        out.print("\nWithout a figure:")
    for line in absences:
        out.print(f"  {line}", soft_wrap=True)
    out.print(f"\n[dim]{escape(words)}[/]", soft_wrap=True)
    if png is not None:
        report.picture(png, outcomes, words)
        out.print(f"wrote {png}")
