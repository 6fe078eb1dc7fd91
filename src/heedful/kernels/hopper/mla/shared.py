"""Shared memory of the MLA decode, and its barriers.

A step has two blocks of keys. A product reads a half of a block's values and releases it. The first
block's last box, which is used only as key, is free as soon as its scores are there. The second
block's last box then takes its probabilities.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.mla.boxes import BOXES, HALF, KEYS, VALUE_BOXES, WIDTH, boxes_of
from heedful.kernels.hopper.mla.queries import allocate_queries
from heedful.kernels.hopper.sm90.barrier import barriers
from heedful.kernels.hopper.sm90.compat import aggregate
from heedful.kernels.hopper.sm90.mma import ROWS

BLOCKS: gl.constexpr = gl.constexpr(2)  # blocks of a step, one for each consumer
# The first block releases this, too, beside two halves.
REST: gl.constexpr = gl.constexpr(2)


@gluon.constexpr_function
def box_in_turn(block, place):
    """The boxes of a block in the order in which they are released, loaded and waited for. First
    comes the half of the consumer that owns the block, whose product with it comes first, then the
    other half. The ninth box comes first in the first block, and last in the second."""
    half = VALUE_BOXES // 2
    if block == 0:
        return place - 1 if place > 0 else VALUE_BOXES
    return (place + half) % VALUE_BOXES if place < VALUE_BOXES else VALUE_BOXES


@gluon.constexpr_function
def release_before(block, place):
    """The part that a block must have released before the box at this place is loaded: half 0 or 1,
    in the order of `box_in_turn`, or REST; -1 if an earlier box has waited for it."""
    first = 1 if block == 0 else 0
    if place < first:
        return REST
    if place == first:
        return 0
    return 1 if place == first + VALUE_BOXES // 2 else -1


@aggregate
class MlaShared:
    """q, q_rest: queries, two halves of 256 columns and the ninth box. values: both halves of each
    block. rest: the last box of each block; that of the second block then holds its probabilities.
    first_p: probabilities of the first block. top: references of rows, for each block. sums: of
    each consumer, at the end of a segment.

    k_full: a barrier for each box. k_empty: for each half, in the order of `box_in_turn`; the last
    one of the second block covers its rest, too. rest_empty: the first block's rest. p_full: the
    probabilities of each block. q_full, q_empty, sums_full: once a segment.
    """

    q: gl.shared_memory_descriptor
    q_rest: gl.shared_memory_descriptor
    values: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor
    first_p: gl.shared_memory_descriptor
    top: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    rest_empty: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    sums_full: gl.shared_memory_descriptor

    @gluon.jit
    def allocate(dtype: gl.constexpr, FETCHES: gl.constexpr):
        """FETCHES: whether queries come by their tensor map."""
        half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HALF], dtype)
        narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], dtype)
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        WARPS: gl.constexpr = 4
        q, q_rest = allocate_queries(dtype, ROWS)
        return MlaShared(
            q,
            q_rest,
            gl.allocate_shared_memory(dtype, [BLOCKS * 2, KEYS, HALF], half),
            gl.allocate_shared_memory(dtype, [BLOCKS, KEYS, WIDTH], narrow),
            gl.allocate_shared_memory(dtype, [1, ROWS, KEYS], narrow),
            gl.allocate_shared_memory(gl.float32, [BLOCKS, ROWS], plain),
            gl.allocate_shared_memory(gl.float32, [2, ROWS], plain),
            barriers(BLOCKS * BOXES, 1),
            barriers(BLOCKS * 2, 1),
            barriers(1, 1),
            barriers(BLOCKS, WARPS),
            barriers(1, 2 if FETCHES else 2 * WARPS),
            barriers(1, 2),
            barriers(1, 2 * WARPS),
        )

    @gluon.jit
    def k_box(self, BLOCK: gl.constexpr, BOX: gl.constexpr, zero=0):
        """A box of a block of keys: (keys, 64)."""
        if BOX == VALUE_BOXES:
            return self.rest.index(BLOCK + zero)
        else:
            return boxes_of(self.values).index(BLOCK * VALUE_BOXES + BOX + zero)

    @gluon.jit
    def half(self, BLOCK: gl.constexpr, CONSUMER: gl.constexpr, zero=0):
        """A consumer's half of a block of values: (keys, columns)."""
        return self.values.index(2 * BLOCK + CONSUMER + zero)

    @gluon.jit
    def probabilities(self, BLOCK: gl.constexpr, zero=0):
        """The probabilities of a block: (rows, keys)."""
        if BLOCK == 0:
            return self.first_p.index(zero)
        else:
            return self.rest.index(1 + zero)

    @gluon.jit
    def full(self, BLOCK: gl.constexpr, BOX: gl.constexpr):
        return self.k_full.index(BLOCK * BOXES + BOX)

    @gluon.jit
    def empty(self, BLOCK: gl.constexpr, WHICH: gl.constexpr):
        """The empty barrier of a part of a block, numbered as in `release_before`."""
        if WHICH == REST:
            return self.rest_empty.index(0)
        else:
            return self.k_empty.index(2 * BLOCK + WHICH)
