"""As test_backward_protocol.py: work tiles whose last ones are split, whose dK leaves through the
memory of their keys, or whose visits begin with query tiles of their own."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from cpu.kernels.hopper.test_backward_protocol import DENSE, PACKED, TILES, Checked
from heedful.kernels.hopper.backward import tile as tile_file
from heedful.kernels.hopper.backward.dq import epilogue as epilogue_file
from support.hopper.backward_roles import KEYS
from support.hopper.backward_sizes import BLOCK_N, Tile
from support.hopper.hosted import Host, Int, Machine, Numbers


@pytest.mark.parametrize("sizes", (DENSE[0], DENSE[3], DENSE[6]), ids=str)
@pytest.mark.parametrize("tail, splits", [(1, 2), (2, 3)])
def test_work_tiles_that_are_left_once_all_programs_had_as_many_are_split(sizes, tail, splits):
    tile = TILES[tail]
    tail = min(tail, sum(-(-keys // BLOCK_N) for _, keys in sizes.lengths) * sizes.heads_k)
    device = Checked(sizes, 3, True, False, splits, splits=splits, tail=tail, tile=tile)
    device.run()
    device.check()


@pytest.mark.parametrize(
    "key_blocks, l2_heads, heads", [(5, 1, 3), (4, 2, 7), (3, 8, 8), (9, 3, 4)]
)
def test_the_epilogue_adds_the_keys_of_split_tiles_where_the_kernel_took_them(
    key_blocks, l2_heads, heads
):
    numbers = Numbers(Machine(0), lambda now: 0, 1)
    host = Host({"gl": numbers, "tl": numbers})
    swizzle, keys = host.turned(tile_file.l2_swizzle), host.turned(epilogue_file.keys_of_tail)
    order = Int(key_blocks), Int(heads), Int(l2_heads), Int((heads - 1) // l2_heads)
    tiles = key_blocks * heads
    for whole in range(tiles):
        tail = SimpleNamespace(whole=Int(whole), key_blocks=order[0], l2_heads=order[2])
        tail.l2_groups, tail.heads = order[3], order[1]
        for box in range(2 * (tiles - whole)):
            head, block = swizzle(Int(whole + box // 2), *order)
            assert keys(tail, Int(box), 2) == (head, block * BLOCK_N + box % 2 * KEYS)


@pytest.mark.parametrize("sizes", (*DENSE[:3], DENSE[7], PACKED[0]), ids=str)
@pytest.mark.parametrize("programs, splits", [(2, 1), (3, 2)])
def test_gradients_of_keys_leave_through_the_memory_of_the_keys(sizes, programs, splits):
    tile = Tile(dk_in_keys=True)
    device = Checked(sizes, programs, True, False, splits, splits=splits, tile=tile)
    device.run()
    device.check()


@pytest.mark.parametrize("sizes", (DENSE[0], DENSE[1], DENSE[6]), ids=str)
@pytest.mark.parametrize("programs, splits, block_m", [(2, 1, 64), (3, 3, 128)])
def test_key_tiles_begin_with_query_tiles_of_their_own(sizes, programs, splits, block_m):
    tile = Tile(block_m, 192 - block_m, rotates=True)
    device = Checked(sizes, programs, True, False, splits, splits=splits, tile=tile)
    device.run()
    device.check()
