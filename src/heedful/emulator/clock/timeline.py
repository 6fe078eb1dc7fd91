"""A picture of what the waves of a compute unit issue, clock by clock, as SVG."""

from __future__ import annotations

from heedful.emulator.clock.replay import Timing

_COLOURS = {
    "mfma": "#b2182b",
    "valu": "#2166ac",
    "lds": "#1b7837",
    "memory": "#762a83",
    "atomic": "#e08214",
    "salu": "#999999",
    "branch": "#555555",
    "scalar-load": "#c2a5cf",
}
_ROW, _LEFT, _WIDTH = 22, 70, 1200
# By kind the height of its bar: what runs beside something else leaves room for it.
_HEIGHTS = {"mfma": 8, "valu": 8}


def timeline(timing: Timing, window: float) -> str:
    """One row a wave: matrix work above, vector work below it, all else between.

    Args:
        timing: with events. window: clocks from the start that are drawn.
    """
    waves = sorted({wave for wave, *_ in timing.events})
    height = _ROW * (len(waves) + 2)
    scale = _WIDTH / window
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 10}" height="{height}" '
        'font-family="sans-serif" font-size="11">'
    ]
    for row, wave in enumerate(waves):
        parts.append(f'<text x="4" y="{_ROW * row + 14}">wave {wave}</text>')
    for wave, kind, start, end in timing.events:
        row = waves.index(wave)
        top = _ROW * row + {"mfma": 2, "valu": 12}.get(kind, 8)
        width = max((min(end, window) - start) * scale, 0.5)
        if kind in ("lds", "memory", "atomic", "scalar-load"):
            width = max(4 * scale, 0.5)  # when it was issued; it ends much later
        parts.append(
            f'<rect x="{_LEFT + start * scale:.1f}" y="{top}" width="{width:.1f}" '
            f'height="{_HEIGHTS.get(kind, 6)}" fill="{_COLOURS.get(kind, "#000000")}"/>'
        )
    for i, (kind, colour) in enumerate(_COLOURS.items()):
        x, y = _LEFT + 140 * i, _ROW * (len(waves) + 1)
        parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="{y + 9}">{kind}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
