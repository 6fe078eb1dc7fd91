"""One fp8 call as the kernel sees it: sizes at run time, and what makes a variant."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.compat import aggregate, optional
from heedful.kernels.hopper.schedule import ROWS

# Sequences of packed keys begin at multiples of this in turned values.
TURN_N: gl.constexpr = gl.constexpr(128)


@aggregate
class Fp8Shape:
    """Sizes of one call at run time, and the variant of the kernel. Key j is visible to query i iff
    -left <= j - i - off <= right with off = shift + align * (len_k - len_q). order: as in Shape.
    FLUSH: key tiles between two flushes of the accumulators into float32 sums, in registers
    (SUMS_IN_REGS) or shared memory. LATE: exponentials before it is known whether references move,
    see fp8_recheck.py; LOOKS_LAST: which is then asked behind the wait for P V, amid the packing of
    P. HEARS_AHEAD: consumers hear of the next tile while their last P V runs. VISITS_SECOND: see
    `visits_last_second`."""

    heads: gl.tensor
    group: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    total_q: gl.tensor
    row_blocks: gl.tensor
    tiles: gl.tensor
    section: gl.tensor
    sections: gl.tensor
    left: gl.tensor
    right: gl.tensor
    shift: gl.tensor
    align: gl.tensor
    cu_q: gl.tensor | gl.constexpr
    cu_k: gl.tensor | gl.constexpr
    order: gl.tensor | gl.constexpr
    splits: gl.constexpr
    storage: gl.constexpr
    BLOCK_N: gl.constexpr
    CONSUMERS: gl.constexpr
    Q_SLOTS: gl.constexpr
    FLUSH: gl.constexpr
    LATE: gl.constexpr
    LOOKS_LAST: gl.constexpr
    HEARS_AHEAD: gl.constexpr
    SUMS_IN_REGS: gl.constexpr
    ORDERED: gl.constexpr
    IS_RIGHT: gl.constexpr
    IS_LEFT: gl.constexpr
    HAS_SOFTCAP: gl.constexpr
    VISITS_SECOND: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        heads,
        group,
        seqlen_q,
        seqlen_k,
        total_q,
        row_blocks,
        tiles,
        section,
        sections,
        left,
        right,
        shift,
        align,
        cu_q,
        cu_k,
        order,
        BLOCK_N,
        CONSUMERS,
        Q_SLOTS,
        FLUSH,
        LATE,
        LOOKS_LAST,
        HEARS_AHEAD,
        SUMS_IN_REGS,
        ORDERED,
        IS_RIGHT,
        IS_LEFT,
        HAS_SOFTCAP,
    ):
        self.heads = heads
        self.group = group
        self.seqlen_q = seqlen_q
        self.seqlen_k = seqlen_k
        self.total_q = total_q
        self.row_blocks = row_blocks
        self.tiles = tiles
        self.section = section
        self.sections = sections
        self.left = left
        self.right = right
        self.shift = shift
        self.align = align
        self.cu_q = optional(cu_q)
        self.cu_k = optional(cu_k)
        self.order = optional(order)
        # Keys are never split here, and lie densely or packed.
        self.splits = gl.constexpr(None)
        self.storage = gl.constexpr(None)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.Q_SLOTS = gl.constexpr(Q_SLOTS)
        self.FLUSH = gl.constexpr(FLUSH)
        self.LATE = gl.constexpr(LATE)
        assert LATE or not LOOKS_LAST, "a look before the exponentials cannot be the last"
        self.LOOKS_LAST = gl.constexpr(LOOKS_LAST)
        self.HEARS_AHEAD = gl.constexpr(HEARS_AHEAD)
        self.SUMS_IN_REGS = gl.constexpr(SUMS_IN_REGS)
        self.ORDERED = gl.constexpr(ORDERED)
        self.IS_RIGHT = gl.constexpr(IS_RIGHT)
        self.IS_LEFT = gl.constexpr(IS_LEFT)
        self.HAS_SOFTCAP = gl.constexpr(HAS_SOFTCAP)
        is_masked = IS_RIGHT or IS_LEFT
        self.VISITS_SECOND = gl.constexpr(LATE and is_masked and CONSUMERS * ROWS.value <= BLOCK_N)


@gluon.jit
def values_at(shape, tile, col):
    """Coordinates of turned values (batch, kv_head, dim, position)."""
    if shape.cu_k is None:
        return [tile.batch, tile.kv_head, 0, col]
    else:
        return [0, tile.kv_head, 0, (tile.start_k // TURN_N + tile.batch) * TURN_N + col]
