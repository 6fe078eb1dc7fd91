"""`heedful demo`: a small GPT on a real text, trained with heedful and with SDPA."""

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from heedful.bench.harness import machine
from heedful.cli.console import fail, out
from heedful.cli.given import torch_device, writable

if TYPE_CHECKING:
    import torch

    from heedful.demo.job import Report
    from heedful.demo.text import Text
    from heedful.demo.training import Recipe

# Rows of the table of losses.
_ROWS = 10
# The minutes of two idle cores for the steps of the recipe.
_MINUTES_ON_A_CPU = 3


def demo(
    folder: Annotated[Path, typer.Option("--out", help="where the pictures go")] = Path(
        "demo-output"
    ),
    steps: Annotated[int | None, typer.Option(min=2, help="training steps")] = None,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1, cpu")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads")] = 1,
) -> None:
    """Train a small GPT with heedful and with SDPA, compare, generate text from a KV cache."""
    try:
        import torch

        from heedful.demo import job, plots, text, training
    except ImportError as error:
        fail(f'demo needs {error.name}: pip install "heedful\\[cpu,cli]", or \\[cuda,cli]')
    began = time.perf_counter()
    where = torch_device(device)
    pictures = {name: folder / f"{name}.png" for name in ("curves", "timing")}
    for path in pictures.values():
        writable(path, "--out")
    recipe = training.ON_CPU if where.type == "cpu" else training.ON_GPU
    # Products this small gain little from more threads, and on a busy machine lose ten times that
    # to threads that wait for each other.
    torch.set_num_threads(threads)
    if steps is not None:
        recipe = dataclasses.replace(recipe, steps=steps)
    source = text.load()
    _introduce(recipe, source, where)
    name = machine.cpu_name() if where.type == "cpu" else torch.cuda.get_device_name(where)
    report = _train(job, recipe, source, where)
    out.print(_losses(report))
    out.print(_speeds(report, recipe))
    plots.curves(pictures["curves"], report, name)
    plots.timing(pictures["timing"], report, recipe, name)
    out.print(
        Panel(
            escape(report.sample or "none: the model is not finite"),
            title="generated over the KV cache",
            title_align="left",
        )
    )
    out.print(f"wrote {pictures['curves']} and {pictures['timing']}")
    _conclude(report, time.perf_counter() - began)
    out.print(_shows(report, recipe, where, name))
    if not report.passed:
        raise typer.Exit(1)


def _introduce(recipe: "Recipe", source: "Text", where: "torch.device") -> None:
    import torch

    from heedful.demo import training

    size = recipe.size
    dtype = str(recipe.dtype).removeprefix("torch.")
    place = f"{torch.get_num_threads()} CPU thread(s)" if where.type == "cpu" else str(where)
    backend = f"backend={recipe.backend!r}" if recipe.backend else "the planner's choice"
    characters = len(source.train) + len(source.held_out)
    out.print(
        f"A GPT of {size.layers} layers, {size.heads} heads of {size.head_dim},"
        f" {size.context} characters of context, {dtype} on {place}, learns the"
        f" {characters:,} characters of Python's own help (pydoc_data.topics),"
        f" {recipe.steps} steps of {recipe.batch} x {size.context}.\n"
        f"[bold]heedful[/] ({backend}), [bold]SDPA[/], and a [bold]control[/] that measures the"
        " noise take turns, step by step, on the same batches from the same weights.\n"
    )
    if where.type == "cpu":
        minutes = max(1, round(_MINUTES_ON_A_CPU * recipe.steps / training.ON_CPU.steps))
        out.print(
            f"This takes about {minutes} min on two idle cores, longer beside others' work.\n"
        )
    else:
        out.print("The first step compiles kernels; the bar then says what is left.\n")


def _train(job, recipe: "Recipe", source: "Text", where: "torch.device") -> "Report":
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=out) as progress:
        task = progress.add_task("", total=recipe.steps)

        def on_step(step, runs):
            words = "  ".join(
                f"{name} {runs[name].losses[-1]:.3f}" for name in (job.OURS, job.THEIRS)
            )
            progress.update(task, completed=step, description=f"loss: {words}")

        return job.run(recipe, source, where, on_step)


def _losses(report: "Report") -> Table:
    from heedful.demo.agreement import differences
    from heedful.demo.job import CONTROL, OURS, THEIRS

    losses = {name: run.losses for name, run in report.runs.items()}
    apart = differences(losses[OURS], losses[THEIRS])
    noise = differences(losses[CONTROL], losses[THEIRS])
    table = Table(title="Training loss, nats a character", title_justify="left")
    for name in ("step", OURS, THEIRS, "apart", "control and SDPA apart"):
        table.add_column(name, justify="right")
    count = len(apart)
    for step in sorted({1 + (count - 1) * row // (_ROWS - 1) for row in range(_ROWS)}):
        index = step - 1
        cells = (f"{losses[OURS][index]:.6f}", f"{losses[THEIRS][index]:.6f}")
        table.add_row(str(step), *cells, f"{apart[index]:.1e}", f"{noise[index]:.1e}")
    return table


def _speeds(report: "Report", recipe: "Recipe") -> Table:
    from heedful.demo.job import OURS, THEIRS

    table = Table(title="Speed of training, by the median step", title_justify="left")
    for name in ("", "tokens/s", "ms a step"):
        table.add_column(name, justify="right")
    for name in (OURS, THEIRS):
        speed = report.runs[name].tokens_per_s(recipe)
        table.add_row(name, f"{speed:,.0f}", f"{1e3 * recipe.tokens_a_step / speed:.1f}")
    return table


def _conclude(report: "Report", seconds: float) -> None:
    worst = report.agreement.worst
    verdict = "[bold green]agree[/]" if report.agreement.agrees else "[bold red]DISAGREE[/]"
    out.print(
        f"The curves {verdict}. Apart they may be three times what a control is from SDPA, plus the"
        " rounding of the losses, over each tenth of the steps and all before it; the control is"
        " SDPA's unfused math with weights off by one rounding. Closest to that bound, over the"
        f" first {worst.steps} steps: at most {worst.apart.largest:.1e} apart"
        f" (RMS {worst.apart.rms:.1e}), allowed {worst.bound.largest:.1e}"
        f" (RMS {worst.bound.rms:.1e})."
    )
    learned = "[bold green]learned[/]" if report.learned else "[bold red]learned NOTHING[/]"
    out.print(
        f"The model {learned}: {report.held_out:.3f} nats a character on text it never saw;"
        f" character frequencies alone give {report.unigram:.3f}. {seconds:.0f} s in all."
    )


def _shows(report: "Report", recipe: "Recipe", where: "torch.device", name: str) -> str:
    """The findings and the gaps, for those who have read nothing else."""
    from heedful.demo.job import OURS, THEIRS

    if not report.passed:
        return "[bold red]This shows a fault[/]: please report it with the lines above."
    same = "[bold]This shows[/] that a model trains with heedful as it does with SDPA, to rounding"
    if where.type == "cpu":
        return (
            f"{same}, and generates text over a KV cache. It shows nothing of speed: heedful's"
            " kernels for GPUs do not run on a CPU, and these are the tiles that stand in for them."
        )
    ours, theirs = (report.runs[run].tokens_per_s(recipe) for run in (OURS, THEIRS))
    return (
        f"{same}, and how fast this small model does on {escape(name)}: {ours / theirs:.2f} times"
        " SDPA's tokens a second. Attention is a small part of it; heedful bench times attention."
    )
