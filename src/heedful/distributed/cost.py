"""Estimates the time of a strategy's forward, alone and with its backward, from tiles, rows and a
few rates.

Rates are those of H200s that NVLink joins. On other machines the times are wrong, but the choice
hardly changes: it depends on how many bytes are sent while no kernel runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log

from heedful.core.base.device import by_name
from heedful.core.call.spread import BLOCK, Mask, spread_heads
from heedful.core.planning.waves import Lengths, Shape, most_scores, most_together
from heedful.distributed.layouts import LAYOUTS, Layout
from heedful.distributed.schedules import Call, Crossing, Schedule, calls_of, crossing

# FLOP/s of the forward and of the backward on an H200, whose SMs compute whole tiles: 16k and 64k
# causal tokens, replayed.
FLOPS, BACKWARD_FLOPS = 755e12, 610e12
# Bytes/s that a device receives from another: 32 MiB sent, and copied out of its memory, between
# two H200s. LINK is between them, for what decides on groups of heads.
SEND, COPY, LINK = 225e9, 350e9, 270e9
# The same between hosts, of whose devices each has a link of 400 Gbit/s: assumed, not measured.
BETWEEN_HOSTS, PER_HOST = 45e9, 8
# Streams that calls of a step take in turn where rows are copied.
LANES = 2
# SMs that a forward of local keys leaves to kernels with which ranks meet, where it hides the
# copies. Bytes/s that one of them packs: assumed.
LEFT, PACK = 2, 40e9
DEVICE = by_name("H200")
SMS = DEVICE.units
# A collective's own time, in seconds.
LATENCY = 40e-6
# Seconds of the host for one group of heads.
HOST = 300e-6
# Bytes/s of what is bound by memory: merges, packing, the prologue and the epilogue of a backward,
# which take 456 microseconds for 32768 rows of 32 heads.
MEMORY = 4.1e12
# Long steps of ranks take longer than their rates say, as clocks fall and the slowest GPU counts:
# of more seconds than SHORT this part more for each factor of e. Fitted on 8k and 32k tokens a GPU,
# over two ranks.
SHORT, LONGER = 2e-3, 0.022


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


def packs_little(needs: Schedule, heads: tuple[int, int], dims: tuple[int, int], size: int) -> bool:
    """Whether the SMs that local calls leave pack own rows in a part of their time."""
    rows = sum(held.stop - held.start for held, _ in needs.own)
    seconds = rows * heads[1] * sum(dims) * size / (LEFT * PACK)
    return 4 * seconds <= compute(needs.fewest[0], heads[0], dims)


@dataclass(frozen=True)
class Time:
    """Seconds of the slowest rank."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


def in_all(seconds: float) -> float:
    """Seconds of ranks' steps that take so long by their rates."""
    return seconds * (1 + LONGER * max(0.0, log(max(seconds, SHORT) / SHORT)))


def shape_of(heads: tuple[int, int], dims: tuple[int, int], size: int) -> Shape:
    """size: of an element."""
    return Shape(DEVICE, heads, dims, "float32" if size == 4 else "bfloat16")


def call_time(shape: Shape, lengths: Lengths, backward: bool) -> float:
    """Seconds of a call alone."""
    work = seconds_of(most_scores(shape, lengths, backward), shape, backward)
    return work + (_rest(shape, lengths) if backward else 0.0)


def seconds_of(scores: float, shape: Shape, backward: bool) -> float:
    """Seconds of the SM with most work. The backward has five products, the forward two."""
    work = scores * shape.device.units * sum(shape.dims)
    return work * 5 / BACKWARD_FLOPS if backward else work * 2 / FLOPS


def _rest(shape: Shape, lengths: Lengths) -> float:
    """Seconds of a backward's other kernels, which read out and dout, and clear, read and round
    sums of dQ."""
    size = 4 if shape.dtype == "float32" else 2
    row = 2 * size * shape.dims[1] + (8 + size) * shape.dims[0]
    return sum(lengths.queries) * shape.heads[0] * row / MEMORY


def _lengths(call: Call) -> Lengths:
    return Lengths(call.lengths_q, call.lengths_k, call.window)


def whole(lengths: Sequence[int], mask: Mask) -> Lengths:
    """The batch as one call."""
    bounds = (-1 if bound is None else bound for bound in (mask.left, mask.right))
    counts = tuple(n for n in lengths if n)
    return Lengths(counts, counts, (*bounds, mask.first))


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
        for rank, received in enumerate(needs.received):
            row = sum(dims) * size * heads[1]
            arrive = received * row / link
            first = 0.0 if is_hidden else arrive * sizes[0] / heads[1]
            told = calls_of(layout, mask, rank), heads, dims, size, sizes, backward
            work = _in_lanes(*told, is_hidden) if copies and LANES > 1 else _by_groups(*told)
            rest = max(work, arrive - first)
            last = arrive * min(sizes) / heads[1] if backward else 0.0
            # Own rows are packed; gradients are read, those of others too, and written.
            held = sum(b - a for a, b in needs.needed[rank]) - received
            packed = (2 * held + backward * (held + 2 * received)) * row / MEMORY
            waits = LATENCY * (needs.most_received > 0)
            slowest = max(slowest, waits + packed + first + rest + last)
        found.append(in_all(slowest))
    return Time(*found)


def _by_groups(
    calls: Sequence[Call],
    heads: tuple[int, int],
    dims: tuple[int, int],
    size: int,
    sizes: Sequence[int],
    backward: bool,
) -> float:
    """Seconds of all calls; those with keys of others are made for each group of heads."""
    made = _each(calls, heads, dims, size, sizes)
    return sum(call_time(shape, lengths, backward) for _, shape, lengths in made)


def _each(
    calls: Sequence[Call],
    heads: tuple[int, int],
    dims: tuple[int, int],
    size: int,
    sizes: Sequence[int],
) -> Iterator[tuple[bool, Shape, Lengths]]:
    """Whether it has local keys alone, shape and lengths of each call of each group of heads."""
    group = heads[0] // heads[1]
    for call in calls:
        for count in (heads[1],) if call.is_local else sizes:
            yield call.is_local, shape_of((count * group, count), dims, size), _lengths(call)


def _in_lanes(
    calls: Sequence[Call],
    heads: tuple[int, int],
    dims: tuple[int, int],
    size: int,
    sizes: Sequence[int],
    backward: bool,
    is_hidden: bool,
) -> float:
    """`_by_groups` of calls that take two streams in turn, local ones first if they hide the
    transfer, else last: only the last call's tiles leave SMs idle."""
    told = sorted(_each(calls, heads, dims, size, sizes), key=lambda each: each[0] != is_hidden)
    if not told:
        return 0.0
    each = tuple((shape, lengths) for _, shape, lengths in told)
    work = seconds_of(most_together(each, backward), each[0][0], backward)
    return work + (sum(_rest(*call) for call in each) if backward else 0.0)


def heads(
    layout: Layout, mask: Mask, heads: tuple[int, int], dims: tuple[int, int], size: int
) -> Time:
    """q, k and v are waited for, then out; in the backward dout, then gradients."""
    ranks = len(layout.shards)
    mine = max(1, heads[0] // ranks), max(1, heads[1] // ranks)
    foreign = layout.starts[-1] * (ranks - 1) / ranks / link_of(ranks) * size
    query = heads[0] / ranks * dims[0]
    keys = max(1.0, heads[1] / ranks) * sum(dims)
    out = heads[0] / ranks * dims[1]
    arrive = 2 * LATENCY + foreign * (query + keys + out)
    shape, every = shape_of(mine, dims, size), whole(layout.lengths, mask)
    kernels = (call_time(shape, every, backward) for backward in (False, True))
    return Time(*(in_all(arrive + kernel) for kernel in kernels))


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
        for rank, rows in enumerate(received):
            calls = calls_of(layout, mask, rank)
            work = _by_groups(calls, heads, dims, size, [heads[1]], backward)
            each = size + 4 * backward
            arrive = rows * sum(dims) * each * heads[1] / link / max(1, others)
            merge = layout.tokens(rank) * heads[0] * dims[1] * (3 * size + 12) / MEMORY
            step = work / (others + 1)
            rest = max(step + merge * (rows > 0), arrive)
            waits = LATENCY * (max(received) > 0)
            slowest = max(slowest, waits + step + others * rest)
        found.append(in_all(slowest))
    return Time(*found)


def in_grid(
    shards: Layout,
    width: int,
    mask: Mask,
    heads_of: tuple[int, int],
    dims: tuple[int, int],
    size: int,
) -> Time:
    """The strategy "heads x ring". shards: the layout of the grid's rows, each of `width` ranks,
    which exchange a shard's tokens for heads."""
    mine = heads_of[0] // width, heads_of[1] // width
    of_ring = ring(shards, mask, mine, dims, size)
    rows = max(shards.tokens(rank) for rank in range(len(shards.shards)))
    row = (mine[0] + mine[1]) * sum(dims) * size
    link = link_of(width * len(shards.shards))
    waits = 2 * LATENCY + rows * (width - 1) / width * row / link
    return Time(of_ring.forward + waits, of_ring.backward + waits)


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
    shape, every = shape_of(heads_of, dims, size), whole(lengths, mask)
    alone = [call_time(shape, every, backward) for backward in (False, True)]
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


def compute(tiles: float, heads_q: int, dims: tuple[int, int]) -> float:
    """Seconds of a forward of so many tiles of each query head, about."""
    return tiles * BLOCK * BLOCK * heads_q * sum(dims) * 2 / FLOPS
