"""Boxes of latent vectors in shared memory: 64 of them by 64 columns. Eight are values, in a left
half and a right half; the ninth is key alone."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.sm90.compat import reinterpret

KEYS: gl.constexpr = gl.constexpr(64)  # of a block, which is nine boxes
WIDTH: gl.constexpr = gl.constexpr(64)  # columns of a box
VALUE_BOXES: gl.constexpr = gl.constexpr(8)
BOXES: gl.constexpr = gl.constexpr(9)
HALF: gl.constexpr = gl.constexpr(256)  # columns of half the values


@gluon.jit
def boxes_of(tiles):
    """Wide tiles as boxes of 64 columns."""
    ROWS_OF: gl.constexpr = tiles.shape[1]
    COUNT: gl.constexpr = tiles.shape[0] * tiles.shape[2] // WIDTH
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS_OF, WIDTH], tiles.dtype)
    return reinterpret(tiles, tiles.dtype, [COUNT, ROWS_OF, WIDTH], layout)
