"""Shared memory of the forward of wide heads.

Queries, keys and values are boxes of 64 rows and 64 columns. Two adjacent boxes are a part of 128
columns; a head has four. Keys are a ring of parts. Values have one stage for each part, since a
consumer of values reads the same parts of every tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.sm90.barrier import barriers
from heedful.kernels.hopper.sm90.compat import aggregate, reinterpret
from heedful.kernels.hopper.sm90.mma import ROWS

KEYS: gl.constexpr = gl.constexpr(64)  # of a tile
PART: gl.constexpr = gl.constexpr(128)  # columns of a part
PARTS: gl.constexpr = gl.constexpr(4)
WIDTH: gl.constexpr = gl.constexpr(64)  # columns of a box
BOXES: gl.constexpr = gl.constexpr(2)  # of a part
HALVES: gl.constexpr = gl.constexpr(2)  # consumers of values
SLOTS: gl.constexpr = gl.constexpr(2)  # of probabilities


@aggregate
class WideShared:
    """q: four parts. k: a ring of parts. v: a stage for each part. p: probabilities of two tiles.
    alpha: factors of the output before these tiles. stats: references and sums of rows, at the
    end. p_full, p_empty: for each slot, of probabilities and factors. Others are full and empty
    barriers of what their names say."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    alpha: gl.shared_memory_descriptor
    stats: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    p_empty: gl.shared_memory_descriptor
    stats_full: gl.shared_memory_descriptor

    @gluon.jit
    def allocate(dtype: gl.constexpr, K_STAGES: gl.constexpr, CLUSTER: gl.constexpr):
        WARPS: gl.constexpr = 4
        part: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, PART], dtype)
        narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, KEYS], dtype)
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        return WideShared(
            gl.allocate_shared_memory(dtype, [PARTS, ROWS, PART], part),
            gl.allocate_shared_memory(dtype, [K_STAGES, KEYS, PART], part),
            gl.allocate_shared_memory(dtype, [PARTS, KEYS, PART], part),
            gl.allocate_shared_memory(dtype, [SLOTS, ROWS, KEYS], narrow),
            gl.allocate_shared_memory(gl.float32, [SLOTS, ROWS], plain),
            gl.allocate_shared_memory(gl.float32, [2, ROWS], plain),
            barriers(1, 1),
            barriers(K_STAGES, 1),
            barriers(K_STAGES, CLUSTER),
            barriers(PARTS, 1),
            barriers(PARTS, CLUSTER),
            barriers(SLOTS, WARPS),
            barriers(SLOTS, HALVES),
            barriers(1, WARPS),
        )


@gluon.jit
def boxes_of(parts, desc):
    """Parts in shared memory, as boxes of a tensor map, which may have fewer rows."""
    DOWN: gl.constexpr = parts.shape[1] // desc.block_type.shape[-2]
    shape: gl.constexpr = [parts.shape[0] * BOXES * DOWN] + desc.block_type.shape
    return reinterpret(parts, desc.dtype, shape, desc.layout)
