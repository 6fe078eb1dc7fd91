"""The dropout mask of heedful.kernels.common.philox, in the layout of a warpgroup's scores.

M query rows, N keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.common.philox import kept_quads, place_of


@gluon.constexpr_function
def quads_layout(M, N):
    """The layout of a (M, N / 4) tile of counters in four warps, 16 rows each. Four lanes share a
    row, as in the accumulator of a matrix product, so that the conversion to scores stays within a
    warp."""
    registers = [[0, 4 << bit] for bit in range((N // 16).bit_length() - 1)] + [[8, 0]]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [M, N // 4])


@gluon.jit
def keep_tile(dropout, tile, row, col, M: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    """Which scores of rows from `row` on and keys from `col` on are kept: one counter for
    4 keys."""
    quads: gl.constexpr = quads_layout(M, N)
    batch, head, origin_m, origin_n = place_of(dropout, tile.batch, tile.head)
    rows_M = gl.arange(0, M, layout=gl.SliceLayout(1, quads)) + (row + origin_m)
    quad_N = gl.arange(0, N // 4, layout=gl.SliceLayout(0, quads)) * 4 + (col + origin_n)
    zero_MN = gl.zeros([M, N // 4], gl.uint32, quads)
    # Only bytes change the layout; the words themselves would be four times as much data.
    k0, k1, k2, k3 = kept_quads(dropout, quad_N[None, :], rows_M[:, None], head, batch, zero_MN)
    # join adds an innermost axis, so [.., x, y] holds word 2 * x + y.
    keep_MN = gl.join(gl.join(k0, k2), gl.join(k1, k3)).reshape([M, N])
    return gl.convert_layout(keep_MN, layout) != 0


@gluon.jit
def drop(p_MN, dropout, tile, row, col):
    """Probabilities with the dropped ones at zero. The factor of the kept ones is applied to the
    output."""
    if not dropout.IS_ON:
        return p_MN
    else:
        M: gl.constexpr = p_MN.shape[0]
        N: gl.constexpr = p_MN.shape[1]
        layout: gl.constexpr = p_MN.type.layout
        keep_MN = keep_tile(dropout, tile, row, col, M, N, layout)
        return gl.where(keep_MN, p_MN, 0.0)
