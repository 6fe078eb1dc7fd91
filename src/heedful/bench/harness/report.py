"""The measurements, as tables for the screen, JSON lines and a picture."""

import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from heedful.bench.harness.cases import GROUPS, Case
from heedful.bench.harness.check import OUTSIDE
from heedful.bench.harness.run import Outcome, kv_gb_per_s
from heedful.bench.harness.timing import Spread

# One colour a peer on every picture; heedful stands out.
_COLOURS = {
    "heedful": "#d1495b",
    "bf16": "#edae49",
    "flash": "#8d99ae",
    "cudnn": "#2e4057",
    "efficient": "#b8c4d6",
    "math": "#d9d9d9",
    "sdpa": "#66839e",
    "flex": "#8fbc94",
    "flash_attn": "#b497bd",
    "fa3": "#7b5ea7",
    "fa4": "#4b3f8f",
    "flashinfer": "#e0a458",
}
_SPARE_COLOURS = ("#e76f51", "#f4a261", "#c9184a", "#a44a3f")


def unit(case: Case) -> str:
    """The figures by which a case is judged."""
    if case.host:
        return "us on the host"
    if case.group == "decode":
        return "us"
    return "GFLOP/s" if case.group == "cpu" else "TFLOP/s"


def in_unit(case: Case, time_us: float) -> float:
    """A time as a speed, where that is what the case is judged by."""
    flops_a_us = {"TFLOP/s": 1e6, "GFLOP/s": 1e3}.get(unit(case))
    return case.flops() / time_us / flops_a_us if flops_a_us else time_us


def table(group: str, outcomes: list[Outcome], width: int | None = None) -> Table:
    """One group's figures: a row a case, a column a peer; ratios to the base with their range. If
    that is wider than `width` characters, a row a case and peer."""
    case = outcomes[0].case
    bases = sorted({o.base for o in outcomes if o.base})
    over = f"; ratios: speed over {', '.join(bases)}, median (range of rounds)" if bases else ""
    result = Table(
        title=f"{group}: {GROUPS[group]}, {unit(case)}{over}",
        title_justify="left",
        title_style="bold",
    )
    peers = [f.peer for f in outcomes[0].figures if any(_timed(o, f.peer) for o in outcomes)]
    longest = {peer: max(_cell_width(o, peer) for o in outcomes) for peer in peers}
    cells = (max(len(peer), cell) for peer, cell in longest.items())
    wide = max(len(o.case.name) for o in outcomes) + sum(cells) + 3 * len(peers) + 4
    if width is not None and wide > width:
        return _narrow(result, outcomes, peers)
    result.add_column("case")
    for peer in peers:
        result.add_column(peer, justify="right")
    for outcome in outcomes:
        cells = (_cell(outcome, peer) for peer in peers)
        result.add_row(outcome.case.name, *cells)
    return result


def _narrow(result: Table, outcomes: list[Outcome], peers: list[str]) -> Table:
    """A row a case and peer, the case above its peers."""
    for name in ("case and peer", "figure", "ratio"):
        result.add_column(name, justify="left" if name == "case and peer" else "right")
    for outcome in outcomes:
        result.add_row(outcome.case.name, "", "")
        for number, peer in enumerate(peers, 1):
            value, _, ratio = _cell(outcome, peer).partition("\n")
            result.add_row(f"  {peer}", value, ratio, end_section=number == len(peers))
    return result


def _cell_width(outcome: Outcome, peer: str) -> int:
    return max(len(re.sub(r"\[.*?\]", "", line)) for line in _cell(outcome, peer).splitlines())


def _digits(number: float) -> str:
    """Three or four figures, no more than the measurement is worth."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _timed(outcome: Outcome, peer: str) -> bool:
    return outcome.figure(peer).time_us is not None


def _drawn(outcome: Outcome, peer: str) -> bool:
    """Whether a picture has something to show of a peer: a time, or that its result was wrong."""
    return _timed(outcome, peer) or outcome.figure(peer).wrong


def _cell(outcome: Outcome, peer: str) -> str:
    figure = outcome.figure(peer)
    if figure.wrong:
        return f"[bold red]{OUTSIDE if OUTSIDE in (figure.missing or '') else 'wrong'}[/]"
    if figure.time_us is None:
        return "-"
    text = _digits(in_unit(outcome.case, figure.time_us.median))
    if outcome.case.group == "decode":
        text += f" ({kv_gb_per_s(outcome.case, figure.time_us):.0f} GB/s)"
    ratio = figure.ratio
    if ratio is not None and peer != outcome.base:
        text += f"\n{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    return text


def line(outcome: Outcome) -> str:
    """A case in one line, for logs."""
    cells = (
        f"{figure.peer} {_cell(outcome, figure.peer)}".replace("\n", " x ")
        for figure in outcome.figures
        if figure.time_us is not None or figure.wrong
    )
    return f"{outcome.case.name} [{unit(outcome.case)}]: {'; '.join(cells)}"


def absences(outcomes: Iterable[Outcome]) -> list[str]:
    """Why figures are missing, each reason once, with the cases it holds for."""
    reasons: dict[tuple[str, str], list[str]] = {}
    count = 0
    for outcome in outcomes:
        count += 1
        for figure in outcome.figures:
            if figure.missing:
                reasons.setdefault((figure.peer, figure.missing), []).append(outcome.case.name)
    return [
        f"[bold]{peer}[/]: {escape(reason)}"
        + (f" [dim]({_some(names)})[/]" if len(names) < count else "")
        for (peer, reason), names in reasons.items()
    ]


def _some(names: list[str]) -> str:
    return "; ".join(names[:2]) + (f"; {len(names) - 2} more" if len(names) > 2 else "")


def summary(outcomes: list[Outcome], peer: str = "heedful") -> list[str]:
    """How a peer stands against each other and against the best of them in every case."""
    lines = []
    others = dict.fromkeys(f.peer for o in outcomes for f in o.figures if f.peer != peer)
    for other in others:
        if line := _against(outcomes, peer, [other], f"{peer} / {other}"):
            lines.append(line)
    rivals = [name for name in others if not name.startswith("heedful")]
    if len(rivals) > 1 and (line := _against(outcomes, peer, rivals, f"{peer} / best peer")):
        lines.append(line)
    return lines


def _against(outcomes: list[Outcome], peer: str, rivals: list[str], words: str) -> str | None:
    speeds = {}
    for outcome in outcomes:
        ours = outcome.figure(peer).time_us
        theirs = [time.median for name in rivals if (time := outcome.figure(name).time_us)]
        if ours and theirs:
            speeds[outcome.case.name] = min(theirs) / ours.median
    if not speeds:
        return None
    mean = math.exp(sum(math.log(speed) for speed in speeds.values()) / len(speeds))
    worst = min(speeds, key=speeds.__getitem__)
    return (
        f"{words}: geometric mean {mean:.3f} over {len(speeds)} cases,"
        f" worst {speeds[worst]:.3f} ({worst})"
    )


def footer(facts: dict) -> str:
    """Where, with what and when figures were made: of `surroundings`, in one line."""
    words = (
        facts["device"],
        f"driver {facts['driver'] or 'none'}",
        f"torch {facts['versions']['torch']}",
        facts["compiler"] or "no Triton",
        f"heedful {facts['versions']['heedful']} at commit {facts['commit'] or 'unknown'}",
        facts["date"],
    )
    return ", ".join(words)


def append_json_lines(path: Path, records: Iterator[dict]) -> None:
    """Adds one line a record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as lines:
        for record in records:
            lines.write(json.dumps(record) + "\n")


def picture(path: Path, outcomes: list[Outcome], footer: str) -> None:
    """Bars of every peer, a panel for each kind of case; error bars are the range of rounds."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import patches, pyplot

    panels: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        panels.setdefault(_panel(outcome.case), []).append(outcome)
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(7.5 * columns, 3.6 * rows + 0.8), squeeze=False, dpi=130
    )
    peers = [f.peer for f in outcomes[0].figures if any(_drawn(o, f.peer) for o in outcomes)]
    for axis, (title, members) in zip(axes.flat, panels.items(), strict=False):
        _bars(axis, ", ".join(title), members, peers)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    handles = [patches.Patch(color=_colour(peer, peers)) for peer in peers]
    if peers:
        figure.legend(handles, peers, loc="upper center", ncols=len(peers), frameon=False)
    figure.text(0.01, 0.006, footer, fontsize=7, color="#666666")
    figure.tight_layout(rect=(0, 0.02, 1, 1 - 0.4 / (3.6 * rows + 0.8)))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _panel(case: Case) -> tuple[str, str]:
    p = case.problem
    if case.host:
        return ("host time of a call", f"{p.batch} x {p.seqlen_q}, head dim {p.head_dim}")
    mask = "causal" if p.mask.causal else "full"
    if case.group in ("decode", "splits"):
        return (case.group, f"head dim {p.head_dim}")
    return (case.direction, mask if case.group == "cpu" else f"head dim {p.head_dim}, {mask}")


def _label(case: Case) -> str:
    if case.host:
        if case.paged:
            return "decode\nover pages"
        more = "\nwith grad" if case.grad and case.direction == "forward" else ""
        return case.direction + more + "\ncompiled" * case.compiled
    p = case.problem
    lengths = f"{p.seqlen_q}" if p.seqlen_q == p.seqlen_k else f"{p.seqlen_q} x {p.seqlen_k}"
    dim = f" of {p.head_dim}" if case.group == "cpu" else ""
    return f"{p.batch} x {lengths}\nheads {p.heads_q}/{p.heads_k}{dim}"


def _bars(axis, title: str, outcomes: list[Outcome], peers: list[str]) -> None:
    present = [peer for peer in peers if any(_drawn(o, peer) for o in outcomes)]
    width = 0.82 / max(len(present), 1)
    for place, peer in enumerate(present):
        for column, outcome in enumerate(outcomes):
            figure = outcome.figure(peer)
            x = column + (place - (len(present) - 1) / 2) * width
            if figure.wrong:
                _failed(axis, x, peer)
            if figure.time_us is None:
                continue
            height, below, above = _range(outcome.case, figure.time_us)
            axis.bar(x, height, width * 0.92, color=_colour(peer, peers))
            axis.errorbar(x, height, yerr=[[below], [above]], color="#333333", capsize=2)
            axis.annotate(
                _digits(height),
                (x, height + above),
                (0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=6.5,
                rotation=90 if len(present) * len(outcomes) > 12 else 0,
            )
    axis.set_title(title, loc="left", fontweight="bold")
    axis.set_xticks(range(len(outcomes)), [_label(o.case) for o in outcomes], fontsize=8)
    axis.set_ylabel(unit(outcomes[0].case))
    if unit(outcomes[0].case) == "us" and len(outcomes) > 1:
        axis.set_yscale("log")
    axis.margins(y=0.15)
    axis.grid(axis="y", color="#e5e5e5")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _failed(axis, x: float, peer: str) -> None:
    """Says so where the bar of a wrong result would stand."""
    axis.text(
        x,
        0.02,
        f"{peer} failed",
        transform=axis.get_xaxis_transform(),
        color="#c00000",
        fontsize=7,
        fontweight="bold",
        ha="center",
        va="bottom",
        rotation=90,
    )


def _range(case: Case, time: Spread) -> tuple[float, float, float]:
    """The median; how far below it is the lowest round, and how far above the highest, for a
    bar."""
    low, middle, high = sorted(in_unit(case, us) for us in time)
    return middle, middle - low, high - middle


def _colour(peer: str, peers: list[str]) -> str:
    if peer in _COLOURS:
        return _COLOURS[peer]
    spare = [name for name in peers if name not in _COLOURS]
    return _SPARE_COLOURS[spare.index(peer) % len(_SPARE_COLOURS)]
