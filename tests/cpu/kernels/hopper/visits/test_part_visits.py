"""Which key tiles a Hopper forward visits with numerics="invariant": those of a part, which begins
at a fixed position of the sequence, in descending order. The functions that its producer and its
consumers run, as Python's."""

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from heedful.kernels.hopper.sm90 import block_range
from support.hopper.hosted import Host, Int, Machine, Numbers

FUNCTIONS = (
    *("program_n_block_range", "consumer_n_block_range", "n_block_count", "n_block_at"),
    "turn_of",
)
BLOCK_N, PART_TILES = 64, 4


def visits(
    len_q: int,
    len_k: int,
    row: int,
    window: tuple[int, int],
    parts: int | None,
    in_turn: bool = False,
    has_sink: bool = False,
):
    """By part, or once without parts, the tiles that each of two consumers visits. in_turn: of the
    parts that one program takes, the last of them first."""
    left, right = window
    params = SimpleNamespace(
        mask=SimpleNamespace(
            RANGES=None,
            HAS_LEFT=left >= 0,
            HAS_RIGHT=right >= 0,
            left=Int(left),
            right=Int(right),
            first=None,
            blocks=SimpleNamespace(SIDE=None),
        ),
        split=SimpleNamespace(
            splits=None if in_turn else parts and Int(parts),
            PART_TILES=PART_TILES,
            held=in_turn or None,
        ),
        mods=SimpleNamespace(sink=has_sink or None),
        gqa=SimpleNamespace(PACK_GQA=1),
        tile=SimpleNamespace(BLOCK_N=BLOCK_N, CONSUMERS=2, VISITS_SECOND=False),
    )
    seq = SimpleNamespace(len_q=Int(len_q), len_k=Int(len_k), off=Int(len_k - len_q))
    tile = SimpleNamespace(row=Int(row), batch=Int(0), head=Int(0), seq=seq)
    numbers = Numbers(Machine(0), lambda _: 0, 1)
    host = Host({"gl": numbers, "tl": numbers})
    call = {name: host.turned(getattr(block_range, name)) for name in FUNCTIONS}

    def parts_in_turn():
        number, is_last = 0, False
        while not is_last:
            turn = call["turn_of"](params, tile, Int(number))
            yield turn.part
            number, is_last = number + 1, turn.is_last

    for part in parts_in_turn() if in_turn else range(parts or 1):
        program = call["program_n_block_range"](params, tile, Int(part), ())
        made = []
        for consumer in range(2):
            first = Int(row + 64 * consumer)
            mine = call["consumer_n_block_range"](params, tile, first, program, ())
            steps = range(call["n_block_count"](params, mine))
            made.append([int(call["n_block_at"](params, mine, Int(step))) for step in steps])
            # Those that a consumer does not visit it passes over, before its own or after them.
            assert not steps or int(program.begin) <= made[-1][-1]
            assert not steps or made[-1][0] < int(program.end)
        yield made


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (100, 0), (300, 50)])
def test_parts_have_all_tiles_each_in_its_bounds(window):
    for seed in range(60):
        rng = random.Random(seed)
        len_k = rng.randint(1, 1500)
        len_q = rng.randint(1, len_k)
        row = 128 * rng.randrange((len_q + 127) // 128)
        parts = -(-len_k // (BLOCK_N * PART_TILES)) + rng.randrange(2)
        (whole,) = visits(len_q, len_k, row, window, None)
        by_part = list(visits(len_q, len_k, row, window, parts))
        for consumer in range(2):
            of_parts = [made[consumer] for made in by_part]
            assert [tile for tiles in reversed(of_parts) for tile in tiles] == whole[consumer]
            for part, tiles in enumerate(of_parts):
                assert all(tile // PART_TILES == part for tile in tiles)


@pytest.mark.parametrize("has_sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (100, 0), (300, 50)])
def test_a_program_takes_the_parts_that_its_rows_see_in_turn_and_the_first_for_a_sink(
    window, has_sink
):
    for seed in range(60):
        rng = random.Random(seed)
        len_k = rng.randint(1, 1500)
        len_q = rng.randint(1, len_k)
        row = 128 * rng.randrange((len_q + 127) // 128)
        parts = -(-len_k // (BLOCK_N * PART_TILES))
        by_part = list(reversed(list(visits(len_q, len_k, row, window, parts))))
        in_turn = list(visits(len_q, len_k, row, window, None, True, has_sink))
        seen = [made for made in by_part if any(made)]
        assert [made for made in in_turn if any(made)] == seen
        # No others, but for those down to the first, which the sink enters.
        assert has_sink or len(in_turn) == max(1, len(seen))
        assert not has_sink or in_turn[-1] == by_part[-1]
