"""In how many parts the visits of a key tile of the Hopper backward are split, against what was
measured: measurements/hopper-backward/028-splits.csv."""

import csv
import heapq
from dataclasses import replace
from pathlib import Path

import pytest

from heedful.core.base.device import by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.planning.splits import (
    BACKWARD_WORTH,
    SPLIT_VISITS,
    TILE_VISITS,
    choose_backward_splits,
    choose_tail_splits,
    seen_keys,
)
from heedful.core.registry.by_hand import forced
from heedful.core.registry.tiles import HopperBackwardConfig
from heedful.launch.prebuild import compiling

MEASURED = Path(__file__).parents[4] / "measurements/hopper-backward/028-splits.csv"
DEVICE = by_name("H200")
RECORDED = [1, 2, 3, 4, 8]
# The fewest splits are chosen whose time is within this share of the best.
WORST = 1 / BACKWARD_WORTH


def rows() -> list[list[str]]:
    lines = [line for line in MEASURED.read_text().splitlines() if not line.startswith("#")]
    return list(csv.reader(lines))[1:]


def problem(shape: str, heads: str, dim: str, mask: str) -> AttentionProblem:
    batch, length = map(int, shape.split(" x "))
    heads_q, heads_k = map(int, heads.split("/"))
    return AttentionProblem.dense(
        batch,
        length,
        length,
        heads_q,
        heads_k,
        int(dim),
        dtype="bfloat16",
        causal=mask == "causal",
        needs_grad=True,
    )


def sizes(wanted: AttentionProblem, backend: str = "hopper"):
    return plan(wanted, DEVICE, compiling(), backend).sizes(direction="backward")


def splits(wanted: AttentionProblem, backend: str = "hopper") -> int:
    launches = sizes(wanted, backend).launches.values()
    return next(launch.numbers["splits"] for launch in launches if "splits" in launch.numbers)


def time_of(count: int, times: dict[int, float]) -> float:
    """As recorded, or between two that were."""
    if count in times:
        return times[count]
    below = max(n for n in times if n < count)
    above = min(n for n in times if n > count)
    share = (count - below) / (above - below)
    return times[below] + share * (times[above] - times[below])


@pytest.mark.parametrize("row", rows(), ids=lambda row: " ".join(row[:4]))
def test_what_is_chosen_is_near_the_best_that_was_recorded(row):
    times = dict(zip([*RECORDED, int(row[9])], map(float, row[4:9] + row[10:]), strict=True))
    assert time_of(splits(problem(*row[:4])), times) <= WORST * min(times.values())


def test_tiles_that_fill_the_device_are_not_split():
    for visits in (8, 64, 1024):
        for whole in (0, 132 * 5, 132 * 16):
            assert choose_backward_splits(132 * 16, visits, 132, whole) == 1


@pytest.mark.parametrize("tiles, visits", [(0, 64), (64, 0), (0, 0)])
def test_nothing_to_do_is_not_split(tiles, visits):
    assert choose_backward_splits(tiles, visits, 132, tiles) == 1


def test_no_split_is_without_a_visit_of_a_whole_tile():
    for visits in range(1, 20):
        for whole in (0, 1):
            assert 1 <= choose_backward_splits(1, visits, 132, whole) <= visits


@pytest.mark.parametrize(
    ("tiles", "visits", "units", "whole", "parts"),
    [
        (48, 128, 132, 0, 4),
        (48, 9, 132, 0, 1),
        (33, 9, 132, 33, 3),
        (1, 31, 132, 1, 16),
        # Below the most: beside its visits, what a part writes counts too.
        (1, 31, 132, 0, 11),
        (1, 8, 7, 0, 5),
    ],
)
def test_parts_are_as_recorded(tiles, visits, units, whole, parts):
    """Every term of the time that is estimated decides one of these."""
    assert choose_backward_splits(tiles, visits, units, whole) == parts


@pytest.mark.parametrize(
    ("queries", "keys", "left", "right", "seen"),
    [
        (1000, 1000, -1, -1, (16, 8)),
        (1000, 1000, 5, -1, (16, 8)),
        # Under a diagonal some tiles are seen by all queries, and some queries see no key.
        (1000, 1000, -1, 0, (16, 0)),
        (100, 1000, -1, 0, (2, 7)),
        (100, 1000, -1, 123, (2, 7)),
        (100, 1000, -1, 124, (2, 8)),
        (100, 1000, -1, 300, (2, 8)),
        (1000, 100, -1, 0, (2, 0)),
        (1000, 100, -1, 28, (2, 0)),
        (1000, 100, -1, 29, (3, 0)),
        (50, 20, -1, 90, (1, 0)),
        # A window's keys are each seen from as many places: beside it, those of a tile.
        (1000, 1000, 0, 0, (2, 8)),
        (1000, 1000, 0, 1, (3, 8)),
        (1000, 1000, 1, 0, (3, 8)),
        (1000, 1000, 100, 0, (4, 8)),
        (64, 1000, 100, 9, (1, 8)),
        (1000, 129, 5000, 0, (16, 2)),
        (0, 129, -1, -1, (0, 2)),
    ],
)
def test_visits_are_those_of_query_tiles_that_a_mask_leaves(queries, keys, left, right, seen):
    """Tiles of 64 queries and of 128 keys."""
    assert seen_keys(queries, keys, 64, 128, left, right) == seen


def test_scratch_and_programs_are_those_of_all_splits():
    wanted = problem("2 x 1000", "8/2", "64", "full")
    whole, split = (sizes(wanted, forced(f"hopper+splits={splits}")) for splits in (1, 3))
    scratch = {w.name: w.buffer.shape for w in split.workspaces}
    assert scratch.pop("partials") == (3, 2, 2 * 1024, 64 + 64)
    assert scratch == {w.name: w.buffer.shape for w in whole.workspaces}
    assert whole.launches["hopper.backward"].grid == (32, 1, 1)
    assert split.launches["hopper.backward"].grid == (96, 1, 1)
    # The epilogue has programs for 64 keys of a KV head, too.
    epilogues = [s.launches["hopper.backward_epilogue"] for s in (whole, split)]
    assert [e.grid[0] for e in epilogues] == [2 * 8 * 8, 2 * 8 * 8 + 2 * 2 * 16]


def test_work_tiles_that_are_left_have_splits_of_their_own_where_that_takes_less_time():
    assert [choose_tail_splits(2048, n, 132) for n in (16, 64, 256, 1024)] == [1, 3, 3, 3]
    # None are left, or all.
    assert choose_tail_splits(1320, 64, 132) == choose_tail_splits(130, 64, 132) == 1
    wanted = problem("4 x 4096", "16/16", "128", "full")
    found = sizes(wanted)
    assert found.launches["hopper.backward"].numbers["whole"] == 15 * 132
    assert found.launches["hopper.backward"].numbers["splits"] == 3
    (partials,) = (w.buffer.shape for w in found.workspaces if w.name == "partials")
    assert partials == (3, 1, 68 * 128, 256)
    epilogue = found.launches["hopper.backward_epilogue"]
    assert epilogue.grid[0] == 4 * 64 * 16 + 68 * 2
    for others in (("causal", "16/16"), ("full", "2/2")):
        mask, heads = others
        masked = sizes(problem("4 x 4096", heads, "128", mask))
        assert "whole" not in masked.launches["hopper.backward"].numbers


@pytest.mark.parametrize(
    ("lengths", "heads", "mask", "leaves"),
    [
        ("16 x 1024", "16/16", "full", True),
        ("16 x 1024", "16/16", "causal", False),
        ("1 x 4095", "16/16", "causal", False),
        ("1 x 4096", "16/16", "causal", True),
        ("1 x 8192", "8/2", "full", True),
        ("1 x 8192", "8/2", "causal", False),
        ("1 x 8192", "12/3", "causal", True),
        ("2 x 2048", "16/8", "causal", True),
        ("1 x 4096", "16/16", "window", False),
    ],
)
def test_dk_leaves_through_keys_that_many_query_tiles_visit(lengths, heads, mask, leaves):
    wanted = problem(lengths, heads, "128", "full" if mask == "window" else mask)
    if mask == "window":
        wanted = replace(wanted, mask=MaskSpec.of(True, (512, 0)))
    config = plan(wanted, DEVICE, compiling(), "hopper").configs["hopper.backward"]
    assert isinstance(config, HopperBackwardConfig)
    assert config.dk_in_keys is leaves
    assert config.rotates is (mask == "full")


def test_a_window_is_no_triangle_and_packed_sequences_are_one():
    long = problem("1 x 4096", "8/2", "128", "causal")
    windowed = AttentionProblem.dense(
        1, 4096, 4096, 8, 2, 128, mask=MaskSpec.of(True, (512, 0)), needs_grad=True
    )
    packed = AttentionProblem.dense(
        4, 4096, 4096, 8, 2, 128, total_q=4096, total_k=4096, causal=True, needs_grad=True
    )
    assert [splits(p) for p in (long, windowed, packed)] == [4, 2, 4]
    assert splits(replace(packed, mask=MaskSpec.of(False))) == 4


def busiest(visits: list[int], parts: int) -> float:
    """Visits of the SM with most, if each takes the longest part that is left."""
    busy, beside = [0.0] * DEVICE.units, SPLIT_VISITS if parts > 1 else TILE_VISITS
    for count in sorted(visits, reverse=True):
        for _ in range(parts):
            heapq.heapreplace(busy, busy[0] + count / parts + beside)
    return max(busy)


@pytest.mark.parametrize("chunk", [4096, 8192])
@pytest.mark.parametrize("before", range(8))
def test_chunks_of_a_long_document_take_the_busiest_SM_no_longer_than_their_best_parts(
    chunk, before
):
    """Queries of a zigzag chunk over all keys up to its end, for one KV head: those of four ranks.
    Only keys of the chunk itself are a triangle."""
    keys = (before + 1) * chunk
    wanted = AttentionProblem.dense(1, chunk, keys, 4, 1, 128, causal=True, needs_grad=True)
    visits = [
        4 * sum(row + 63 + keys - chunk >= column for row in range(0, chunk, 64))
        for column in range(0, keys, 128)
    ]
    times = [busiest(visits, parts) for parts in range(1, 9)]
    assert busiest(visits, splits(wanted)) <= WORST * min(times)
