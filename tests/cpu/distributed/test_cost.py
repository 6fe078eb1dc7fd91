"""The model of time: it counts what kernels compute, and predicts rows that were not fitted. A
change of what it says of other batches shows in golden_times.txt. After one that is meant:

    WRITE_GOLDEN_TIMES=1 pytest tests/cpu/distributed/test_cost.py
"""

import csv
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from heedful.bench.parallel import DIM, HEADS, HEADS_K, cases
from heedful.core.base.device import by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.call.spread import CAUSAL, Mask
from heedful.core.planning import splits as planned_splits
from heedful.core.planning import waves
from heedful.core.planning.plan import plan
from heedful.core.planning.waves import Lengths, Shape, most_scores, most_together, tiles
from heedful.distributed import cost
from heedful.distributed.layouts import LAYOUTS
from heedful.distributed.schedules import crossing, gathered

GOLDEN = Path(__file__).with_name("golden_times.txt")
SHAPE = Shape(by_name("H200"), (HEADS, HEADS_K), (DIM, DIM), "bfloat16")
MEASURED = Path(__file__).parents[3] / "measurements/distributed/070-predicted.csv"


def measured() -> dict[str, dict[str, str]]:
    """Rows by their case that were not fitted: medians of replays on two H200s."""
    with MEASURED.open(encoding="utf-8") as file:
        rows = csv.DictReader(line for line in file if line[0] != "#")
        return {row["case"]: row for row in rows if row["fitted"] == "no"}


@pytest.mark.parametrize("name", measured())
def test_rows_that_were_not_fitted_are_predicted_within_five_percent(name):
    case, row = next(case for case in cases(2) if case.name == name), measured()[name]
    mask = CAUSAL if case.window < 0 else Mask(case.window, 0)
    layout = LAYOUTS[case.layout](case.lengths, 2, mask)
    found = cost.times(layout, mask, SHAPE.heads, SHAPE.dims, 2, True)["gather"]
    assert found.forward * 1e3 == pytest.approx(float(row["measured"]), rel=0.05)
    assert found.both * 1e3 == pytest.approx(float(row["both, measured"]), rel=0.05)


def one(length: int, *window: int) -> Lengths:
    return Lengths((length,), (length,), window)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (0, 2), (4, -1), (5, 3, 2)], ids=str)
@pytest.mark.parametrize("sizes", [(16, 16), (9, 23), (23, 9), (1, 8), (8, 0), (0, 8)], ids=str)
def test_a_tile_of_keys_is_visited_by_the_tiles_of_queries_that_see_one_of_them(sizes, window):
    """Ends of windows lie at each row of a tile."""
    queries, keys = sizes
    left, right, first = (*window, 0)[:3]
    for rows, columns in ((1, 1), (4, 3), (3, 4)):
        config: Any = SimpleNamespace(block_m=rows, block_n=columns)
        found = list(waves._columns(Lengths((queries,), (keys,), window), config))
        wanted = []
        for column in range(0, keys, columns) if queries else ():
            sees = [
                any(
                    (right < 0 or j - i - keys + queries <= right)
                    and (left < 0 or j - i - keys + queries >= -left or column < first)
                    for j in range(column, min(column + columns, keys))
                )
                for i in range(queries)
            ]
            # Those between the first and the last of them, too.
            at = [i // rows for i, seen in enumerate(sees) if seen]
            wanted.append(at[-1] - at[0] + 1 if at else 0)
        assert found == wanted


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (0, 2), (4, -1), (5, 3, 2)], ids=str)
@pytest.mark.parametrize("sizes", [(16, 16), (9, 23), (23, 9), (1, 8), (8, 0), (0, 8)], ids=str)
def test_a_tile_of_queries_computes_the_tiles_of_keys_that_one_of_them_sees(sizes, window):
    """Those of leading keys beside those of the window, where it begins behind them."""
    queries, keys = sizes
    left, right, first = (*window, 0)[:3]
    for rows, columns in ((1, 1), (4, 3), (3, 4)):
        config: Any = SimpleNamespace(block_m=rows, block_n=columns)
        found = list(waves._rows(Lengths((queries,), (keys,), window), config))
        wanted = []
        for row in range(0, queries, rows):
            last = min(row + rows, queries)
            places = range(row + keys - queries, last + keys - queries)
            seen = [
                j
                for j in range(keys)
                if any(
                    (right < 0 or j - i <= right) and (left < 0 or j - i >= -left) for i in places
                )
            ]
            count = seen[-1] // columns - seen[0] // columns + 1 if seen else 0
            begins = max(0, places[0] - left) if left >= 0 else 0
            count += -(-first // columns) if begins > first else 0
            wanted.append(count * columns * (last - row))
        assert found == wanted


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)], ids=str)
@pytest.mark.parametrize("heads", [(8, 2), (16, 8), (4, 4), (1, 1)], ids=str)
def test_visits_have_as_many_splits_as_the_plan_of_the_call_gives_them(heads, window):
    shape = Shape(SHAPE.device, heads, SHAPE.dims, SHAPE.dtype)
    found = set()
    for length in (256, 1024, 2048, 4096):
        work, times = waves._work(shape, one(length, *window), True)
        facts = {"causal": window[1] == 0, "needs_grad": True}
        problem = AttentionProblem.dense(1, length, length, *heads, **facts)
        sizes = plan(problem, shape.device).sizes(direction="backward")
        splits = next(n for x in sizes.launches.values() if (n := x.numbers.get("splits")))
        config = tiles(shape, "dense")[1]
        each, tile = splits * heads[1], config.block_m * config.block_n
        assert times == each and len(work) == -(-length // config.block_n)
        beside = planned_splits.SPLIT_VISITS if splits > 1 else planned_splits.TILE_VISITS
        visits = -(-length // config.block_m) * heads[0] // heads[1]
        assert work[0] == max(work) == (visits / splits + beside) * tile
        found.add(splits)
    assert len(found) > 1


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("before", [[0.0] * 4, [0.0, 1.0, 5.0, 9.0]], ids=str)
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 9, 12, 85, 86], ids=str)
def test_whoever_is_done_first_takes_the_largest_that_is_left(count, before, times):
    work = tuple(sorted((float(7 * n % 11 + 1) for n in range(count)), reverse=True))
    busy = [*before]
    for each in (each for each in work for _ in range(times)):
        busy[busy.index(min(busy))] += each
    found = waves._busy(work, times, [*before])
    if count * times <= 64 * 4:
        assert found == sorted(busy)
    else:
        assert found == [pytest.approx((sum(work) * times + sum(before)) / 4)] * 4


def test_of_many_tiles_the_longest_takes_as_long_as_it_does():
    assert waves._busy((1000.0, *[1.0] * 300), 1, [0.0] * 4) == [1000.0] * 4


@pytest.mark.parametrize(
    ("lengths", "mask", "layout"),
    [
        ([4096], CAUSAL, "zigzag"),
        ([4096, 0, 0], CAUSAL, "zigzag"),
        ([4096, 1], CAUSAL, "documents"),
        ([4096], Mask(100, 0), "contiguous"),
        ([4096, 4096], Mask(0, 0), "contiguous"),
    ],
)
def test_the_layout_that_is_chosen_is_one_and_says_why(lengths, mask, layout):
    chosen, why = cost.layout_for(lengths, mask)
    assert chosen == layout and chosen in LAYOUTS and why


def test_a_window_is_as_wide_as_the_tiles_of_its_kernel():
    forward, _ = tiles(SHAPE, "window")
    rows, keys = forward.block_m, forward.block_n
    assert (rows, keys) == (192, 64) and tiles(SHAPE, "dense")[0].block_m == 128
    length = rows * 512
    # Far from the first row a tile of queries sees all keys from its first one's window on.
    width = (1024 + rows) // keys * keys
    found = most_scores(SHAPE, one(length, 1024, 0), False)
    assert found == pytest.approx(length * HEADS * width / 132, rel=0.01)


def test_work_is_that_of_the_busiest_SM_and_rows_without_queries_take_none():
    few = Lengths((64,) * 3, (64,) * 3, (-1, 0))
    # 96 work tiles of one consumer and one tile of keys, on 132 SMs.
    assert most_scores(SHAPE, few, False) == 64 * 64
    many = Lengths((64,) * 300, (64,) * 300, (-1, 0))
    assert most_scores(SHAPE, many, False) == pytest.approx(64 * 64 * 300 * HEADS / 132)
    # Three rounds of work tiles for two heads of keys take longer than their mean.
    part = Shape(SHAPE.device, (8, 2), SHAPE.dims, SHAPE.dtype)
    chunk = Lengths((4096,), (16384,), (-1, 0))
    mean = sum(4096 * (12288 + 2048 + 64) for _ in range(8)) / 132
    assert most_scores(part, chunk, True) > 1.05 * mean


@pytest.mark.parametrize("backward", [False, True])
def test_calls_that_fill_each_others_last_tiles_take_the_mean_and_one_tile_at_most(backward):
    """Groups of one and of seven KV heads of a zigzag chunk, whose work tiles are nearly equal."""
    queries, keys = 6144, 49152
    chunk = Lengths((queries,), (keys,), (-1, 0))
    parts = [Shape(SHAPE.device, (4 * n, n), SHAPE.dims, SHAPE.dtype) for n in (1, 7)]
    apart = [most_scores(part, chunk, backward) for part in parts]
    together = most_together(tuple((part, chunk) for part in parts), backward)
    assert max(apart) < together < 0.99 * sum(apart)
    mean = HEADS * queries * (keys - queries / 2) / 132
    longest = 4 * 128 * (queries + 128) if backward else 128 * keys
    assert mean <= together <= 1.01 * mean + longest


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (512, 0), (100, 30)], ids=str)
@pytest.mark.parametrize("sizes", [(4096, 4096), (4096, 16384), (1000, 5000)], ids=str)
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=str)
def test_a_backward_has_the_splits_that_its_plan_gives_it(heads, sizes, window, monkeypatch):
    """Both choose them by the same counts of tiles and visits."""
    asked: list[tuple[int, ...]] = []

    def noted(*counts: int) -> int:
        asked.append(counts)
        return 3

    for module in (waves, planned_splits):
        monkeypatch.setattr(module, "choose_backward_splits", noted)
    shape = Shape(SHAPE.device, heads, SHAPE.dims, SHAPE.dtype)
    lengths = Lengths(sizes[:1], sizes[1:], window)
    _, count = waves._work.__wrapped__(shape, lengths, True)
    config = tiles(shape, lengths.kind)[1]
    blocks = config.block_m, config.block_n
    mask = MaskSpec.of(False, window)
    problem = AttentionProblem.dense(1, *sizes, *heads, head_dim=SHAPE.dims[0], mask=mask)
    columns = -(-sizes[1] // config.block_n) * heads[1]
    planned_splits.backward_splits(problem, SHAPE.device.units, columns, blocks, sizes[1])
    assert asked[0] == asked[1] and len(asked) == 2 and count == 3 * heads[1]


def test_packed_sequences_are_split_as_if_no_tile_were_whole(monkeypatch):
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(waves, "choose_backward_splits", lambda *counts: asked.append(counts) or 2)
    shape = Shape(SHAPE.device, (8, 2), SHAPE.dims, SHAPE.dtype)
    lengths = Lengths((900, 300), (900, 300), (-1, 0))
    config = tiles(shape, lengths.kind)[1]
    waves._work.__wrapped__(shape, lengths, True)
    columns = sum(-(-n // config.block_n) for n in lengths.keys)
    visits = -(-900 // config.block_m)
    assert asked == [(columns * 2, visits * 4, SHAPE.device.units, 0)]


def test_rows_that_stay_where_they_are_wait_for_nobody():
    layout = LAYOUTS["documents"]([4096, 4096], 2, CAUSAL)
    found = cost.times(layout, CAUSAL, SHAPE.heads, SHAPE.dims, 2, True)
    alone = cost.call_time(SHAPE, one(4096, -1, 0), False)
    assert found["gather"].forward == found["ring"].forward == alone
    assert found["heads"].forward > alone + 2 * cost.LATENCY


def test_heads_and_a_ring_together_send_less_than_heads_alone():
    layout = LAYOUTS["zigzag"]([1 << 19], 64, CAUSAL)
    rows = LAYOUTS["zigzag"]([1 << 19], 8, CAUSAL)
    both = cost.in_grid(rows, 8, CAUSAL, SHAPE.heads, SHAPE.dims, 2)
    assert both.forward < cost.times(layout, CAUSAL, SHAPE.heads, SHAPE.dims, 2)["ring"].forward


# Layout, lengths, ranks, mask, heads, head dims and the bytes of an element.
BATCHES: dict[str, tuple[str, list[int], int, Mask, tuple[int, int], tuple[int, int], int]] = {
    "one document": ("zigzag", [8192], 2, CAUSAL, (8, 4), (64, 64), 2),
    "a long one": ("zigzag", [65536], 4, CAUSAL, (32, 8), (128, 128), 2),
    "a short one": ("zigzag", [512], 2, CAUSAL, (8, 8), (64, 64), 2),
    "in float32": ("zigzag", [4096], 3, CAUSAL, (6, 3), (64, 64), 4),
    "two head dims": ("zigzag", [16384], 2, CAUSAL, (16, 16), (192, 128), 2),
    "no mask": ("contiguous", [8192], 4, Mask(None, None), (8, 8), (128, 128), 2),
    "a window": ("contiguous", [32768], 4, Mask(1024, 0), (32, 8), (128, 128), 2),
    "a window with first keys": ("contiguous", [16384], 2, Mask(500, 0, 4), (8, 2), (64, 64), 2),
    "documents": ("documents", [9000, 700, 5000, 0, 300, 2048], 4, CAUSAL, (16, 4), (64, 64), 2),
    "one KV head": ("zigzag", [32768], 8, CAUSAL, (16, 1), (128, 128), 2),
    "several hosts": ("zigzag", [131072], 16, CAUSAL, (32, 8), (128, 128), 2),
    "heads that do not spread": ("documents", [4096, 1000], 4, CAUSAL, (6, 2), (80, 80), 2),
    "no tokens": ("zigzag", [0], 2, CAUSAL, (8, 4), (64, 64), 2),
}


def golden_lines() -> list[str]:
    lines = []
    for name, (layout, lengths, ranks, mask, heads, dims, size) in BATCHES.items():
        made = LAYOUTS[layout](lengths, ranks, mask)
        lines.append(f"{name}, microseconds of the forward and of the backward")
        for copies in (False, True):
            found = cost.times(made, mask, heads, dims, size, copies)
            for strategy, time in found.items() if not copies else [("gather", found["gather"])]:
                told = f"{time.forward * 1e6:.4f} {time.backward * 1e6:.4f}"
                lines.append(f"    {strategy}{' that copies' * copies}: {told}")
        if ranks % 2 == 0 and heads[1] % 2 == 0:
            rows = LAYOUTS[layout](lengths, ranks // 2, mask)
            time = cost.in_grid(rows, 2, mask, heads, dims, size)
            told = f"{time.forward * 1e6:.4f} {time.backward * 1e6:.4f}"
            lines.append(f"    heads x ring: {told}")
        schedule = gathered(made, mask, 0)
        for backward, replayed in ((False, True), (False, False), (True, True)):
            told = [
                cost.head_groups(needs, heads, dims, size, backward, replayed)
                for needs in (schedule, crossing(made, mask))
            ]
            lines.append(f"    groups of KV heads, {backward=} {replayed=}: {told}")
        lines += [f"    {line}" for line in cost.predicted(lengths, ranks, mask, heads, dims, size)]
    return lines


def test_what_is_told_of_batches_is_what_the_golden_table_has():
    """Choices of "auto" hang on it, and what `heedful explain --ranks` prints."""
    told = "\n".join(golden_lines()) + "\n"
    if os.environ.get("WRITE_GOLDEN_TIMES"):
        GOLDEN.write_text(told, encoding="utf-8")
    assert told == GOLDEN.read_text(encoding="utf-8")


def grouped(
    heads: tuple[int, int], local: int = 0, remote: int = 0, rows: int = 10**6, part: float = 0.0
) -> Any:
    """`head_groups` of a forward, or with `part` of a backward whose largest call has tiles of keys
    that are this part of it. local, remote: tiles; rows: that arrive."""
    any_of = gathered(LAYOUTS["zigzag"]([1024], 2, CAUSAL), CAUSAL, 0)
    needs = replace(any_of, fewest=(local, remote), most_received=rows, longest=part)
    return cost.head_groups(needs, heads, (64, 64), 2, part > 0)


def test_keys_are_hidden_by_local_calls_that_take_as_long_as_they_arrive():
    """A tile of 8 query heads takes as long as 23.4 rows of two KV heads arrive."""
    tile = 128 * 128 * 8 * 128 * 2 / cost.FLOPS
    row = 128 * 2 * 2 / cost.LINK
    assert 23.4 < tile / row < 23.5
    for rows, is_hidden in ((23_400, True), (23_500, False)):
        assert grouped((8, 2), local=1000, rows=rows)[1] == is_hidden


@pytest.mark.parametrize(
    ("tiles", "first"), [(0, 4), (5000, 4), (10_000, 3), (20_000, 2), (26_900, 2), (27_100, 1)]
)
def test_the_first_group_has_as_many_heads_as_the_host_needs_for_the_next(tiles, first):
    """A fourth at most. 27000 tiles of 32 query heads, and so 16 KV heads, take 16 times HOST."""
    assert 26_900 < 16 * cost.HOST / (128 * 128 * 32 * 128 * 2 / cost.FLOPS) < 27_100
    assert grouped((32, 16), remote=tiles)[0] == [first, 16 - first]
    # What local calls hide needs no small group before it.
    assert grouped((32, 16), local=10**9, remote=tiles)[0] == [16]


@pytest.mark.parametrize(
    ("last", "sizes"),
    [(0.2, [1, 14, 1]), (1, [1, 14, 1]), (4, [4, 8, 4]), (7, [7, 2, 7]), (8, [16])],
)
def test_groups_at_both_ends_of_a_backward_have_as_many_heads_as_a_tile_is_parts(last, sizes):
    assert grouped((32, 16), remote=10**6, part=last / cost.SMS)[0] == sizes
    if len(sizes) == 3:
        hidden, _ = grouped((32, 16), local=10**9, remote=10**6, part=last / cost.SMS)
        assert hidden == [16 - sizes[2], sizes[2]]


def test_few_keys_and_one_head_are_one_group():
    rows = int(cost.LATENCY * cost.LINK / (128 * 2 * 16))
    assert grouped((32, 16), rows=rows - 1)[0] == [16]
    assert len(grouped((32, 16), rows=rows + 1)[0]) == 2
    assert grouped((32, 1))[0] == [1]


def test_with_one_lane_calls_of_a_step_take_their_sum(monkeypatch):
    layout = LAYOUTS["zigzag"]([16384], 2, CAUSAL)
    given = layout, CAUSAL, SHAPE.heads, SHAPE.dims, 2, True
    two = cost.gather(*given)
    monkeypatch.setattr(cost, "LANES", 1)
    one = cost.gather(*given)
    assert one.forward > two.forward and one.backward > two.backward
