"""What kernels read of a block mask's lists: tiles, steps and bits, never outside of memory. In
Triton's interpreter; in a process of their own: see `support.runs.interpreted`.
"""

from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl

from heedful.kernels.args.shared import BlockLists, Tile
from heedful.kernels.common.block_lists import bits_visible, list_of, listed, step_of
from heedful.kernels.common.sequences import Place, Seqlens
from heedful.kernels.common.tile_range import listed_tiles
from heedful.launch.spec import KernelCall, KernelRef, Pointer, Scalar
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import run_call

BATCH, HEADS, TILES, WIDTH, POOL = 2, 3, 4, 3, 5


class Lists(NamedTuple):
    blocks: BlockLists


@triton.jit
def read(
    io: Lists,
    found,
    row,
    len_q,
    len_k,
    tile: Tile,
    STEPS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Of each head: counts of the list of `row`, the tiles that it visits, and its steps."""
    b, h = tl.program_id(0) // 3, tl.program_id(0) % 3
    base = list_of(b, h, row, io.blocks)
    whole, part = listed(base, io.blocks)
    seq = Seqlens(
        token_q=0, len_q=len_q, stored_q=len_q, token_k=0, len_k=len_k, stored_k=len_k, off=0
    )
    tiles = listed_tiles(row, Place(b, h, 0, seq), io.blocks, tile)
    found += tl.program_id(0) * (8 + 2 * STEPS)
    tl.store(found, whole)
    tl.store(found + 1, part)
    tl.store(found + 2, tiles.first_end - tiles.first_begin)
    tl.store(found + 3, tiles.begin)
    tl.store(found + 4, tiles.full_begin)
    tl.store(found + 5, tiles.full_end)
    tl.store(found + 6, tiles.end)
    for step in range(STEPS):
        # As visits are: a tensor.
        visit = tl.cast(step, tl.int32)
        col, bits = step_of(base, visit, len_k, io.blocks, tile.BLOCK_N, IS_MASKED)
        tl.store(found + 8 + 2 * step, col)
        tl.store(found + 9 + 2 * step, bits)


@triton.jit
def show(io: Lists, found, index, row0, col0, M: tl.constexpr, N: tl.constexpr):
    rows = row0 + tl.arange(0, M)
    cols = col0 + tl.arange(0, N)
    ok = bits_visible(index, rows[:, None], cols[None, :], io.blocks)
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(found + at, ok.to(tl.int32))


def lists_of(entries: torch.Tensor, side: int, is_plain: bool) -> Lists:
    """entries: as BlockLists has them."""
    b, h, m = map(Scalar, entries.stride()[:3])
    lists, bits = Pointer("lists", "int32"), Pointer("bits", "int32")
    width, pool, tiles = map(Scalar, (WIDTH, POOL, TILES))
    return Lists(BlockLists(lists, bits, b, h, m, width, pool, tiles, side, is_plain, False))


def drawn_lists() -> torch.Tensor:
    """Of each head others: counts and tiles below 0 and past what there is, too."""
    generator = torch.Generator().manual_seed(3)
    shape = (BATCH, HEADS, TILES, 2 + 2 * WIDTH)
    entries = torch.randint(-2, 8, shape, generator=generator, dtype=torch.int32)
    entries[..., 0] = torch.randint(-1, WIDTH + 2, shape[:3], generator=generator)
    entries[0, 0, :, :2] = torch.tensor([1, 1])
    return entries


@interpreted
@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("side, block", [(32, 32), (32, 16), (64, 16)])
def test_a_list_is_read_within_its_bounds(side, block, masked, is_plain):
    """Counts by its width, tiles by the sequence, indices by the pool."""
    entries = drawn_lists()
    steps = side // block
    for row, len_q, len_k in [
        (0, 4 * side, 3 * side),
        (side, 4 * side, 4 * side - 1),
        (2 * side + block, 4 * side, side),
        (3 * side - 1, 4 * side, side + 1),
        (side, side, 2 * side),
        (side, side + 1, 2 * side),
        (0, side, 0),
        (0, 0, side),
    ]:
        count = WIDTH * steps
        numbers = {"row": row, "len_q": len_q, "len_k": len_k}
        parameters: dict[str, Any] = {
            "io": lists_of(entries, side, is_plain),
            "found": Pointer("found", "int32"),
            **{name: Scalar(number) for name, number in numbers.items()},
            "tile": Tile(16, 16, 16, block, 16, 16, 0, "ieee"),
            "STEPS": count,
            "IS_MASKED": masked,
        }
        found = torch.full((BATCH * HEADS, 8 + 2 * count), -9, dtype=torch.int32)
        call = KernelCall(KernelRef(__name__, "read"), (BATCH * HEADS, 1, 1), parameters)
        run_call(call, {"lists": entries, "bits": found, "found": found})
        for got, (whole, part, *pairs) in zip(
            found.tolist(), entries.flatten(0, 1)[:, row // side].tolist(), strict=True
        ):
            whole = min(max(whole, 0), WIDTH)
            part = min(max(part, 0), WIDTH - whole)
            end = (whole + part) * steps if row < len_q and len_k else 0
            full = min(whole * steps, end) if is_plain and len_k % side == 0 else 0
            assert got[:7] == [whole, part, 0, 0, 0, full, end]
            # A tile past the last one is the one behind it, of which every position is hidden.
            last = -(-len_k // side) if masked else max(len_k // side - 1, 0)
            for step in range(count):
                tile, bits = pairs[step // steps * 2 : step // steps * 2 + 2]
                col = min(max(tile, 0), last) * side + step % steps * block
                assert got[8 + 2 * step :][:2] == [col, min(bits, POOL - 1)]


@interpreted
@pytest.mark.parametrize("side", [32, 64])
def test_bits_show_keys_and_without_bits_all_are_shown(side):
    generator = torch.Generator().manual_seed(side)
    shape = (POOL, side, side // 32)
    bits = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
    shown = (bits[..., None].long() >> torch.arange(32)) & 1
    shown = shown.flatten(2)
    m, n = 16, 32
    for index, row0, col0 in [(0, 0, 0), (3, side + 16, 0), (4, 2 * side, 3 * side + side - n)]:
        for given in (index, -1, -3):
            parameters: dict[str, Any] = {
                "io": lists_of(torch.zeros(1, 1, 1, 1), side, False),
                "found": Pointer("found", "int32"),
                **{name: Scalar(x) for name, x in (("index", given), ("row0", row0))},
                "col0": Scalar(col0),
                "M": m,
                "N": n,
            }
            found = torch.full((m, n), -1, dtype=torch.int32)
            call = KernelCall(KernelRef(__name__, "show"), (1, 1, 1), parameters)
            run_call(call, {"lists": bits, "bits": bits, "found": found})
            row, col = row0 % side, col0 % side
            want = shown[index, row : row + m, col : col + n] if given >= 0 else torch.ones(m, n)
            assert found.tolist() == want.tolist()


@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
