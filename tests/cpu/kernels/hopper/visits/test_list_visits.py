"""Which key tiles a Hopper forward visits where rows have a list of a block mask: the functions
that its producer and its consumers run, as Python's."""

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from heedful.kernels.hopper.sm90 import block_range
from support.hopper.hosted import Host, Int, Machine, Numbers, Pointer

WIDTH, POOL = 9, 4
FUNCTIONS = (
    *("program_n_block_range", "consumer_n_block_range", "n_block_count", "n_block_at"),
    *("next_masked", "needs_mask", "first_key", "listed_tile"),
)


def drawn_list(rng: random.Random, tiles: int) -> tuple[list[int], list[int]]:
    """Tiles that rows see whole, and in part."""
    places = rng.sample(range(tiles), rng.randint(0, min(tiles, WIDTH)))
    cut = rng.randint(0, len(places))
    return places[:cut], places[cut:]


def stored(whole: list[int], part: list[int]) -> list[int]:
    pairs = [n for tile in whole for n in (tile, -1)]
    pairs += [n for tile in part for n in (tile, tile % POOL)]
    return [len(whole), len(part), *pairs, *(99 for _ in range(2 * WIDTH - len(pairs)))]


def hosted(numbers: list[int], keys: int, side: int, block_n: int, kind: str, splits=None):
    """(the functions, params, a work tile of `side` rows but 10) for the list of the second tile of
    rows. kind: "plain" and "exact" as of `BlockLists`, or ""."""
    lists = SimpleNamespace(
        ptr=Pointer([7] * (2 + 2 * WIDTH) + numbers),
        stride_b=Int(1000),
        stride_h=Int(1000),
        stride_m=Int(2 + 2 * WIDTH),
        width=Int(WIDTH),
        pool=Int(POOL),
        tiles=None,
        SIDE=side,
        IS_PLAIN=kind == "plain",
        IS_EXACT=kind == "exact",
    )
    params = SimpleNamespace(
        mask=SimpleNamespace(blocks=lists, RANGES=0, first=None, HAS_RIGHT=False),
        split=SimpleNamespace(splits=splits and Int(splits), PART_TILES=None, held=None),
        gqa=SimpleNamespace(PACK_GQA=1),
        tile=SimpleNamespace(BLOCK_N=block_n, CONSUMERS=side // 64, VISITS_SECOND=False),
    )
    seq = SimpleNamespace(token_q=Int(0), len_q=Int(2 * side - 10), len_k=Int(keys))
    tile = SimpleNamespace(row=Int(side), batch=Int(0), head=Int(0), seq=seq)
    machine = Numbers(Machine(0), lambda _: 0, 1)
    host = Host({"gl": machine, "tl": machine})
    return {name: host.turned(getattr(block_range, name)) for name in FUNCTIONS}, params, tile


def visits(call, params, tile, split: int = 0):
    """By consumer, (first key, index of bits, whether it needs a mask) of each step; the producer's
    first keys are the same where consumers look at theirs."""
    program = call["program_n_block_range"](params, tile, Int(split), ())
    made = []
    for consumer in range(params.tile.CONSUMERS):
        row = tile.row + 64 * consumer
        mine = call["consumer_n_block_range"](params, tile, Int(row), program, ())
        steps = []
        for step in range(call["n_block_count"](params, mine)):
            j = call["n_block_at"](params, mine, Int(step))
            col, bits = call["listed_tile"](params, tile, Int(row), j)
            is_masked = bool(call["needs_mask"](mine, j))
            assert is_masked == (call["next_masked"](mine, Int(step)) == step)
            loaded = call["first_key"](params, tile, program, j)
            assert loaded == col or not is_masked
            steps.append((int(loaded), int(bits), is_masked))
        made.append(steps)
    return made


SHAPES = [(128, 128), (128, 64), (64, 64)]


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("side, block_n", SHAPES)
def test_tiles_in_part_come_first_and_whole_ones_need_no_mask(side, block_n, ragged, splits):
    tiles = 12
    keys = tiles * side - 5 * ragged
    for seed in range(60):
        whole, part = drawn_list(random.Random(seed), tiles)
        # Exact lists have no tile past the last key among those seen whole.
        for kind in ("plain", "") if ragged else ("plain", "", "exact"):
            given = hosted(stored(whole, part), keys, side, block_n, kind, splits)
            found = [visits(*given, split) for split in range(splits or 1)]
            for consumer in range(side // 64):
                steps = [step for of_split in found for step in of_split[consumer]]
                cols = [(col, bits >= 0) for col, bits, _ in steps]
                subtiles = range(0, side, block_n)
                assert sorted(cols) == sorted(
                    (tile * side + sub, is_part)
                    for of_kind, is_part in ((whole, False), (part, True))
                    for tile in of_kind
                    for sub in subtiles
                )
                are_part = [is_part for _, is_part in cols]
                assert are_part == sorted(are_part, reverse=True)
                masked = [is_masked for *_, is_masked in steps]
                is_known = kind == "exact" or (kind == "plain" and not ragged)
                assert masked == (are_part if is_known else [True] * len(steps))


@pytest.mark.parametrize("side, block_n", SHAPES)
def test_numbers_that_are_no_list_lead_nowhere_beyond_the_keys(side, block_n):
    """Whole tiles are the last one, those that are masked may be the first past it."""
    rng = random.Random(side)
    keys = 3 * side
    for _ in range(200):
        numbers = [rng.choice((-(2**31), 2**31 - 1, -1, 2, 3, 500)) for _ in range(2 + 2 * WIDTH)]
        for steps in visits(*hosted(numbers, keys, side, block_n, "plain")):
            assert len(steps) <= WIDTH * side // block_n
            for col, bits, is_masked in steps:
                assert 0 <= col < keys + side * is_masked and bits < POOL


def test_rows_and_keys_that_do_not_exist_have_no_visits():
    numbers = stored([0, 1], [2])
    call, params, tile = hosted(numbers, 512, 128, 128, "plain")
    tile.seq.len_q = Int(128 + 64)
    assert [len(steps) for steps in visits(call, params, tile)] == [3, 0]
    assert visits(*hosted(numbers, 0, 128, 128, "plain")) == [[], []]
