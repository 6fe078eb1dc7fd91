"""One fp8 call as the kernel sees it: sizes at run time, and what makes a variant."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.compat import aggregate, optional
from heedful.kernels.hopper.mma import ROWS

# Packed sequences begin at multiples of this in V transposed.
V_T_BLOCK: gl.constexpr = gl.constexpr(128)


@aggregate
class Fp8Shape:
    """Sizes of one call at run time, and the variant of the kernel. Key j is visible to query i iff
    -left <= j - i - off <= right with off = shift + align * (len_k - len_q). varlen_tiles: as in
    Shape.
    PROMOTION_INTERVAL: key tiles between two promotions of the accumulators to float32 sums, in
    registers (SUMS_IN_REGS) or shared memory. RESCALE: "threshold" or "speculative", see
    speculative_softmax_fp8.py; VOTES_LAST: the overflow vote then comes behind the wait for P V,
    amid the packing of P. PREFETCHES_TILE: consumers get the next work tile while their last P V
    runs. VISITS_SECOND: see `visits_last_second`."""

    heads: gl.tensor
    group: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    total_q: gl.tensor
    row_blocks: gl.tensor
    tiles: gl.tensor
    l2_heads: gl.tensor
    l2_groups: gl.tensor
    left: gl.tensor
    right: gl.tensor
    shift: gl.tensor
    align: gl.tensor
    cu_q: gl.tensor | gl.constexpr
    cu_k: gl.tensor | gl.constexpr
    varlen_tiles: gl.tensor | gl.constexpr
    splits: gl.constexpr
    storage: gl.constexpr
    BLOCK_N: gl.constexpr
    CONSUMERS: gl.constexpr
    Q_STAGES: gl.constexpr
    PROMOTION_INTERVAL: gl.constexpr
    RESCALE: gl.constexpr
    VOTES_LAST: gl.constexpr
    PREFETCHES_TILE: gl.constexpr
    SUMS_IN_REGS: gl.constexpr
    PINGPONG: gl.constexpr
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
        l2_heads,
        l2_groups,
        left,
        right,
        shift,
        align,
        cu_q,
        cu_k,
        varlen_tiles,
        BLOCK_N,
        CONSUMERS,
        Q_STAGES,
        PROMOTION_INTERVAL,
        RESCALE,
        VOTES_LAST,
        PREFETCHES_TILE,
        SUMS_IN_REGS,
        PINGPONG,
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
        self.l2_heads = l2_heads
        self.l2_groups = l2_groups
        self.left = left
        self.right = right
        self.shift = shift
        self.align = align
        self.cu_q = optional(cu_q)
        self.cu_k = optional(cu_k)
        self.varlen_tiles = optional(varlen_tiles)
        # Keys are never split here, and lie densely or packed.
        self.splits = gl.constexpr(None)
        self.storage = gl.constexpr(None)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.Q_STAGES = gl.constexpr(Q_STAGES)
        self.PROMOTION_INTERVAL = gl.constexpr(PROMOTION_INTERVAL)
        self.RESCALE = gl.constexpr(RESCALE)
        speculative = RESCALE == "speculative"
        assert speculative or not VOTES_LAST, "a vote before the exponentials cannot be the last"
        self.VOTES_LAST = gl.constexpr(VOTES_LAST)
        self.PREFETCHES_TILE = gl.constexpr(PREFETCHES_TILE)
        self.SUMS_IN_REGS = gl.constexpr(SUMS_IN_REGS)
        self.PINGPONG = gl.constexpr(PINGPONG)
        self.IS_RIGHT = gl.constexpr(IS_RIGHT)
        self.IS_LEFT = gl.constexpr(IS_LEFT)
        self.HAS_SOFTCAP = gl.constexpr(HAS_SOFTCAP)
        is_masked = IS_RIGHT or IS_LEFT
        self.VISITS_SECOND = gl.constexpr(
            speculative and is_masked and CONSUMERS * ROWS.value <= BLOCK_N
        )


@gluon.jit
def values_at(shape, tile, col):
    """Coordinates of V transposed (batch, kv_head, dim, position)."""
    if shape.cu_k is None:
        return [tile.batch, tile.kv_head, 0, col]
    else:
        return [0, tile.kv_head, 0, (tile.start_k // V_T_BLOCK + tile.batch) * V_T_BLOCK + col]
