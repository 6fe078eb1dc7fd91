"""A picture of one turn of the hot loop: when each unit is busy if one wave runs alone.

Instructions issue in order, one a slot; an MFMA starts when the matrix unit is free, holds vector
instructions off while it reads its sources, and runs beside what follows. Latencies of memory are
left out: it shows structure, not time on the clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from heedful.emulator.checks.waitstates import Shape
from heedful.emulator.clock.work import work_of
from heedful.emulator.program.asm import Instruction
from heedful.emulator.program.dataflow import flow
from heedful.inspector.inspection import Inspection
from heedful.inspector.mix import measure

_ROWS = ("MFMA", "VALU", "LDS", "VMEM", "SALU", "wait")
_COLORS = {
    "MFMA": "#c0392b",
    "VALU": "#2980b9",
    "LDS": "#27ae60",
    "VMEM": "#8e44ad",
    "SALU": "#95a5a6",
    "wait": "#f39c12",
}
_SCALE, _HEIGHT, _LEFT, _TOP = 2, 22, 60, 24


def _unit(instruction: Instruction) -> str:
    name = instruction.mnemonic
    if name.startswith("v_mfma"):
        return "MFMA"
    if name.startswith("v_"):
        return "VALU"
    if name.startswith("ds_"):
        return "LDS"
    if name in ("s_waitcnt", "s_barrier", "s_nop"):
        return "wait"
    return "SALU" if name.startswith("s_") else "VMEM"


def events(inspection: Inspection) -> Iterator[tuple[str, float, float, Instruction]]:
    """(unit, start, length, instruction) of each instruction of the hot loop, in slots."""
    arch, now, matrix_free, vector_free = inspection.resources.arch, 0.0, 0.0, 0.0
    for instruction in inspection.loop_code:
        unit = _unit(instruction)
        if unit == "MFMA":
            start = max(now, matrix_free)
            length = float(Shape(instruction, flow(instruction), arch).passes)
            matrix_free, now = start + length, start + 1
            vector_free = start + work_of(instruction.text, arch).hold
        else:
            start = max(now, vector_free) if unit == "VALU" else now
            length = float(measure([instruction], arch).valu_slots or 1)
            now = start + length
        yield unit, start, length, instruction


def timeline_svg(inspection: Inspection) -> str:
    """The timeline as an SVG document; hovering over a box shows its instruction."""
    boxes, end = [], 1.0
    for unit, start, length, instruction in events(inspection):
        end = max(end, start + length)
        y = _TOP + _ROWS.index(unit) * _HEIGHT
        boxes.append(
            f'<rect x="{_LEFT + start * _SCALE:g}" y="{y}" width="{length * _SCALE:g}" '
            f'height="{_HEIGHT - 4}" fill="{_COLORS[unit]}" stroke="white" stroke-width="0.2">'
            f"<title>{escape(instruction.where())}</title></rect>"
        )
    labels = [
        f'<text x="4" y="{_TOP + i * _HEIGHT + 13}" font-size="12">{name}</text>'
        for i, name in enumerate(_ROWS)
    ]
    width, height = _LEFT + end * _SCALE + 10, _TOP + len(_ROWS) * _HEIGHT + 6
    title = f'<text x="4" y="14" font-size="12">{escape(inspection.label)}: {end:g} slots</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height}" '
        f'font-family="sans-serif">{title}{"".join(labels)}{"".join(boxes)}</svg>\n'
    )
