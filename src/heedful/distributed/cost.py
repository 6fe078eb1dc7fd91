"""Estimates the time of a strategy's forward from tiles, rows and two rates.

Rates are those of H100s and H200s that NVLink joins. On other machines the times are wrong, but the
choice hardly changes: it depends on how many bytes are sent while no kernel runs.
"""

from heedful.distributed.layouts import BLOCK, Layout, Mask
from heedful.distributed.schedules import gathered

# FLOP/s of the forward, and bytes/s that a device receives from another.
FLOPS = 650e12
LINK = 250e9
# A collective's own time, in seconds.
LATENCY = 30e-6


def gather(
    layout: Layout, mask: Mask, heads: tuple[int, int], dims: tuple[int, int], size: int
) -> float:
    """Seconds of the slowest rank: the first KV head's keys are waited for, the others arrive
    while a kernel runs."""
    slowest = 0.0
    tiles = layout.tiles(mask)
    for rank, work in enumerate(tiles):
        rows = sum(gathered(layout, mask, rank).received)
        arrive = rows * sum(dims) * size / LINK
        compute = _compute(work, heads[0], dims)
        rest = max(compute, arrive * (heads[1] - 1))
        slowest = max(slowest, LATENCY + arrive + rest)
    return slowest


def heads(
    layout: Layout, mask: Mask, heads: tuple[int, int], dims: tuple[int, int], size: int
) -> float:
    """Seconds of the slowest rank: q, k and v are waited for, then out."""
    ranks = len(layout.shards)
    foreign = layout.starts[-1] * (ranks - 1) / ranks
    query = heads[0] / ranks * dims[0]
    keys = max(1.0, heads[1] / ranks) * sum(dims)
    out = heads[0] / ranks * dims[1]
    arrive = foreign * (query + keys + out) * size / LINK
    return 2 * LATENCY + arrive + _compute(sum(layout.tiles(mask)) / ranks, heads[0], dims)


def _compute(tiles: float, heads_q: int, dims: tuple[int, int]) -> float:
    return tiles * BLOCK * BLOCK * 2 * sum(dims) * heads_q / FLOPS
