"""Estimates the time of a strategy's forward from tiles, rows and two rates.

Rates are those of H100s and H200s that NVLink joins. On other machines the times are wrong, but the
choice hardly changes: it depends on how many bytes are sent while no kernel runs.
"""

from collections.abc import Sequence
from math import ceil

from heedful.core.base.device import by_name
from heedful.distributed.layouts import BLOCK, LAYOUTS, Layout, Mask, Piece
from heedful.distributed.schedules import Crossing, Schedule, crossing, spread_heads

# FLOP/s of the forward, and bytes/s that a device receives from another: between what 16k and 64k
# tokens had on an H200, and 8 and 32 MiB between two.
FLOPS = 760e12
LINK = 270e9
SMS = by_name("H200").units
# Packing and a collective's own time, in seconds.
LATENCY = 40e-6
# Seconds of the host for one group of heads.
HOST = 300e-6
# Bytes/s of a merge, which reads a part and a sum of 4 bytes and writes the sum.
MEMORY = 3e12


def head_groups(
    needs: Crossing | Schedule,
    heads: tuple[int, int],
    dims: tuple[int, int],
    size: int,
    backward: bool = False,
    replayed: bool = True,
) -> tuple[list[int], bool]:
    """How many KV heads each group has, in which keys are sent, and whether the local calls of each
    rank take longer than all keys. Else the first group is small, since nothing runs before it has
    arrived, but its kernel runs longer than the host needs for the next. In a backward the last
    group is small, too: nothing runs beside its gradients. There both have so many heads that one
    tile of keys takes no longer than all tiles over all SMs. replayed: the host's time costs
    nothing. A forward that is no replay waits for the host to ask for all groups: for few keys it
    has one."""
    local, remote = (compute(tiles, heads[0], dims) for tiles in needs.fewest)
    arrive = needs.most_received * sum(dims) * size * heads[1] / LINK
    is_hidden = local >= arrive
    if arrive < (LATENCY if replayed or backward else HOST) or heads[1] == 1:
        return [heads[1]], is_hidden
    first = heads[1] // 4 if remote == 0 else min(heads[1] // 4, ceil(HOST / remote * heads[1]))
    last = max(1, round(SMS * needs.longest)) if backward and isinstance(needs, Schedule) else 0
    first = max(1, first, last)
    if first + last >= heads[1]:
        return [heads[1]], is_hidden
    ends = [first] * (not is_hidden), [last] * (last > 0)
    return [*ends[0], heads[1] - sum(ends[0]) - sum(ends[1]), *ends[1]], is_hidden


def gather(
    layout: Layout, mask: Mask, heads: tuple[int, int], dims: tuple[int, int], size: int
) -> float:
    """Seconds of the slowest rank: the first group's keys are waited for, unless local calls take
    as long; the others arrive while a kernel runs."""
    slowest, needs = 0.0, crossing(layout, mask)
    sizes, is_hidden = head_groups(needs, heads, dims, size)
    for received, work in zip(needs.received, layout.tiles(mask), strict=True):
        arrive = received * sum(dims) * size * heads[1] / LINK
        first = 0.0 if is_hidden else arrive * sizes[0] / heads[1]
        rest = max(compute(work, heads[0], dims), arrive - first)
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
    return 2 * LATENCY + arrive + compute(sum(layout.tiles(mask)) / ranks, heads[0], dims)


def ring(
    layout: Layout, mask: Mask, heads: tuple[int, int], dims: tuple[int, int], size: int
) -> float:
    """Seconds of the slowest rank: its own keys first, then as many steps as there are other ranks,
    each of which takes as long as its kernels and merge or the next keys."""
    slowest, others = 0.0, len(layout.shards) - 1
    received = crossing(layout, mask).received
    for rank, (rows, work) in enumerate(zip(received, layout.tiles(mask), strict=True)):
        arrive = rows * sum(dims) * size * heads[1] / LINK / max(1, others)
        merge = layout.tokens(rank) * heads[0] * dims[1] * (3 * size + 12) / MEMORY
        step = compute(work, heads[0], dims) / (others + 1)
        slowest = max(slowest, LATENCY + step + others * max(step + merge * (rows > 0), arrive))
    return slowest


def layout_for(lengths: Sequence[int], mask: Mask) -> tuple[str, str]:
    """The layout "auto", and why."""
    if mask.left is not None:
        return "contiguous", "a window sees few keys of other ranks"
    if sum(map(bool, lengths)) > 1:
        return "documents", "short documents stay whole"
    return "zigzag", "one document"


def forwards(
    layout: Layout, mask: Mask, heads_of: tuple[int, int], dims: tuple[int, int], size: int
) -> dict[str, float]:
    """Seconds of a forward by each strategy that can compute it."""
    given = layout, mask, heads_of, dims, size
    found = {"gather": gather(*given), "ring": ring(*given)}
    try:
        spread_heads(*heads_of, len(layout.shards))
    except ValueError:
        return found
    return found | {"heads": heads(*given)}


def predicted(
    lengths: Sequence[int],
    ranks: int,
    mask: Mask,
    heads_of: tuple[int, int],
    dims: tuple[int, int],
    size: int,
) -> list[str]:
    """Lines on a batch over so many ranks, none of which needs to be there."""
    name, why = layout_for(lengths, mask)
    layout = LAYOUTS[name](lengths, ranks, mask)
    tiles = [mask.tiles(Piece(d, 0, length), length) for d, length in enumerate(lengths)]
    alone = compute(sum(tiles), heads_of[0], dims)
    received = crossing(layout, mask).most_received * sum(dims) * size * heads_of[1]
    lines = [
        f"{ranks} ranks, layout {name}: {why}; balance {layout.balance(mask):.3f}",
        f"gather: a rank receives at most {received / 2**20:.1f} MiB of keys and values",
    ]
    for strategy, wait in forwards(layout, mask, heads_of, dims, size).items():
        share = alone / (ranks * wait) if wait else 1.0
        words = f"{strategy}: a forward of {wait * 1e3:.3f} ms predicted"
        lines.append(f"{words}, {share:.3f} of {ranks} times one GPU's rate")
    return lines


def compute(tiles: float, heads_q: int, dims: tuple[int, int]) -> float:
    """Seconds of a kernel that computes so many tiles of each query head."""
    return tiles * BLOCK * BLOCK * 2 * sum(dims) * heads_q / FLOPS
