"""Which tiles the portable kernels visit: each that the mask leaves something of, once; with a
mask where it hides something, and there alone. In Triton's interpreter; in a process of their own:
see `support.runs.interpreted`.
"""

import random
from dataclasses import replace
from itertools import product

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl

from heedful.core.call.mask import MaskSpec
from heedful.kernels.args.kinds import RowArray
from heedful.kernels.args.shared import BlockLists, Mask, Tile, TileOrder, TreeMask
from heedful.kernels.common.sequences import Place, Seqlens
from heedful.kernels.common.tile_range import key_tiles, masked_count, query_tiles, visited_tile
from heedful.kernels.portable.backward.keys import visited_rows
from heedful.kernels.portable.shared.order import head_of
from heedful.launch.spec import KernelCall, KernelRef, Pointer, Scalar, absent
from support.problems.grids import in_turns
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import run_call

# Masks by their bounds, each aligned at both ends and moved.
BOUNDS = [(-1, -1), (-1, 0), (-1, 21), (0, 0), (31, 0), (15, 16), (32, -1), (9, 5, 17), (40, -1, 1)]
MASKS = [
    replace(MaskSpec(*bounds), bottom_right=bottom_right, shift=shift)
    for bounds, (bottom_right, shift) in product(BOUNDS, [(True, 0), (False, 0), (True, -19)])
]
# One and two off the edges of tiles, on both sides.
MASKS += [
    replace(MaskSpec(*bounds), bottom_right=True, shift=shift)
    for bounds, shift in product([(-1, 0), (0, -1), (31, 0)], (-2, -1, 1, 2))
]
LENGTHS = [(48, 96), (33, 97), (96, 31), (1, 64), (65, 1), (0, 40), (40, 0)]
SIDES = [(16, 32), (32, 16)]
MOST = 8
# A visit without a mask and one with it are counted apart.
MASKED = 100


@triton.jit
def count_visit(counts, at, by):
    tl.store(counts + at, tl.load(counts + at) + by)


@triton.jit
def visit_keys(
    counts, len_q, len_k, off, mask: Mask, tile: Tile, MOST: tl.constexpr, MASKED: tl.constexpr
):
    place = Place(
        0,
        0,
        0,
        Seqlens(
            token_q=0, len_q=len_q, stored_q=len_q, token_k=0, len_k=len_k, stored_k=len_k, off=off
        ),
    )
    tiles = key_tiles(tl.program_id(0) * tile.BLOCK_M, place, mask, tile)
    counts += tl.program_id(0) * MOST
    for visit in range(0, tiles.full_end - tiles.full_begin):
        count_visit(counts, visited_tile(visit, tiles, mask, tl.constexpr(False)), 1)
    for visit in range(0, masked_count(tiles)):
        count_visit(counts, visited_tile(visit, tiles, mask, tl.constexpr(True)), MASKED)


@triton.jit
def visit_queries(
    counts, len_q, len_k, off, mask: Mask, tile: Tile, MOST: tl.constexpr, MASKED: tl.constexpr
):
    place = Place(
        0,
        0,
        0,
        Seqlens(
            token_q=0, len_q=len_q, stored_q=len_q, token_k=0, len_k=len_k, stored_k=len_k, off=off
        ),
    )
    tiles = query_tiles(tl.program_id(0) * tile.BLOCK_N, place, mask, tile)
    counts += tl.program_id(0)
    for visit in range(0, tiles.full_end - tiles.full_begin):
        count_visit(counts, visited_rows(visit, tiles, tl.constexpr(False)) * MOST, 1)
    for visit in range(0, tiles.full_begin - tiles.begin + (tiles.end - tiles.full_end)):
        count_visit(counts, visited_rows(visit, tiles, tl.constexpr(True)) * MOST, MASKED)


def visits(
    kernel: str,
    mask: MaskSpec,
    sides,
    len_q: int,
    len_k: int,
    tree: bool = False,
    ranges: torch.Tensor | None = None,
) -> torch.Tensor:
    """How often each tile of keys is visited beside each tile of queries. ranges: int32 (len_q, 2)
    or (len_q, 4)."""
    columns = 0 if ranges is None else ranges.shape[1]
    block_m, block_n = sides
    left, right, first, bottom_right, shift = (
        Scalar(int(x)) for x in (mask.left, mask.right, mask.first, mask.bottom_right, mask.shift)
    )
    parameters = {
        "counts": Pointer("counts", "int32"),
        "len_q": Scalar(len_q),
        "len_k": Scalar(len_k),
        "off": Scalar(mask.offset(len_q, len_k)),
        "mask": Mask(
            left,
            right,
            first,
            bottom_right,
            shift,
            None,
            tree=TreeMask(Pointer("tree", "int8") if tree else None, None, None),
            blocks=absent(BlockLists),
            ranges=RowArray(
                Pointer("ranges", "int32") if columns else None,
                Scalar(0),
                Scalar(0),
                Scalar(columns),
            )
            if columns
            else RowArray(None, None, None, None),
            HAS_LEFT=mask.left >= 0,
            HAS_RIGHT=mask.right >= 0,
            RANGES=columns // 2 or None,
        ),
        "tile": Tile(16, 16, block_m, block_n, 16, 16, 0, "ieee"),
        "MOST": MOST,
        "MASKED": MASKED,
    }
    counts = torch.zeros(2 * MOST, MOST, dtype=torch.int32)
    length, block = (len_q, block_m) if kernel == "visit_keys" else (len_k, block_n)
    grid = (max(1, -(-length // block)), 1, 1)
    call = KernelCall(KernelRef(__name__, kernel), grid, parameters)
    made = {"counts": counts, "tree": torch.ones(1, dtype=torch.int8)}
    run_call(call, made if ranges is None else made | {"ranges": ranges})
    return counts


def wanted(
    kernel: str, mask: MaskSpec, sides, len_q: int, len_k: int, tree: bool
) -> list[torch.Tensor]:
    """By position alone the tiles that are to be visited, those that may be, as they were if
    sequences filled their last tiles, and those that need a mask."""
    m, n = sides
    rows, cols = torch.arange(2 * MOST * m)[:, None], torch.arange(MOST * n)
    distance = cols - rows - mask.offset(len_q, len_k)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if mask.right >= 0:
        seen &= distance <= mask.right
    if mask.left >= 0:
        seen &= (distance >= -mask.left) | (cols < mask.first)
    of_keys = kernel == "visit_keys"
    # A tree mask may hide any of the last keys; what its own side lacks is never stored.
    sure = seen & (cols < len_k - len_q) if tree else seen
    sure = sure & (cols < len_k) | (rows >= len_q) if of_keys else sure & (rows < len_q)
    sure = sure if of_keys else sure | (cols >= len_k)
    ends = (len_q, -(-len_k // n) * n) if of_keys else (-(-len_q // m) * m, len_k)
    may_be = seen & (rows < ends[0]) & (cols < ends[1])
    seen = seen & (rows < len_q) & (cols < len_k)
    tiles = [x.view(2 * MOST, m, MOST, n).transpose(1, 2).flatten(2) for x in (seen, may_be, sure)]
    return [tiles[0].any(-1), tiles[1].any(-1), ~tiles[2].all(-1)]


@interpreted
@pytest.mark.parametrize(
    "mask, kernel, sides", in_turns(MASKS, ("visit_keys", "visit_queries"), SIDES), ids=str
)
def test_each_tile_that_is_seen_is_visited_once_and_masked_where_it_must_be(mask, sides, kernel):
    # Leading keys are looked for whatever else hides them.
    for (len_q, len_k), tree in product(LENGTHS, (False, True)):
        if tree and len_k < len_q:
            continue
        leading = torch.arange(MOST) * sides[1] < mask.first
        seen, may_be, partial = wanted(kernel, mask, sides, len_q, len_k, tree)
        counts = visits(kernel, mask, sides, len_q, len_k, tree)
        told = f"{mask} {len_q} x {len_k}, tree: {tree}\n{counts}"
        assert set(counts.unique().tolist()) <= {0, 1, MASKED}, told
        assert (counts > 0)[seen].all(), told
        assert not ((counts > 0) & ~may_be & ~leading).any(), told
        assert not (counts == 1)[partial].any(), told
        assert not ((counts == MASKED) & ~partial & ~leading).any(), told


def drawn_ranges(drawn: random.Random, len_q: int, len_k: int, pairs: int) -> torch.Tensor:
    """Of each row one range or two, which lie apart; those of rows nearby are alike."""
    ends = sorted(drawn.randint(0, len_k) for _ in range(2 * pairs))
    ends[0] *= drawn.random() < 0.6
    rows = []
    for _ in range(len_q):
        moved = sorted(min(len_k, max(0, end + drawn.choice((0, 0, 1, -1)))) for end in ends)
        rows.append(moved if pairs == 1 or drawn.random() < 0.5 else moved[2:] + moved[:2])
    return torch.tensor(rows, dtype=torch.int32)


@interpreted
@pytest.mark.parametrize("sides", SIDES, ids=str)
@pytest.mark.parametrize("pairs", [1, 2])
@pytest.mark.parametrize("bounds", [(-1, -1), (-1, 0), (40, -1), (60, 9), (20, 5, 19)], ids=str)
def test_tiles_of_ranges_need_no_mask_where_every_row_sees_all_of_them(bounds, pairs, sides):
    """Of two ranges that holds for the one with more of such tiles, and tiles that both have count
    as the first one's. A window cuts ranges, but not one that begins at a leading key."""
    (m, n), drawn = sides, random.Random(pairs)
    for draw in range(20):
        len_q, len_k = drawn.randint(1, 3 * m), drawn.randint(1, drawn.choice((1, MOST)) * n)
        ranges = drawn_ranges(drawn, len_q, len_k, pairs)
        # A bound of the first tile's last row, or first row, lies at an edge of tiles or beside it.
        at = len_k - len_q + drawn.choice((0, m - 1)) + (bounds[1] + 1 if draw % 2 else -bounds[0])
        mask = MaskSpec(*bounds, shift=-at % n + drawn.choice((-1, 0, 1)))
        counts = visits("visit_keys", mask, sides, len_q, len_k, ranges=ranges)
        told = f"{mask} {len_q} x {len_k} {ranges.tolist()}\n{counts}"
        diagonal = torch.arange(len_q)[:, None] + mask.offset(len_q, len_k)
        windows = (diagonal - mask.left if mask.left >= 0 else diagonal * 0).expand(-1, pairs)
        if mask.right >= 0:
            ranges[:, 1::2] = ranges[:, 1::2].minimum(diagonal + mask.right + 1)
        leads = ranges[:, ::2] < mask.first
        ranges[:, ::2] = torch.where(leads, ranges[:, ::2], ranges[:, ::2].maximum(windows))
        assert set(counts.unique().tolist()) <= {0, 1, MASKED}, told
        cols = torch.arange(MOST * n)
        for tile, own in enumerate(ranges.split(m)):
            # By rows: the lower range first, and one that is empty last.
            own = sorted_pairs(own, len_k)
            first = windows[tile * m : tile * m + m, :, None]
            shown = (cols >= own[..., :1].maximum(first)) & (cols < own[..., 1:])
            seen = shown.view(*shown.shape[:2], MOST, n)
            # What lies between the first and the last key of a run is visited, and no more.
            visited = torch.zeros(MOST, dtype=torch.bool)
            for begin, end in zip(own[..., 0].amin(0), own[..., 1].amax(0), strict=True):
                visited[begin // n : (end + n - 1) // n] = True
            assert (counts[tile] > 0).equal(visited), told
            full = seen.all(3).all(0)
            before = torch.arange(MOST) * n < own[:, 0, 1].max()
            most = max((full[i] & ~(before & bool(i))).sum() for i in range(pairs))
            assert (counts[tile] == 1).sum() == most, told
            assert full.any(0)[counts[tile] == 1].all(), told


def sorted_pairs(ranges: torch.Tensor, len_k: int) -> torch.Tensor:
    """(rows, pairs, 2): the pairs of each row in order, those that show nothing as (len_k, 0)."""
    pairs = ranges.view(len(ranges), -1, 2).long()
    empty = pairs[..., :1] >= pairs[..., 1:]
    pairs = torch.where(empty, torch.tensor([len_k, 0]), pairs)
    order = pairs[..., 0].argsort(stable=True)
    return pairs.gather(1, order[..., None].expand_as(pairs))


@triton.jit
def deal(tiles, heads, order: TileOrder, total, IS_LONGEST_LAST: tl.constexpr):
    pid = tl.program_id(0)
    tile, head = head_of(pid, order, total, IS_LONGEST_LAST)
    tl.store(tiles + pid, tile)
    tl.store(heads + pid, head)


@interpreted
@pytest.mark.parametrize("last_first", [False, True])
def test_heads_go_in_groups_and_the_longest_tiles_of_a_group_first(last_first):
    count, total, together = 3, 8, 3
    programs = count * total
    parameters = {
        "tiles": Pointer("tiles", "int32"),
        "heads": Pointer("heads", "int32"),
        "order": TileOrder(Scalar(count), Scalar(together), Scalar(1)),
        "total": Scalar(total),
        "IS_LONGEST_LAST": last_first,
    }
    found = {name: torch.full((programs,), -1, dtype=torch.int32) for name in ("tiles", "heads")}
    run_call(KernelCall(KernelRef(__name__, "deal"), (programs, 1, 1), parameters), found)
    order = range(count)[::-1] if last_first else range(count)
    groups = [range(begin, min(begin + together, total)) for begin in range(0, total, together)]
    want = [(tile, head) for group in groups for tile in order for head in group]
    assert list(zip(found["tiles"].tolist(), found["heads"].tolist(), strict=True)) == want


@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
