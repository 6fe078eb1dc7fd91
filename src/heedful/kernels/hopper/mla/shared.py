"""Shared memory of the MLA decode, and who waits for what in it.

A step has two blocks of keys. A product takes a half of a block's values, and frees it. The first
block's last box, which is key alone, is free as soon as its scores are there. The second's is then
where its probabilities go.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.mla.boxes import BOXES, HALF, KEYS, VALUE_BOXES, WIDTH, boxes_of
from heedful.kernels.hopper.mla.queries import allocate_queries
from heedful.kernels.hopper.sm90.barrier import barriers
from heedful.kernels.hopper.sm90.compat import aggregate
from heedful.kernels.hopper.sm90.mma import ROWS

BLOCKS: gl.constexpr = gl.constexpr(2)  # of a step, one for each consumer
# What the first block releases beside two halves.
REST: gl.constexpr = gl.constexpr(2)


@gluon.constexpr_function
def box_in_turn(block, place):
    """The boxes of a block in the order in which they are released, loaded and waited for: the half
    of the consumer whose block it is, whose product with it comes first, and the other. The rest is
    the first of the first block, and the last of the second."""
    half = VALUE_BOXES // 2
    if block == 0:
        return place - 1 if place > 0 else VALUE_BOXES
    return (place + half) % VALUE_BOXES if place < VALUE_BOXES else VALUE_BOXES


@gluon.constexpr_function
def release_before(block, place):
    """What a block must have released before the box in this place is loaded: half 0 or 1, in the
    order of `box_in_turn`, or REST; -1 = nothing that an earlier box has not waited for."""
    first = 1 if block == 0 else 0
    if place < first:
        return REST
    if place == first:
        return 0
    return 1 if place == first + VALUE_BOXES // 2 else -1


@aggregate
class MlaShared:
    """q, q_rest: queries, 256 columns by 256 and the rest. values: of a block both halves. rest: of
    a block the last box; of the second, then its probabilities. first_p: probabilities of the first
    block. top: of a block, references of rows; sums: of each consumer, at the end of a segment.

    k_full: of a box. k_empty: of a half, in the order of `box_in_turn`; the last of the second
    block has the rest, too. rest_empty: of the first block's rest. p_full: of a block's
    probabilities. q_full, q_empty, sums_full: of a segment.
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
    def allocate(dtype: gl.constexpr):
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
            barriers(1, 2 * WARPS),
            barriers(1, 2),
            barriers(1, 2 * WARPS),
        )

    @gluon.jit
    def k_box(self, BLOCK: gl.constexpr, BOX: gl.constexpr, zero=0):
        """Columns of a block of keys: (keys, 64)."""
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
        """Of a block: (rows, keys)."""
        if BLOCK == 0:
            return self.first_p.index(zero)
        else:
            return self.rest.index(1 + zero)

    @gluon.jit
    def full(self, BLOCK: gl.constexpr, BOX: gl.constexpr):
        return self.k_full.index(BLOCK * BOXES + BOX)

    @gluon.jit
    def empty(self, BLOCK: gl.constexpr, WHICH: gl.constexpr):
        """Of what a block releases, numbered as by `release_before`."""
        if WHICH == REST:
            return self.rest_empty.index(0)
        else:
            return self.k_empty.index(2 * BLOCK + WHICH)
