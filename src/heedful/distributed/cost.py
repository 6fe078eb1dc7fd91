"""Estimates the time of a strategy's forward from tiles, rows and two rates.

Rates are those of H100s and H200s that NVLink joins. On other machines the times are wrong, but the
choice hardly changes: it depends on how many bytes are sent while no kernel runs.
"""

from heedful.distributed.layouts import BLOCK, Layout, Mask
from heedful.distributed.schedules import Schedule, gathered

# FLOP/s of the forward, and bytes/s that a device receives from another.
FLOPS = 650e12
LINK = 250e9
# A collective's own time, in seconds.
LATENCY = 30e-6


def head_groups(
    schedule: Schedule,
    heads: tuple[int, int],
    dims: tuple[int, int],
    size: int,
    backward: bool = False,
) -> list[int]:
    """How many KV heads each group has, in which keys are sent: the first is one head, since
    nothing runs before it has arrived, unless local calls do. In a backward the last one is too:
    nothing runs beside its gradients."""
    arrive = schedule.most_received * sum(dims) * size * heads[1] / LINK
    if arrive < LATENCY or heads[1] == 1:
        return [heads[1]]
    is_hidden = _compute(schedule.least_local, heads[0], dims) >= arrive
    ends = [1] * (not is_hidden), [1] * (backward and heads[1] > 2)
    rest = heads[1] - sum(map(len, ends))
    return [*ends[0], rest, *ends[1]]


def gather(
    layout: Layout, mask: Mask, heads: tuple[int, int], dims: tuple[int, int], size: int
) -> float:
    """Seconds of the slowest rank: the first group's keys are waited for, unless local calls take
    as long; the others arrive while a kernel runs."""
    slowest = 0.0
    for rank, work in enumerate(layout.tiles(mask)):
        schedule = gathered(layout, mask, rank)
        arrive = schedule.rows_received * sum(dims) * size * heads[1] / LINK
        first = arrive * head_groups(schedule, heads, dims, size)[0] / heads[1]
        first = max(0.0, first - _compute(schedule.least_local, heads[0], dims))
        rest = max(_compute(work, heads[0], dims), arrive - first)
        slowest = max(slowest, LATENCY + first + rest)
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
