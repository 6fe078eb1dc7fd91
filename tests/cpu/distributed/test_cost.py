"""The model of time: it counts what kernels compute, and predicts rows that were not fitted."""

import csv
from pathlib import Path

import pytest

from heedful.bench.parallel import DIM, HEADS, HEADS_K, cases
from heedful.core.base.device import by_name
from heedful.core.call.spread import CAUSAL, Mask
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
