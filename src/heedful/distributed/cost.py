"""Estimates the time of a strategy's forward from tiles, rows and two rates.

Rates are those of H100s and H200s that NVLink joins. On other machines the times are wrong, but the
choice hardly changes: it depends on how many bytes are sent while no kernel runs.
"""

from math import ceil

from heedful.distributed.layouts import BLOCK, Layout, Mask
from heedful.distributed.schedules import Schedule, gathered

# FLOP/s of the forward, and bytes/s that a device receives from another.
FLOPS = 650e12
LINK = 250e9
# A collective's own time, in seconds.
LATENCY = 30e-6
# Seconds of the host for one group of heads.
HOST = 300e-6


def head_groups(
    schedule: Schedule,
    heads: tuple[int, int],
    dims: tuple[int, int],
    size: int,
    backward: bool = False,
) -> tuple[list[int], bool]:
    """How many KV heads each group has, in which keys are sent, and whether the local calls of each
    rank take longer than all keys. Else the first group is small, since nothing runs before it has
    arrived, but its kernel runs longer than the host needs for the next. In a backward the last
    group is one head: nothing runs beside its gradients."""
    local, remote = (_compute(tiles, heads[0], dims) for tiles in schedule.fewest)
    arrive = schedule.most_received * sum(dims) * size * heads[1] / LINK
    is_hidden = local >= arrive
    if arrive < LATENCY or heads[1] == 1:
        return [heads[1]], is_hidden
    first = heads[1] // 4 if remote == 0 else min(heads[1] // 4, ceil(HOST / remote * heads[1]))
    ends = [max(1, first)] * (not is_hidden), [1] * (backward and heads[1] > 3)
    return [*ends[0], heads[1] - sum(ends[0]) - sum(ends[1]), *ends[1]], is_hidden


def gather(
    layout: Layout, mask: Mask, heads: tuple[int, int], dims: tuple[int, int], size: int
) -> float:
    """Seconds of the slowest rank: the first group's keys are waited for, unless local calls take
    as long; the others arrive while a kernel runs."""
    slowest = 0.0
    for rank, work in enumerate(layout.tiles(mask)):
        schedule = gathered(layout, mask, rank)
        arrive = schedule.rows_received * sum(dims) * size * heads[1] / LINK
        sizes, is_hidden = head_groups(schedule, heads, dims, size)
        first = 0.0 if is_hidden else arrive * sizes[0] / heads[1]
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
