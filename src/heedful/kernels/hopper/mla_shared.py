"""Shared memory of the MLA decode, and who waits for what in it.

A step has two blocks of keys. A block's last box is where its probabilities go, as soon as its
scores are there. A product takes a part of a half, and frees its boxes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.barrier import barriers
from heedful.kernels.hopper.compat import aggregate
from heedful.kernels.hopper.mla_boxes import BOXES, HALF, KEYS, VALUE_BOXES, WIDTH, boxes_of
from heedful.kernels.hopper.mla_queries import allocate_queries
from heedful.kernels.hopper.mma import ROWS

BLOCKS: gl.constexpr = gl.constexpr(2)  # of a step, one for each consumer


@gluon.constexpr_function
def box_in_turn(block, place):
    """The boxes of a block in the order in which they are released, loaded and waited for: the half
    of the consumer whose block it is, whose product with it comes first, the other, the rest."""
    half = VALUE_BOXES // 2
    return (place + half * block) % VALUE_BOXES if place < VALUE_BOXES else VALUE_BOXES


@aggregate
class MlaShared:
    """q, q_rest: queries, 256 columns by 256 and the rest. values: of a block parts of `columns`.
    rest: of a block the last box, then its probabilities. top: of a block, references of rows;
    sums: of each consumer, at the end of a piece.

    k_full: of a box. k_empty: of a part, in the order of `box_in_turn`; the last of a block has the
    rest, too. p_full: of a block's probabilities. q_full, q_empty, sums_full: of a piece.
    """

    q: gl.shared_memory_descriptor
    q_rest: gl.shared_memory_descriptor
    values: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor
    top: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    sums_full: gl.shared_memory_descriptor
    columns: gl.constexpr

    @gluon.jit
    def allocate(dtype: gl.constexpr, COLUMNS: gl.constexpr):
        part: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, COLUMNS], dtype)
        PARTS: gl.constexpr = BLOCKS * 2 * HALF // COLUMNS
        narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], dtype)
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        WARPS: gl.constexpr = 4
        q, q_rest = allocate_queries(dtype, ROWS)
        return MlaShared(
            q,
            q_rest,
            gl.allocate_shared_memory(dtype, [PARTS, KEYS, COLUMNS], part),
            gl.allocate_shared_memory(dtype, [BLOCKS, KEYS, WIDTH], narrow),
            gl.allocate_shared_memory(gl.float32, [BLOCKS, ROWS], plain),
            gl.allocate_shared_memory(gl.float32, [2, ROWS], plain),
            barriers(BLOCKS * BOXES, 1),
            barriers(PARTS, 1),
            barriers(BLOCKS, WARPS),
            barriers(1, 2 * WARPS),
            barriers(1, 2),
            barriers(1, 2 * WARPS),
            COLUMNS,
        )

    @gluon.jit
    def k_box(self, BLOCK: gl.constexpr, BOX: gl.constexpr, zero=0):
        """Columns of a block of keys: (keys, 64)."""
        if BOX == VALUE_BOXES:
            return self.rest.index(BLOCK + zero)
        else:
            return boxes_of(self.values).index(BLOCK * VALUE_BOXES + BOX + zero)

    @gluon.jit
    def part(self, BLOCK: gl.constexpr, CONSUMER: gl.constexpr, WHICH: gl.constexpr, zero=0):
        """A part of a consumer's half of a block of values: (keys, columns)."""
        return self.values.index((2 * BLOCK + CONSUMER) * (HALF // self.columns) + WHICH + zero)

    @gluon.jit
    def full(self, BLOCK: gl.constexpr, BOX: gl.constexpr):
        return self.k_full.index(BLOCK * BOXES + BOX)

    @gluon.jit
    def empty(self, BLOCK: gl.constexpr, TURN: gl.constexpr):
        """Of a block's part number TURN in `box_in_turn`."""
        return self.k_empty.index(BLOCK * (2 * HALF // self.columns) + TURN)
