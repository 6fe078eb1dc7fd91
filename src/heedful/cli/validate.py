"""`heedful validate`: is what this machine's GPU computes right? A report to send back, and a
record that lets the planner use kernels that nobody had run on such hardware before."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from heedful.cli.console import err, fail, out
from heedful.cli.given import torch_device, writable, write

if TYPE_CHECKING:
    from heedful.bench.harness.run import Outcome
    from heedful.validation.run import Verdict


def validate(
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1, cpu")] = None,
    backend: Annotated[
        str | None, typer.Option(help="comma list of backends; what is not named is not recorded")
    ] = None,
    report: Annotated[Path, typer.Option(help="write what was found here")] = Path(
        "heedful-validation.json"
    ),
    no_bench: Annotated[bool, typer.Option("--no-bench", help="correctness only")] = False,
) -> None:
    """Check every kernel on this device against float64, time them, and record that they passed."""
    try:
        import torch  # noqa: F401  (asked for here, so that its absence is one line)
    except ImportError as error:
        fail(f'validate needs {error.name}: pip install "heedful\\[cpu]", or \\[cuda]')
    from heedful.validation import grid, run

    where = torch_device(device)
    writable(report, "--report")
    if where.type == "cpu":
        out.print("No GPU: there is nothing to validate here. The CPU backend, for good measure:")
    names = run.backends_of(where)
    try:
        asked = run.asked_of(backend, names) if backend else names
    except ValueError as error:
        fail(escape(f"backend on {where} {error}"))
    verdicts = _correctness(grid.grid(small=where.type == "cpu"), asked, where)
    out.print(_table(verdicts, asked))
    outcomes = [] if no_bench else _bench(asked, where)
    clock = {} if no_bench else _clock(outcomes, where)
    complaints = [f"{v.backend}, {v.problem}: {words}" for v in verdicts for words in v.wrong]
    complaints += [
        f"{figure.peer}, {outcome.case.name}: {figure.missing}"
        for outcome in outcomes
        for figure in outcome.figures
        if figure.wrong and figure.peer.startswith("heedful")
    ]
    untried = [n for n in asked if not any(v.judged for v in verdicts if v.backend == n)]
    complaints += [f"{name}: took no problem of the grid" for name in untried]
    for line in complaints:
        out.print(f"[bold red]wrong[/] {escape(line)}", soft_wrap=True)
    recorded = _record(frozenset(asked), where, not complaints)
    _write_report(report, where, verdicts, outcomes, complaints, recorded, clock)
    out.print(f"wrote {escape(str(report))}", soft_wrap=True)
    if complaints:
        raise typer.Exit(1)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=err, transient=True)


def _correctness(entries: list, names: list[str], where) -> "list[Verdict]":
    from heedful.validation import run

    verdicts = []
    with _progress() as progress:
        task = progress.add_task("against float64", total=len(entries) * len(names))
        for verdict in run.verdicts(entries, names, where):
            verdicts.append(verdict)
            progress.update(task, description=f"{verdict.backend}: {verdict.problem}", advance=1)
    return verdicts


def _bench(names: list[str], where) -> "list[Outcome]":
    from heedful.bench.harness import report
    from heedful.validation import run

    outcomes = []
    cases = run.bench_cases(where)
    with _progress() as progress:
        task = progress.add_task("timing", total=len(cases))
        for case in cases:
            progress.update(task, description=case.name)
            outcomes.append(run.bench(case, names, where))
            progress.advance(task)
    for group in dict.fromkeys(outcome.case.group for outcome in outcomes):
        members = [o for o in outcomes if o.case.group == group]
        out.print(report.table(group, members, out.width))
    return outcomes


def _table(verdicts: "list[Verdict]", names: list[str]) -> Table:
    """A row a problem, with each backend's worst error as a share of its budget: there may be more
    backends than columns fit on a screen."""
    table = Table(
        title="Worst error over its budget (at most 1)", title_justify="left", title_style="bold"
    )
    table.add_column("problem")
    table.add_column("kernels")
    cells = {(v.problem, v.backend): _cell(v) for v in verdicts}
    for problem in dict.fromkeys(v.problem for v in verdicts):
        by_name = {name: cells[problem, name] for name in names}
        words = ", ".join(f"{name} {cell}" for name, cell in by_name.items() if cell)
        table.add_row(escape(problem), words or "[dim]none takes it[/]")
    return table


def _cell(verdict: "Verdict") -> str:
    if verdict.skipped:
        return ""
    if verdict.wrong:
        return "[bold red]wrong[/]"
    shares = [
        getattr(j.error, what) / (getattr(j.budget, what) or 1.0)
        for j in (verdict.judged or {}).values()
        for what in ("largest", "rms")
    ]
    words = "" if verdict.backward else " [dim](forward)[/]"
    return f"[green]{max(shares):.2f}[/]{words}"


def _record(names: frozenset[str], where, passed: bool) -> str | None:
    """Writes or withdraws the record of the device; the file's path where one was written."""
    from heedful.launch import validations
    from heedful.torch.base.device import device_spec
    from heedful.validation import run

    spec = device_spec(where)
    if not passed:
        validations.remove(spec)
        out.print("[bold red]not validated[/]: nothing was recorded")
        return None
    if where.type == "cpu":
        out.print("[bold green]passed[/]")
        return None
    try:
        path = validations.write(spec, names & run.gated(where), run.now())
    except OSError as error:
        out.print(f"[bold green]passed[/], but it was not recorded: {escape(str(error))}")
        return None
    out.print(f"[bold green]passed[/]: recorded in {escape(str(path))}", soft_wrap=True)
    return str(path)


def _clock(outcomes: "list[Outcome]", where) -> dict:
    """On an AMD GPU that the emulator has a clock for: its facts, micro-kernels and benches beside
    their predictions."""
    try:
        from heedful.validation import on_device
    except ImportError as error:
        out.print(f"[dim]no predictions: {error.name} is not installed[/]")
        return {}
    if not on_device.has_clock(where):
        return {}
    micro, beside = [], []
    with _progress() as progress:
        total = on_device.count(where) + len(outcomes)
        task = progress.add_task("against the emulator's clock", total=total)
        for record in on_device.micro_kernels(where):
            micro.append(record)
            progress.update(task, description=record["name"], advance=1)
        for outcome in outcomes:
            progress.update(task, description=f"predicting {outcome.case.name}")
            beside += on_device.predictions(outcome, where)
            progress.advance(task)
    out.print(_micro_table(micro))
    out.print(_beside_table(beside))
    return {**on_device.facts(where), "micro_kernels": micro, "predictions": beside}


def _micro_table(records: list[dict]) -> Table:
    table = Table(title="Micro-kernels", title_justify="left", title_style="bold")
    for name in ("micro-kernel", "clocks", "predicted", "of a", "GHz", "W"):
        table.add_column(name)
    for record in records:
        if "failed" in record:
            table.add_row(record["name"], f"[red]{escape(record['failed'])}[/]")
            continue
        seen, told = record["measured"], record["predicted"]
        hz, watts = seen["clock_hz"], record["samples"].get("power_w", {})
        table.add_row(
            record["name"],
            "-" if seen["clocks"] is None else f"{seen['clocks']:.2f}",
            f"{told['clocks']:.2f}",
            record["unit"],
            "-" if hz is None else f"{hz / 1e9:.2f}",
            f"{watts['median']:.0f}" if watts else "-",
        )
    return table


def _beside_table(records: list[dict]) -> Table:
    table = Table(title="Times, us", title_justify="left", title_style="bold")
    for name in ("case", "kernels", "measured", "predicted", "between"):
        table.add_column(name)
    for record in records:
        cells = [record["case"], record["peer"], f"{record['measured_us']:.1f}"]
        if "failed" in record:
            cells.append(f"[red]{escape(record['failed'])}[/]")
        else:
            low, high = record["predicted_low_us"], record["predicted_high_us"]
            cells += [f"{record['predicted_us']:.1f}", f"{low:.1f} to {high:.1f}"]
        table.add_row(*cells)
    return table


def _write_report(
    path: Path, where, verdicts, outcomes, complaints, recorded: str | None, clock: dict
) -> None:
    from dataclasses import asdict

    from heedful.bench.harness.run import records, surroundings
    from heedful.launch.code.identity import all_kernels_digest
    from heedful.torch.base.device import device_spec

    facts = {
        **surroundings(where),
        "spec": asdict(device_spec(where)),
        "sources": all_kernels_digest(),
        "passed": not complaints,
        "wrong": complaints,
        "record": recorded,
        "problems": [verdict.record() for verdict in verdicts],
        "bench": [record for outcome in outcomes for record in records(outcome, where)],
        "amd": clock,
    }
    write(path, json.dumps(facts, indent=1, default=str))
