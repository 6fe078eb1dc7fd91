"""Inspections as text tables, one column per kernel, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from heedful.emulator.clock.grid import Prediction
from heedful.inspector.inspection import Inspection
from heedful.inspector.mix import Mix
from heedful.inspector.nvidia import NvidiaInspection, Sass

_LOOP_ROWS = ("mfma", "mfma_slots", "valu", "valu_slots", "exp", "salu", "lds", "lds_bytes")
_LOOP_ROWS += ("lds_slots", "vmem", "vmem_bytes", "dma", "transposed", "waits", "nops")
# These figures are for the loop itself, whatever the number of tiles of an iteration.
_LOOP_FACTS = ("barriers", "drains", "spills")


def _number(value: float) -> str:
    return f"{value:g}" if value == int(value) else f"{value:.1f}"


def _resource_rows(inspections: Sequence[Inspection]) -> list[list[str]]:
    def row(name, get):
        return [name, *(str(get(i.resources)) for i in inspections)]

    return [
        row("target", lambda r: r.arch),
        row("VGPR + AGPR", lambda r: f"{r.vgprs - r.agprs} + {r.agprs}"),
        row("SGPR", lambda r: r.sgprs),
        row("spilled VGPR, SGPR", lambda r: f"{r.vgpr_spills}, {r.sgpr_spills}"),
        row("scratch bytes per lane", lambda r: r.scratch_bytes),
        row("LDS bytes", lambda r: f"{r.lds_bytes} of {r.lds_limit}"),
        row("waves per workgroup", lambda r: r.waves),
        row(
            "waves per SIMD",
            lambda r: f"{_number(r.occupancy().waves)} ({r.occupancy().limit})",
        ),
        row("code bytes", lambda r: r.code_bytes),
    ]


def _loop_rows(inspections: Sequence[Inspection]) -> list[list[str]]:
    def cell(i: Inspection, name: str, divisor: int) -> str:
        return "-" if i.loop is None else _number(getattr(i.loop, name) / divisor)

    rows = [[n.replace("_", " "), *(cell(i, n, i.tiles) for i in inspections)] for n in _LOOP_ROWS]
    rows += [[n, *(cell(i, n, 1) for i in inspections)] for n in _LOOP_FACTS]
    for title, get in (
        ("bound", lambda m, t: f"{m.bound[0]} {_number(m.bound[1] / t)}"),
        ("MFMA ceiling", lambda m, t: f"{m.mfma_ceiling:.0%}"),
    ):
        cells = (get(i.loop, i.tiles) if i.loop else "-" for i in inspections)
        rows.append([title, *cells])
    return rows


def align(rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Rows as text: the first column to the left, the others to the right; in several blocks, each
    with the first column, where they do not fit into a width."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    blocks: list[list[int]] = [[]]
    for i, widest in enumerate(widths[1:], 1):
        taken = widths[0] + sum(2 + widths[other] for other in blocks[-1])
        if width is not None and blocks[-1] and taken + 2 + widest > width:
            blocks.append([])
        blocks[-1].append(i)
    return "\n\n".join(_block(rows, widths, columns) for columns in blocks)


def _block(rows: Sequence[Sequence[str]], widths: Sequence[int], columns: Sequence[int]) -> str:
    lines = []
    for row in rows:
        cells = (row[i].rjust(widths[i]) for i in columns)
        lines.append("  ".join((row[0].ljust(widths[0]), *cells)).rstrip())
    return "\n".join(lines)


def table(inspections: Sequence[Inspection], width: int | None = None) -> str:
    """Resources and hot loop, kernels side by side; loop figures are per tile and wave."""
    head = ["", *(i.label for i in inspections)]
    title = ["hot loop, per tile and wave", *("" for _ in inspections)]
    return align([head, *_resource_rows(inspections), title, *_loop_rows(inspections)], width)


def segments_table(inspections: Sequence[Inspection], width: int | None = None) -> str:
    """The hot loops cut at their barriers, segment against segment."""
    names = ("mfma_slots", "valu_slots", "exp", "lds_bytes", "dma", "transposed", "drains")
    rows = [["segment", *(f"{i.label}: {n.replace('_', ' ')}" for n in names for i in inspections)]]
    for index in range(max((len(i.segments) for i in inspections), default=0)):
        row = [str(index)]
        for name in names:
            for i in inspections:
                here = index < len(i.segments)
                row.append(_number(getattr(i.segments[index], name)) if here else "-")
        rows.append(row)
    return align(rows, width)


_UNITS = {"mfma": "MFMA", "valu": "VALU", "lds": "LDS", "memory": "memory", "atomic": "atomics"}


def times_table(launches: Sequence[tuple[str, Prediction]], width: int | None = None) -> str:
    """Predicted times of launches by name, side by side, and where their clocks go: for which share
    of them each unit is busy, and what a wave waits for, on average."""
    told = [prediction for _, prediction in launches]

    def row(name, get):
        return [name, *(get(p) for p in told)]

    def share(clocks: float, p: Prediction) -> str:
        return f"{100 * clocks / max(p.timing.clocks, 1):.0f} %"

    def waits(p: Prediction) -> dict[str, float]:
        return {what: n / max(p.timing.waves, 1) for what, n in p.timing.stalls.items()}

    rows = [["predicted", *(name for name, _ in launches)]]
    rows.append(row("microseconds", lambda p: f"{1e6 * p.seconds:.1f}"))
    rows.append(row("at the highest clock", lambda p: f"{1e6 * p.range[0]:.1f}"))
    rows.append(row("at the lowest clock", lambda p: f"{1e6 * p.range[1]:.1f}"))
    rows.append(row("GHz, by its power", lambda p: f"{p.clock_hz / 1e9:.2f}"))
    rows.append(row("clocks", lambda p: f"{p.clocks:.0f}"))
    rows.append(row("workgroups on a unit", lambda p: str(p.resident)))
    for unit, name in _UNITS.items():
        rows.append(row(f"busy: {name}", lambda p, unit=unit: share(p.timing.busy[unit], p)))
    reasons = sorted({what for p in told for what in p.timing.stalls})
    for what in sorted(reasons, key=lambda x: -max(waits(p).get(x, 0) / p.clocks for p in told)):
        name = f"a wave waits: {what.removeprefix('wait for ')}"
        rows.append(row(name, lambda p, what=what: share(waits(p).get(what, 0), p)))
    rest = "it issues, pauses or has ended"
    rows.append(row(rest, lambda p: share(p.timing.clocks - sum(waits(p).values()), p)))
    return align(rows, width)


def _mix_facts(mix: Mix | None) -> dict | None:
    if mix is None:
        return None
    facts = asdict(mix)
    facts["counts"] = dict(mix.counts.most_common())
    bound, slots = mix.bound
    return facts | {
        "lds_slots": mix.lds_slots,
        "bound": bound,
        "bound_slots": slots,
        "mfma_ceiling": mix.mfma_ceiling,
    }


def _amd_facts(i: Inspection) -> dict:
    return {
        "name": i.name,
        "label": i.label,
        "resources": asdict(i.resources),
        "waves_per_simd": i.resources.occupancy().waves,
        "occupancy_limit": i.resources.occupancy().limit,
        "tiles": i.tiles,
        "whole": _mix_facts(i.whole),
        "loop": _mix_facts(i.loop),
        "segments": [_mix_facts(s) for s in i.segments],
    }


def _sass_facts(sass: Sass | None) -> dict | None:
    if sass is None:
        return None
    counts = dict(sass.counts.most_common())
    return {**asdict(sass), "counts": counts, "mufu_cycles": sass.mufu_cycles}


def to_json(
    inspections: Sequence[Inspection | NvidiaInspection], times: Sequence[Prediction] = ()
) -> str:
    """Everything, for machines; times: those of the first inspections."""
    facts = []
    for i in inspections:
        if isinstance(i, Inspection):
            facts.append(_amd_facts(i))
        else:
            facts.append(asdict(i) | {"whole": _sass_facts(i.whole), "loop": _sass_facts(i.loop)})
    for fact, prediction in zip(facts, times, strict=False):
        fact["time"] = prediction.facts()
    return json.dumps(facts, indent=2)
