"""Which key tiles a Hopper forward visits where rows have key_ranges, from the entries of each 64
rows: the functions that its producer and its consumers run, as Python's."""

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from heedful.kernels.hopper.sm90 import block_range
from support.hopper.hosted import Host, Int, Machine, Numbers, Pointer

KEYS, NOWHERE = 1000, 1 << 30


def drawn_rows(rng: random.Random, ranges: int) -> list[int]:
    """An entry of 64 rows that see one run of keys or two, or none."""
    bounds = sorted(rng.sample(range(KEYS), 2 * ranges))
    runs = [(bounds[i], bounds[i + 1]) for i in range(0, 2 * ranges, 2)]
    runs = [run for run in runs if rng.random() < 0.85]
    full = (0, 0)
    if runs:
        begin, end = rng.choice(runs)
        full = tuple(sorted(rng.randint(begin, end) for _ in range(2)))
    first, second = (*runs, (NOWHERE, 0), (NOWHERE, 0))[:2]
    return [*first, *full, *second, 0, 0]


def visits(entries: list[list[int]], ranges: int, block_n: int, splits: int | None):
    """By split, the key tiles that the only program visits, and whether each needs a mask."""
    given = [n for entry in entries for n in entry]
    hulls = SimpleNamespace(key_hulls=Pointer(given), entries=None, blocks=Int(0))
    params = SimpleNamespace(
        mask=SimpleNamespace(
            RANGES=ranges, first=None, HAS_RIGHT=False, blocks=SimpleNamespace(SIDE=None)
        ),
        order=SimpleNamespace(hulls=hulls),
        split=SimpleNamespace(splits=splits and Int(splits), PART_TILES=None, held=None),
        gqa=SimpleNamespace(PACK_GQA=1),
        tile=SimpleNamespace(BLOCK_N=block_n, CONSUMERS=len(entries), VISITS_SECOND=False),
    )
    seq = SimpleNamespace(token_q=Int(0), len_q=Int(64 * len(entries) - 10), len_k=Int(KEYS))
    tile = SimpleNamespace(row=Int(0), batch=Int(0), head=Int(0), seq=seq)
    numbers = Numbers(Machine(0), lambda _: 0, 1)
    host = Host({"gl": numbers, "tl": numbers})
    call = {name: host.turned(getattr(block_range, name)) for name in FUNCTIONS}
    for split in range(splits or 1):
        program = call["program_n_block_range"](params, tile, Int(split), ())
        for consumer in range(len(entries)):
            mine = call["consumer_n_block_range"](params, tile, Int(64 * consumer), program, ())
            made = []
            for step in range(call["n_block_count"](params, mine)):
                j = int(call["n_block_at"](params, mine, Int(step)))
                is_masked = call["next_masked"](mine, Int(step)) == step
                assert is_masked == bool(call["needs_mask"](mine, j))
                made.append((j, is_masked))
            yield consumer, made


FUNCTIONS = (
    *("program_n_block_range", "consumer_n_block_range", "n_block_count", "n_block_at"),
    *("next_masked", "needs_mask"),
)


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("ranges", [1, 2])
@pytest.mark.parametrize("block_n", [64, 128])
def test_each_tile_that_rows_see_is_visited_once_and_without_a_mask_if_all_see_all(
    ranges, block_n, splits
):
    for seed in range(150):
        rng = random.Random(seed)
        entries = [drawn_rows(rng, ranges) for _ in range(2)]
        of_consumers = [[], []]
        for consumer, made in visits(entries, ranges, block_n, splits):
            of_consumers[consumer] += made
        for entry, made in zip(entries, of_consumers, strict=True):
            tiles = [j for j, _ in made]
            assert len(set(tiles)) == len(tiles)
            wanted = set()
            for begin, end in (entry[:2], entry[4:6]):
                if begin < end:
                    wanted |= set(range(begin // block_n, (end - 1) // block_n + 1))
            assert wanted <= set(tiles)
            for j, is_masked in made:
                whole = entry[2] <= j * block_n and (j + 1) * block_n <= entry[3]
                assert is_masked or whole


def test_what_lies_between_two_runs_is_not_visited():
    for seed in range(100):
        entry = drawn_rows(random.Random(seed), 2)
        seen = {key // 64 for i in (0, 4) for key in range(entry[i], entry[i + 1])}
        for _, made in visits([entry, entry], 2, 64, None):
            assert {tile for tile, _ in made} == seen
