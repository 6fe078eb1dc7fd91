"""The demo's two pictures."""

import math
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

from heedful.demo.agreement import differences
from heedful.demo.job import CONTROL, OURS, THEIRS, Report
from heedful.demo.training import Recipe

_COLOURS = {OURS: "#d1495b", THEIRS: "#2e4057", CONTROL: "#8d99ae"}


def curves(path: Path, report: Report, device: str) -> None:
    """Both loss curves, and below them how far they are apart beside the noise."""
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(8, 7), dpi=130, sharex=True, height_ratios=(3, 2)
    )
    losses = {name: run.losses for name, run in report.runs.items()}
    steps = range(1, len(losses[OURS]) + 1)
    top.plot(steps, losses[THEIRS], color=_COLOURS[THEIRS], lw=4, alpha=0.35, label=THEIRS)
    top.plot(steps, losses[OURS], color=_COLOURS[OURS], lw=1.3, label=OURS)
    top.axhline(report.unigram, color="#999999", lw=0.9, ls=":")
    top.annotate(
        "character frequencies alone",
        (steps[-1], report.unigram),
        (0, 4),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color="#777777",
    )
    top.set_ylabel("training loss, nats a character")
    top.legend(frameon=False)
    for name, words in ((CONTROL, "a control off by one rounding"), (OURS, OURS)):
        # A logarithmic axis has no 0: equal losses leave a gap.
        apart = [d or math.nan for d in differences(losses[name], losses[THEIRS])]
        bottom.plot(steps, apart, color=_COLOURS[name], lw=1.2, label=f"{words} and {THEIRS}")
    parts = report.agreement.parts
    edges = [1, *(part.steps for part in parts)]
    bounds = [part.bound.largest for part in parts]
    bottom.stairs(bounds, edges, baseline=None, color="#777777", lw=0.9, ls="--", label="bound")
    bottom.set_yscale("log")
    bottom.set_ylabel("losses apart, nats")
    bottom.set_xlabel("step")
    bottom.legend(frameon=False, fontsize=8)
    _finish(figure, (top, bottom), path, f"A GPT trained with {OURS} and with {THEIRS}", device)


def timing(path: Path, report: Report, recipe: Recipe, device: str) -> None:
    """Tokens a second, and every step's time: the runs took turns, step by step."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.5, 3.8), dpi=130, width_ratios=(1, 2))
    for place, name in enumerate((OURS, THEIRS)):
        run = report.runs[name]
        speed = run.tokens_per_s(recipe)
        left.bar(place, speed, 0.6, color=_COLOURS[name], zorder=2)
        left.annotate(
            f"{speed:,.0f}", (place, speed), (0, 3), textcoords="offset points", ha="center"
        )
        milliseconds = [1e3 * s for s in run.seconds[1:]]
        steps = range(2, len(run.seconds) + 1)
        right.plot(steps, milliseconds, color=_COLOURS[name], lw=1, label=name)
    left.set_xticks((0, 1), (OURS, THEIRS))
    left.set_ylabel("tokens a second, by the median step")
    left.margins(y=0.15)
    right.set_ylabel("ms a step")
    right.set_xlabel("step (the first, which compiles, left out)")
    right.set_ylim(bottom=0)
    right.legend(frameon=False)
    _finish(figure, (left, right), path, "Speed of training, step by step", device)


def _finish(figure, axes, path: Path, title: str, device: str) -> None:
    figure.suptitle(f"{title}, on {device}", x=0.02, ha="left", fontweight="bold", fontsize=11)
    for axis in axes:
        axis.grid(axis="y", color="#e8e8e8", zorder=0)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
