"""The order in which programs take tiles."""

import triton
import triton.language as tl

from heedful.kernels.args.shared import TileOrder


@triton.jit
def head_of(pid, order: TileOrder, total, IS_LONGEST_LAST: tl.constexpr):
    """(tile, head over all sequences) of a program. Heads form groups whose keys fit in the L2
    cache together. Within a group, the tiles with the most work start first."""
    per_group = order.l2_heads * order.tiles
    index = pid // per_group
    begin = index * order.l2_heads
    width = tl.minimum(order.l2_heads, total - begin)
    within = pid - index * per_group
    tile = within // width
    if IS_LONGEST_LAST:
        tile = order.tiles - 1 - tile
    return tile, begin + within % width
