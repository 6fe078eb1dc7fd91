"""A picture of what the waves of a compute unit issue, clock by clock. Needs matplotlib."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from heedful.emulator.clock.constants import SLOT
from heedful.emulator.clock.replay import Timing

# By kind its colour and where its bar lies in the row of a wave, from the top: matrix work above,
# vector work below it, all else between.
_KINDS = {
    "mfma": ("#b2182b", 0.04, 0.38),
    "valu": ("#2166ac", 0.58, 0.38),
    "lds": ("#1b7837", 0.36, 0.28),
    "memory": ("#762a83", 0.36, 0.28),
    "atomic": ("#e08214", 0.36, 0.28),
    "scalar-load": ("#c2a5cf", 0.36, 0.28),
    "salu": ("#999999", 0.36, 0.28),
    "branch": ("#555555", 0.36, 0.28),
}
# These are drawn where they are issued; they end much later.
_SENT = ("lds", "memory", "atomic", "scalar-load")


def draw(
    timing: Timing, span: tuple[float, float], path: str | Path, title: str = "", simds: int = 4
):
    """Write a picture with one row a wave, by SIMD; what is left white is waiting.

    Args:
        timing: with events. span: the first clock and the last that are drawn.
        path: its suffix says the format, as .svg, .png, .pdf.

    Raises:
        ValueError: no such format.
    """
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import patches, pyplot

    bars: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for wave, kind, start, end in timing.events:
        end = start + SLOT if kind in _SENT else end
        if end > span[0] and start < span[1]:
            bars[wave, kind].append((start, end - start))
    waves = sorted({wave for wave, _ in bars}, key=lambda w: (w % simds, w))
    figure, axes = pyplot.subplots(figsize=(14, 1.2 + 0.26 * len(waves)), dpi=110)
    for (wave, kind), spans in bars.items():
        colour, top, height = _KINDS[kind]
        axes.broken_barh(spans, (waves.index(wave) + top, height), facecolors=colour)
    axes.set(xlim=span, ylim=(len(waves), 0), xlabel="clocks", title=title)
    axes.set_yticks([i + 0.5 for i in range(len(waves))])
    axes.set_yticklabels([f"SIMD {w % simds}, wave {w}" for w in waves], fontsize=7)
    shown = [kind for kind in _KINDS if any(k == kind for _, k in bars)]
    handles = [patches.Patch(color=_KINDS[kind][0], label=kind) for kind in shown]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.tight_layout()
    try:
        figure.savefig(path)
    finally:
        pyplot.close(figure)
