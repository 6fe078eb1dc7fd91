"""The model of time: it counts what kernels compute, and predicts rows that were not fitted."""

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from heedful.bench.parallel import DIM, HEADS, HEADS_K, cases
from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.call.spread import CAUSAL, Mask
from heedful.core.planning import splits as splits_module
from heedful.core.planning import waves
from heedful.core.planning.plan import plan
from heedful.core.planning.waves import Lengths, Shape, most_scores, most_together, tiles
from heedful.distributed import cost
from heedful.distributed.layouts import LAYOUTS

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
        beside = splits_module.SPLIT_VISITS if splits > 1 else splits_module.TILE_VISITS
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
