"""In which order programs take their work."""

import triton
import triton.language as tl

from heedful.kernels.args.shared import TileOrder


@triton.jit
def head_of(pid, order: TileOrder, total, IS_LONGEST_LAST: tl.constexpr):
    """(tile, flat head) of a program: heads go in groups whose keys fit in L2 together, and in
    a group the tiles with most work start first."""
    per_group = order.l2_heads * order.tiles
    index = pid // per_group
    begin = index * order.l2_heads
    width = tl.minimum(order.l2_heads, total - begin)
    within = pid - index * per_group
    tile = within // width
    if IS_LONGEST_LAST:
        tile = order.tiles - 1 - tile
    return tile, begin + within % width
