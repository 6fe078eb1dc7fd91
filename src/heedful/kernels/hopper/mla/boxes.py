"""Boxes of latent vectors in shared memory, 64 vectors by 64 columns each. Eight boxes are values,
in a left half and a right half. The ninth is used only as key."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.sm90.compat import reinterpret

KEYS: gl.constexpr = gl.constexpr(64)  # a block of nine boxes has 64 keys
WIDTH: gl.constexpr = gl.constexpr(64)  # columns of a box
VALUE_BOXES: gl.constexpr = gl.constexpr(8)
BOXES: gl.constexpr = gl.constexpr(9)
HALF: gl.constexpr = gl.constexpr(256)  # columns of half the values


@gluon.jit
def boxes_of(tiles):
    """Wide tiles in shared memory, as boxes of 64 columns."""
    ROWS_OF: gl.constexpr = tiles.shape[1]
    COUNT: gl.constexpr = tiles.shape[0] * tiles.shape[2] // WIDTH
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS_OF, WIDTH], tiles.dtype)
    return reinterpret(tiles, tiles.dtype, [COUNT, ROWS_OF, WIDTH], layout)
