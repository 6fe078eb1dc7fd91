"""One call as the kernel sees it: sizes at run time, and what makes a variant."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.compat import aggregate, optional
from heedful.kernels.hopper.dropout import Dropout
from heedful.kernels.hopper.sequences import Storage
from heedful.kernels.hopper.terms import Terms


@aggregate
class Shape:
    """Sizes of one call at run time, and the variant of the kernel. Key j is visible to query i iff
    -left <= j - i - off <= right with off = shift + align * (len_k - len_q), or j < first and
    j - i - off <= right. first, splits: None where there are none. order: the tiles of packed
    queries (order.py), `tiles` of them; else None, and row_blocks for each head.

    Q_SLOTS: tiles of 64 queries that shared memory has room for, at least one for each consumer.
    PACK: rows of a tile that share a position. Above 1, `heads` are KV heads, `group` is 1, and
    row r is position r // PACK of query head r % PACK of `packed` that share a KV head.
    """

    scale_log2: gl.tensor
    softcap_scale: gl.tensor
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
    first: gl.tensor | gl.constexpr
    splits: gl.tensor | gl.constexpr
    dim_v: gl.tensor | gl.constexpr
    packed: gl.tensor | gl.constexpr
    cu_q: gl.tensor | gl.constexpr
    cu_k: gl.tensor | gl.constexpr
    order: gl.tensor | gl.constexpr
    storage: Storage
    terms: Terms
    dropout: Dropout
    BLOCK_N: gl.constexpr
    PACK: gl.constexpr
    CONSUMERS: gl.constexpr
    Q_SLOTS: gl.constexpr
    OUT_IN_Q: gl.constexpr
    ORDERED: gl.constexpr
    LAZY: gl.constexpr
    IS_RIGHT: gl.constexpr
    IS_LEFT: gl.constexpr
    HAS_SOFTCAP: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        scale_log2,
        softcap_scale,
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
        first,
        splits,
        dim_v,
        packed,
        cu_q,
        cu_k,
        order,
        storage,
        terms,
        dropout,
        BLOCK_N,
        PACK,
        CONSUMERS,
        Q_SLOTS,
        OUT_IN_Q,
        ORDERED,
        LAZY,
        IS_RIGHT,
        IS_LEFT,
        HAS_SOFTCAP,
    ):
        self.scale_log2 = scale_log2
        self.softcap_scale = softcap_scale
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
        self.first = optional(first)
        self.splits = optional(splits)
        self.dim_v = optional(dim_v)
        self.packed = optional(packed)
        self.cu_q = optional(cu_q)
        self.cu_k = optional(cu_k)
        self.order = optional(order)
        self.storage = storage
        self.terms = terms
        self.dropout = dropout
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.PACK = gl.constexpr(PACK)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.Q_SLOTS = gl.constexpr(Q_SLOTS)
        self.OUT_IN_Q = gl.constexpr(OUT_IN_Q)
        self.ORDERED = gl.constexpr(ORDERED)
        self.LAZY = gl.constexpr(LAZY)
        self.IS_RIGHT = gl.constexpr(IS_RIGHT)
        self.IS_LEFT = gl.constexpr(IS_LEFT)
        self.HAS_SOFTCAP = gl.constexpr(HAS_SOFTCAP)
