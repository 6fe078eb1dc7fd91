"""Keys are split as a record of measured calls says that it is best."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fit_splits
from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.planning.splits import (
    COSTS,
    WORTH,
    Costs,
    Grid,
    _times,
    asked_splits,
    candidates,
    choose_splits,
    fewest,
    grid_of,
    programs_of_parts,
)
from heedful.core.registry.by_hand import forced

RECORDED = fit_splits.read()
FITTED, HELD_OUT = fit_splits.halves(RECORDED)
H200 = by_name("H200")


@pytest.mark.parametrize("half", [FITTED, HELD_OUT], ids=["fitted", "held out"])
def test_recorded_calls_take_no_longer_than_with_the_best_count(half):
    """5 % longer at most in 95 of 100 calls, and 12 % in any."""
    regrets = sorted(one.regret(choose_splits(one.problem, H200, *one.tiles)) for one in half)
    assert len(regrets) >= 80
    assert regrets[math.ceil(0.95 * len(regrets)) - 1] <= 0.05
    assert regrets[-1] <= 0.12


def test_costs_follow_the_fitted_half_as_well_as_any():
    own = fit_splits.error(COSTS, FITTED)
    other_start = Costs(5, 1, 1, 20, 2, 6, 2)
    for start in (COSTS, other_start):
        assert own <= 1.02 * fit_splits.error(fit_splits.fitted(FITTED, start), FITTED)


@given(st.integers(0, 400), st.integers(0, 2000), st.integers(1, 304))
def test_counts_are_compared_whose_splits_all_have_work(programs, tiles, units):
    found = candidates(programs, tiles, units)
    shares = [-(-tiles // count) for count in found]
    assert found == [-(-tiles // share) for share in shares] == sorted(set(found))
    assert all(count <= 128 for count in found) and (found[:1] == [1] or tiles == 0)
    # One more a program than fills the device begins another wave.
    full = min(128, units // max(1, programs), tiles)
    assert full == 0 or -(-tiles // full) in shares


def test_the_fewest_of_equally_fast_counts_win():
    """Two waves of many tiles take as long as four of half as many, but for what each costs."""
    free = Costs(launch=1, key_tile=1, products=0, memory=0, results=0, combine=0, partials=0)
    grid = Grid(66, 64, 64, 64, 128, 16, 1, 66 * 64)
    assert [grid.time(n, 132, free) for n in (1, 2, 4)] == [65, 33, 33]
    assert fewest(grid, 132, free) == 2


def test_partial_results_cost_more_splits():
    few = AttentionProblem.dense(1, 64, 16384, 8, head_dim=128)
    many = AttentionProblem.dense(1, 512, 16384, 8, head_dim=128)
    assert choose_splits(few, H200, 64, 128, 1) > 4 * choose_splits(many, H200, 64, 128, 1)


def test_lengths_of_as_many_tiles_as_others_are_told_by_their_results_alone():
    """Most calls of new lengths: the times of counts are worked out once for all of them."""
    _times.cache_clear()
    problems = [AttentionProblem.dense(1, n, n, 8, head_dim=64) for n in range(897, 1025)]
    found = [choose_splits(problem, H200, 128, 128, 1) for problem in problems]
    assert _times.cache_info().misses == 1
    grids = [grid_of(problem, 128, 128, 1) for problem in problems]
    for count, grid in zip(found, grids, strict=True):
        times = {n: grid.time(n, 132, COSTS) for n in candidates(grid.programs, grid.tiles, 132)}
        slowest = min(times.values()) / WORTH
        assert count == min(n for n, time in times.items() if time <= slowest)


def test_nothing_is_split_beyond_one_wave_of_programs():
    """Of those nothing was recorded."""
    problem = AttentionProblem.dense(4, 1, 65536, 8, head_dim=128)
    assert choose_splits(problem, H200.live(units=64), 64, 128, 1) > 1
    assert choose_splits(problem, H200.live(units=31), 64, 128, 1) == 1


def waves_of(programs: int, units: int) -> list[int]:
    """Programs of each wave, dealt one by one."""
    waves = []
    for number in range(programs):
        if number % units == 0:
            waves.append(0)
        waves[-1] += 1
    return waves


def test_time_is_that_of_waves_of_programs_which_share_the_memory():
    """As `Grid.time` says of itself, longhand, in splits that share 24 tiles evenly."""
    costs = COSTS
    grid = Grid(11, 24, 128, 64, 192 + 128, 8, 2, 11 * 128 * 128)
    for splits in (1, 2, 3, 12, 24):
        time = costs.launch
        for running in waves_of(11 * splits, 100):
            products = costs.key_tile + costs.products * 128 * 64 * 160 / 2**20
            loads = costs.memory * 64 * 320 / 2**20 * running / 100 / 2
            tile = (products**3 + loads**3) ** (1 / 3)
            time += 24 / splits * tile + costs.results * 128 * 160 / 2**14
        if splits > 1:
            time += costs.combine + costs.partials * splits * 11 * 128 * 128 * 4 / 2**20
        assert grid.time(splits, 100, costs) == pytest.approx(time)


DECODE = AttentionProblem.dense(4, 1, 4000, 16, 2, used_k=True)
LATENT = AttentionProblem.dense(4, 1, 4000, 16, 1, 576, head_dim_v=512, v_in_k=True, used_k=True)
MANY = {
    ("H200", "hopper"): AttentionProblem.dense(1, 64, 4000, 8),
    ("H200", "portable"): DECODE,
    ("H200", "decode/portable"): DECODE,
    ("H200", "hopper_decode"): DECODE,
    ("H200", "mla"): LATENT,
    ("MI300X", "cdna"): AttentionProblem.dense(1, 64, 4000, 8),
    ("CPU", "cpu"): AttentionProblem.dense(1, 64, 4000, 8),
}


@pytest.mark.parametrize(("device", "backend"), MANY)
def test_more_splits_than_key_tiles_are_as_many_as_there_are(device, backend):
    """Scratch and grids are those of a split into single tiles, of however many parts."""

    def sizes(num_splits):
        problem = replace(MANY[device, backend], num_splits=num_splits)
        return plan(problem, by_name(device), backend=forced(backend)).sizes()

    tiles = sizes(10**9).num_splits
    assert 4000 // 256 <= tiles <= 4000
    assert sizes(tiles) == sizes(tiles + 1) == sizes(10**9) == sizes(2**40)
    assert sizes(tiles - 1).num_splits == tiles - 1 and sizes(2).num_splits == 2


@pytest.mark.parametrize("longest", [0, 1, 64, 65, 700, 4096])
def test_a_number_of_splits_that_is_cut_cuts_no_sequence_otherwise(longest):
    """Whatever the longest sequence of the batch, tiles of a part are ceil(tiles / num_splits)."""
    for asked in (0, 1, 2, 3, 7, 11, 64, 10**9):
        problem = replace(DECODE, seqlen_k=longest, num_splits=asked)
        used = asked_splits(problem, 64)
        assert (used > 1) == (asked > 1) and used <= asked
        for keys in range(0, longest + 1, 61):
            tiles = max(1, -(-keys // 64))
            assert -(-tiles // max(1, used)) == -(-tiles // max(1, asked))


def test_packed_keys_are_no_more_than_all_tokens():
    packed = replace(DECODE, total_q=4, total_k=640, seqlen_k=2**31 - 1, num_splits=10**9)
    assert asked_splits(packed, 64) == 10
    assert asked_splits(replace(packed, total_k=641), 64) == 11


@pytest.mark.parametrize(
    "tiles, parts, splits",
    [(0, 3, 1), (1, 3, 3), (7, 3, 3), (8, 3, 1), (1, 1, 1), (1, 0, 1), (1, 2, 2)]
    + [(1, 65535, 65535), (1, 65536, 1)],
)
def test_parts_have_programs_where_tiles_leave_units_idle(tiles, parts, splits):
    """As many as a grid has room for."""
    assert programs_of_parts(tiles, parts, 8) == splits
