"""How much the SM with most work computes of a call, by the tiles of its kernels: what a model of
time multiplies by a rate. A call may have many sequences.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from heedful.core.base.device import DeviceSpec
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.planning.splits import (
    SPLIT_VISITS,
    TILE_VISITS,
    choose_backward_splits,
    seen_keys,
)
from heedful.core.registry.tiles import (
    CONSUMER_ROWS,
    HopperBackwardConfig,
    HopperConfig,
    TileConfig,
)

# With more work tiles on each SM the last one hardly counts.
_FEW = 64


@dataclass(frozen=True)
class Shape:
    """A call but for its lengths and mask. heads: of queries and of keys."""

    device: DeviceSpec
    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: str


@dataclass(frozen=True)
class Lengths:
    """Queries and keys of each sequence of a call, and its window, whose diagonal ends at the last
    query and the last key; -1 for no bound."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    window: tuple[int, ...]

    @property
    def kind(self) -> str:
        if len(self.queries) > 1:
            return "packed"
        return "dense" if self.window[0] < 0 else "window"


@lru_cache(maxsize=256)
def tiles(shape: Shape, kind: str) -> tuple[TileConfig, TileConfig]:
    """Those of the forward and of the backward, as `plan` chooses them for long sequences. kind: of
    Lengths."""
    count = 1 << 14
    many: dict[str, Any] = {"total_q": count, "total_k": count} if kind == "packed" else {}
    problem = AttentionProblem.dense(
        1,
        count,
        count,
        *shape.heads,
        head_dim=shape.dims[0],
        head_dim_v=shape.dims[1],
        dtype=shape.dtype,
        mask=MaskSpec.of(True, (1024, 0) if kind == "window" else (-1, -1)),
        needs_grad=True,
        **many,
    )
    made = plan(problem, shape.device)
    forward, backward = (made.variant_of(way).configs[0] for way in ("forward", "backward"))
    return made.configs[forward], made.configs[backward]


def most_scores(shape: Shape, lengths: Lengths, backward: bool) -> float:
    """The scores of one head that the SM with most work computes, hidden ones of its tiles
    included. In a backward work tiles are of keys, and cost what `choose_backward_splits` takes
    them to cost."""
    return most_together(((shape, lengths),), backward)


@lru_cache(maxsize=4096)
def most_together(calls: tuple[tuple[Shape, Lengths], ...], backward: bool) -> float:
    """`most_scores` of calls, each of which begins where the last tiles of the one before leave SMs
    idle."""
    busy: list[float] = []
    for shape, lengths in calls:
        busy = _busy(*_work(shape, lengths, backward), busy or [0.0] * shape.device.units)
    return max(busy, default=0.0)


@lru_cache(maxsize=4096)
def _work(shape: Shape, lengths: Lengths, backward: bool) -> tuple[tuple[float, ...], int]:
    """The scores of work tiles, the largest first, and how often each of them comes."""
    config = tiles(shape, lengths.kind)[backward]
    heads = shape.heads[backward]
    if not backward:
        return tuple(sorted(_rows(lengths, config), reverse=True)), heads
    each, group = config.block_m * config.block_n, shape.heads[0] // shape.heads[1]
    visits = sorted((count * group for count in _columns(lengths, config)), reverse=True)
    splits = 1
    if isinstance(config, HopperBackwardConfig) and visits:
        most, whole = -(-max(lengths.queries) // config.block_m), 0
        if lengths.kind != "packed":
            sizes = lengths.queries[0], lengths.keys[0], config.block_m, config.block_n
            most, whole = seen_keys(*sizes, *lengths.window[:2])
        counts = len(visits) * heads, most * group, shape.device.units, whole * heads
        splits = choose_backward_splits(*counts)
    beside = SPLIT_VISITS if splits > 1 else TILE_VISITS
    return tuple((n / splits + beside) * each for n in visits), heads * splits


def _rows(lengths: Lengths, config: TileConfig) -> Iterator[int]:
    """The scores of each tile of queries of one head."""
    left, right, first = (*lengths.window, 0)[:3]
    for queries, keys in zip(lengths.queries, lengths.keys, strict=True):
        offset = keys - queries
        for row in range(0, queries, config.block_m):
            last = min(row + config.block_m, queries) - 1 + offset
            begin = 0 if left < 0 else max(0, row + offset - left)
            end = keys if right < 0 else min(keys, last + right + 1)
            count = -(-end // config.block_n) - begin // config.block_n if end > begin else 0
            count += -(-first // config.block_n) if begin > first else 0
            rows = min(config.block_m, queries - row)
            if isinstance(config, HopperConfig):
                # A consumer without queries does nothing.
                rows = -(-rows // CONSUMER_ROWS) * CONSUMER_ROWS
            yield count * config.block_n * rows


def _columns(lengths: Lengths, config: TileConfig) -> Iterator[int]:
    """By tile of keys of one head how many tiles of queries visit it."""
    left, right, first = (*lengths.window, 0)[:3]
    for queries, keys in zip(lengths.queries, lengths.keys, strict=True):
        offset = keys - queries
        for column in range(0, keys, config.block_n) if queries else ():
            last = min(column + config.block_n, keys) - 1
            begin = 0 if right < 0 else max(0, column - offset - right)
            hides = left >= 0 and column >= first
            end = min(queries, last - offset + left + 1) if hides else queries
            yield -(-end // config.block_m) - begin // config.block_m if end > begin else 0


def _busy(work: tuple[float, ...], times: int, busy: list[float]) -> list[float]:
    """How much each SM then has, the least first, if whoever is done first takes the largest that
    is left. work: the largest first; each of it comes so many times. busy: what each had before,
    the least first."""
    units = len(busy)
    if len(work) * times > _FEW * units:
        mean = (sum(work) * times + sum(busy)) / units
        return [max(mean, work[0])] * units
    drawn = [each for each in work for _ in range(times)]
    while drawn:
        wave, drawn = drawn[:units], drawn[units:]
        ends = sorted(map(sum, zip(busy, wave, strict=False)))
        if len(wave) < units or ends[0] < busy[-1]:
            # Some are done before others begin.
            heapq.heapify(busy)
            for each in wave:
                heapq.heapreplace(busy, busy[0] + each)
            busy.sort()
        else:
            busy = ends
    return busy
