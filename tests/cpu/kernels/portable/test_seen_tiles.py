"""Which tiles of queries the portable backward visits for a tile of keys where rows have
key_ranges. In Triton's interpreter; in a process of their own: see `support.runs.interpreted`.
"""

import random
from typing import NamedTuple

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl

from heedful.kernels.args.kinds import InOut
from heedful.kernels.args.portable import SeenKeys
from heedful.kernels.args.shared import PortableParams, Shape, Tile
from heedful.kernels.common.row_hulls import row_hulls
from heedful.kernels.common.sequences import Place, Seqlens
from heedful.kernels.common.tile_range import TileRange
from heedful.kernels.portable.backward.seen import seeing_tiles, store_seen_keys
from heedful.launch.spec import KernelCall, KernelRef, Pointer, Scalar
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import run_call


class IO(NamedTuple):
    seen: InOut[SeenKeys]


@triton.jit
def place_in(token_q, len_q, len_k, b, h, g):
    return Place(
        b,
        h,
        g,
        Seqlens(
            token_q=token_q,
            len_q=len_q,
            stored_q=len_q,
            token_k=0,
            len_k=len_k,
            stored_k=len_k,
            off=0,
        ),
    )


@triton.jit
def store_entry(io: IO, numbers, block, token_q, len_q, b, h, tile: Tile):
    """The entry of a tile of queries; numbers: the fields of its `TileRange`."""
    tiles = TileRange(
        tl.load(numbers),
        tl.load(numbers + 1),
        tl.load(numbers + 2),
        tl.load(numbers + 3),
        tl.load(numbers + 4),
        tl.load(numbers + 5),
    )
    store_seen_keys(io.seen, tiles, block, place_in(token_q, len_q, 0, b, h, 0), tile)


@triton.jit
def find_tiles(
    found, io: IO, token_q, len_q, len_k, b, g, params: PortableParams, IS_GQA: tl.constexpr
):
    """The tiles of queries of each tile of keys."""
    pid = tl.program_id(0)
    place = place_in(token_q, len_q, len_k, b, 0, g)
    tiles = seeing_tiles(pid * params.tile.BLOCK_N, io.seen, place, params, IS_GQA)
    found += pid * 4
    tl.store(found, tiles.begin)
    tl.store(found + 1, tiles.full_begin)
    tl.store(found + 2, tiles.full_end)
    tl.store(found + 3, tiles.end)


def tile_of(m: int, n: int) -> Tile:
    return Tile(16, 16, m, n, 16, 16, 0, "ieee")


def seen_keys(rows: int, heads: int, tiles: int | None) -> IO:
    each = None if tiles is None else Scalar(tiles)
    return IO(SeenKeys(Pointer("seen", "int32"), Scalar(heads), each, rows))


def found_tiles(entries: torch.Tensor, rows: int, sides, len_q: int, len_k: int, **where: int):
    """[begin, full_begin, full_end, end] of each tile of keys, as the kernel finds them. entries:
    (heads, entries, 8); where: token_q, b, g, group and, of a dense call, tiles."""
    heads, each = entries.shape[:2]
    numbers = (Scalar(x) for x in (1, heads, heads // where["group"], 0, 0))
    shape = Shape(*numbers)
    params = PortableParams(None, shape, None, None, None, None, None, None, tile_of(*sides))  # pyright: ignore[reportArgumentType]
    found = torch.full((max(1, -(-len_k // sides[1])), 4), -7, dtype=torch.int32)
    parameters = {
        "found": Pointer("found", "int32"),
        "io": seen_keys(rows, each, where.get("tiles")),
        **{name: Scalar(where[name]) for name in ("token_q", "b", "g")},
        "len_q": Scalar(len_q),
        "len_k": Scalar(len_k),
        "params": params,
        "IS_GQA": where["group"] > 1,
    }
    call = KernelCall(KernelRef(__name__, "find_tiles"), (len(found), 1, 1), parameters)
    run_call(call, {"found": found, "seen": entries})
    return found.tolist()


def wanted_tiles(heads: list[list[list[int]]], rows: int, m: int, col: int, stop: int, len_q: int):
    """By what entries say: (tiles of queries that see a key of [col, stop), those of them that need
    no mask); each a range. heads: of each query head the entries of its rows."""
    seeing = [
        i
        for entries in heads
        for i, (a, b, c, d, *_) in enumerate(entries)
        if (a < stop and b > col) or (c < stop and d > col)
    ]
    if not seeing:
        return range(0), range(0)
    visited = range(min(seeing) * rows // m, -(-min((max(seeing) + 1) * rows, len_q) // m))
    first, last = 0, len(heads[0])
    for entries in heads:
        full = [i for i, e in enumerate(entries) if e[4] <= col and e[5] >= stop]
        if not full or full[-1] - full[0] + 1 != len(full):
            return visited, range(0)
        first, last = max(first, full[0]), min(last, full[-1] + 1)
    whole = range(max(-(-first * rows // m), visited.start), min(last * rows // m, visited.stop))
    return visited, whole


def drawn_entries(drawn: random.Random, count: int, len_k: int) -> list[list[int]]:
    """Of each entry what it sees apart, what it sees, and what all its rows see, as neighbours
    that mostly see alike: runs of entries are full, now and then with a hole."""
    found = []
    low, high = sorted(drawn.randint(0, len_k) for _ in range(2))
    begin = drawn.randint(0, count)
    end = drawn.randint(begin, count)
    hole = drawn.randrange(2 * count + 1)
    for i in range(count):
        apart = (
            sorted(drawn.randint(0, len_k) for _ in range(2)) if drawn.random() < 0.1 else [9, 0]
        )
        sees = [low, high] if begin <= i < end else [low, low]
        full = sees if i != hole and begin + 1 <= i < end - 1 else [high, low]
        if i == end - 2:
            full = [low + drawn.randint(0, 1), high - drawn.randint(0, 1)]
        found.append([*apart, *sees, *full, 0, len_k])
    return found


@interpreted
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("rows, sides", [(16, (16, 32)), (32, (16, 16)), (16, (48, 16))], ids=str)
def test_a_tile_of_keys_is_visited_by_the_tiles_of_queries_that_see_it(rows, sides, group):
    """Those that need no mask are one run that all heads of the group have, of rows that exist."""
    m, n = sides
    drawn = random.Random(rows + m + group)
    # Beyond 128 entries they are looked at in several turns.
    for count in (1, 2, 5, 9, 13, 128, 129, 270) * 2:
        len_q = (count - 1) * rows + drawn.randint(1, rows)
        len_k = drawn.randint(1, 5 * n)
        heads = [drawn_entries(drawn, count, len_k) for _ in range(2 * group)]
        # Entries of other tiles lie behind, which see all.
        other = [[0, len_k, 0, len_k, 0, len_k, 0, 0]] * 2
        entries = torch.tensor([h + other for h in heads], dtype=torch.int32)
        found = found_tiles(
            entries, rows, sides, len_q, len_k, token_q=0, b=0, g=1, group=group, tiles=count + 2
        )
        for tile, (begin, full_begin, full_end, end) in enumerate(found):
            col, stop = tile * n, min(tile * n + n, len_k)
            visited, whole = wanted_tiles(heads[group:], rows, m, col, stop, len_q)
            told = f"{count} entries, {len_q} x {len_k}, tile {tile}: {found[tile]}\n{heads}"
            assert range(begin, end) == visited, told
            assert range(full_begin, full_end) == whole, told
            assert begin <= full_begin <= full_end <= end, told


@interpreted
@pytest.mark.parametrize("packed", [False, True])
def test_each_tile_of_queries_has_an_entry_where_keys_look_for_it(packed):
    """Of a sequence of a batch or of a packed one, which begins one entry later."""
    rows, heads, tiles = 16, 20, 5
    batch, head, token, block = 2, 3, 55, 1
    numbers = torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.int32)
    first = head * heads + (token // rows + batch if packed else batch * tiles)
    for len_q, exists in ((32, True), (31, False), (48, True)):
        seen = torch.full((4, heads, 8), -1, dtype=torch.int32)
        parameters = {
            "io": seen_keys(rows, heads, None if packed else tiles),
            "numbers": Pointer("numbers", "int32"),
            **{
                name: Scalar(x)
                for name, x in (("block", block), ("token_q", token), ("len_q", len_q))
            },
            "b": Scalar(batch),
            "h": Scalar(head),
            "tile": tile_of(rows, 32),
        }
        call = KernelCall(KernelRef(__name__, "store_entry"), (1, 1, 1), parameters)
        run_call(call, {"seen": seen, "numbers": numbers})
        want = torch.full_like(seen, -1)
        # first, all, and full tiles; a tile with rows that do not exist is never full.
        keys = [32, 64, 96, 192, 128, 160 if exists else 128]
        want.view(-1, 8)[first + block, :6] = torch.tensor(keys, dtype=torch.int32)
        assert seen.tolist() == want.tolist()
        # With a group of two, head 3 is the second of KV head 1.
        assert seen.view(-1, 8)[first + block, 0] == 32
        count = -(-len_q // rows)
        see_all = torch.zeros(4, heads, 8, dtype=torch.int32)
        see_all.view(-1, 8)[first : first + count] = torch.tensor([0, 9, 0, 9, 0, 9, 0, 0])
        found = found_tiles(
            see_all.view(4, heads, 8),
            rows,
            (rows, 32),
            len_q,
            9,
            token_q=token,
            b=batch,
            g=head,
            group=1,
            **({} if packed else {"tiles": tiles}),
        )
        assert found == [[0, 0, count, count]]


@triton.jit
def join(entries, found, row, len_q, COUNT: tl.constexpr, RANGES: tl.constexpr):
    hulls = row_hulls(entries, row + tl.program_id(0) * 0, len_q, COUNT, RANGES)
    tl.store(found, hulls.begin)
    tl.store(found + 1, hulls.end)
    tl.store(found + 2, hulls.later_begin)
    tl.store(found + 3, hulls.later_end)
    tl.store(found + 4, hulls.full_begin)
    tl.store(found + 5, hulls.full_end)


@interpreted
@pytest.mark.parametrize("ranges", [1, 2])
@pytest.mark.parametrize(
    "row, len_q, count", [(0, 256, 2), (64, 129, 2), (64, 128, 2), (128, 300, 3)]
)
def test_hulls_are_of_the_entries_whose_rows_exist(row, len_q, count, ranges):
    """Each 64 rows have an entry: what they see, what all of them see, and what they see later."""
    entries = torch.tensor(
        [
            [5, 40, 9, 30, 50, 60, 0, 0],
            [7, 44, 12, 33, 48, 70, 0, 0],
            [3, 41, 8, 28, 55, 90, 0, 0],
            [4, 50, 10, 26, 52, 80, 0, 0],
            [1, 99, 20, 21, 45, 99, 0, 0],
        ],
        dtype=torch.int32,
    )
    mine = entries[row // 64 : min(row // 64 + count, -(-len_q // 64))]
    begin, end, full_begin, full_end, later_begin, later_end = mine[:, :6].T
    want = [begin.min(), end.max(), later_begin.min(), later_end.max()]
    want += [full_begin.max(), full_end.min()]
    found = torch.full((6,), -1, dtype=torch.int32)
    join[(1,)](entries, found, row, len_q, tl.constexpr(count), tl.constexpr(ranges))
    if ranges == 1:
        want[2:4] = [torch.tensor(1 << 30), torch.tensor(0)]
    assert found.tolist() == [int(x) for x in want]


@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
