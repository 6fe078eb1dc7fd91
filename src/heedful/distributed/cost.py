"""Estimates the time of a strategy's forward, alone and with its backward, from tiles, rows and a
few rates.

Rates are those of H200s that NVLink joins. On other machines the times are wrong, but the choice
hardly changes: it depends on how many bytes are sent while no kernel runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from heedful.core.base.device import by_name
from heedful.distributed.layouts import BLOCK, LAYOUTS, Layout, Mask, Piece
from heedful.distributed.schedules import Crossing, Schedule, crossing, spread_heads

# FLOP/s of the forward and of the backward: 32k and 64k causal tokens on an H200.
FLOPS, BACKWARD_FLOPS = 760e12, 585e12
# Bytes/s that a device receives from another: 32 MiB sent, and copied out of its memory, between
# two H200s. LINK is between them, for what decides on groups of heads.
SEND, COPY, LINK = 225e9, 350e9, 270e9
# The same between hosts, of whose devices each has a link of 400 Gbit/s: assumed, not measured.
BETWEEN_HOSTS, PER_HOST = 45e9, 8
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


@dataclass(frozen=True)
class Time:
    """Seconds of the slowest rank."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


def gather(
    layout: Layout,
    mask: Mask,
    heads: tuple[int, int],
    dims: tuple[int, int],
    size: int,
    copies: bool = False,
) -> Time:
    """The first group's keys are waited for, unless local calls take as long; the others arrive
    while a kernel runs. In the backward the last group's gradients are, too. copies: rows are not
    sent but copied."""
    needs, link = crossing(layout, mask), link_of(len(layout.shards), copies)
    found = []
    for backward in (False, True):
        sizes, is_hidden = head_groups(needs, heads, dims, size, backward)
        slowest = 0.0
        for received, work in zip(needs.received, layout.tiles(mask), strict=True):
            arrive = received * sum(dims) * size * heads[1] / link
            first = 0.0 if is_hidden else arrive * sizes[0] / heads[1]
            rest = max(compute(work, heads[0], dims, backward), arrive - first)
            last = arrive * min(sizes) / heads[1] if backward else 0.0
            slowest = max(slowest, LATENCY + first + rest + last)
        found.append(slowest)
    return Time(*found)


def heads(
    layout: Layout, mask: Mask, heads: tuple[int, int], dims: tuple[int, int], size: int
) -> Time:
    """q, k and v are waited for, then out; in the backward dout, then gradients."""
    ranks = len(layout.shards)
    foreign = layout.starts[-1] * (ranks - 1) / ranks / link_of(ranks) * size
    query = heads[0] / ranks * dims[0]
    keys = max(1.0, heads[1] / ranks) * sum(dims)
    out = heads[0] / ranks * dims[1]
    tiles = sum(layout.tiles(mask)) / ranks
    arrive = 2 * LATENCY + foreign * (query + keys + out)
    kernels = (compute(tiles, heads[0], dims, backward) for backward in (False, True))
    return Time(*(arrive + kernel for kernel in kernels))


def ring(
    layout: Layout, mask: Mask, heads: tuple[int, int], dims: tuple[int, int], size: int
) -> Time:
    """A rank's own keys come first, then as many steps as there are other ranks, each of which
    takes as long as its kernels and merge or the next keys. In the backward sums in float32 travel,
    after keys."""
    others = len(layout.shards) - 1
    received, link = crossing(layout, mask).received, link_of(others + 1)
    found = []
    for backward in (False, True):
        slowest = 0.0
        for rank, (rows, work) in enumerate(zip(received, layout.tiles(mask), strict=True)):
            each = size + 4 * backward
            arrive = rows * sum(dims) * each * heads[1] / link / max(1, others)
            merge = layout.tokens(rank) * heads[0] * dims[1] * (3 * size + 12) / MEMORY
            step = compute(work, heads[0], dims, backward) / (others + 1)
            rest = max(step + merge * (rows > 0), arrive)
            slowest = max(slowest, LATENCY + step + others * rest)
        found.append(slowest)
    return Time(*found)


def link_of(ranks: int, copies: bool = False) -> float:
    """Bytes/s that a rank receives."""
    return BETWEEN_HOSTS if ranks > PER_HOST else COPY if copies else SEND


def layout_for(lengths: Sequence[int], mask: Mask) -> tuple[str, str]:
    """The layout "auto", and why."""
    if mask.left is not None:
        return "contiguous", "a window sees few keys of other ranks"
    if sum(map(bool, lengths)) > 1:
        return "documents", "short documents stay whole"
    return "zigzag", "one document"


def times(
    layout: Layout,
    mask: Mask,
    heads_of: tuple[int, int],
    dims: tuple[int, int],
    size: int,
    copies: bool = False,
) -> dict[str, Time]:
    """By each strategy that can compute it. copies: "gather" copies rows."""
    given = layout, mask, heads_of, dims, size
    found = {"gather": gather(*given, copies), "ring": ring(*given)}
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
    alone = [compute(sum(tiles), heads_of[0], dims, backward) for backward in (False, True)]
    received = crossing(layout, mask).most_received * sum(dims) * size * heads_of[1]
    lines = [
        f"{ranks} ranks, layout {name}: {why}; balance {layout.balance(mask):.3f}",
        f"gather: a rank receives at most {received / 2**20:.1f} MiB of keys and values",
    ]
    if ranks > PER_HOST:
        rate = f"{BETWEEN_HOSTS / 1e9:.0f} GB/s between hosts"
        lines.append(f"links: {rate} assumed, not measured")
    for strategy, time in times(layout, mask, heads_of, dims, size, ranks <= PER_HOST).items():
        waits = time.forward, time.both
        shares = (
            one / (ranks * wait) if wait else 1.0
            for one, wait in zip((alone[0], sum(alone)), waits, strict=True)
        )
        words = [
            f"{what} {wait * 1e3:.3f} ms, {share:.3f} of {ranks} times one GPU's rate"
            for what, wait, share in zip(("forward", "with backward"), waits, shares, strict=True)
        ]
        lines.append(f"{strategy}: predicted {'; '.join(words)}")
    return lines


def compute(tiles: float, heads_q: int, dims: tuple[int, int], backward: bool = False) -> float:
    """Seconds of a kernel that computes so many tiles of each query head."""
    # The backward has five products where the forward has two.
    work = tiles * BLOCK * BLOCK * heads_q * sum(dims)
    return work * 5 / BACKWARD_FLOPS if backward else work * 2 / FLOPS
