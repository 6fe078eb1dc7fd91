"""One call as the kernel sees it: sizes at run time, and what makes a variant."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.compat import aggregate, optional
from heedful.kernels.hopper.dropout import Dropout
from heedful.kernels.hopper.score_mods import ScoreMods
from heedful.kernels.hopper.sequences import Storage


@aggregate
class Shape:
    """Sizes of one call at run time, and the variant of the kernel. Key j is visible to query i iff
    -left <= j - i - off <= right with off = shift + align * (len_k - len_q), or j < first and
    j - i - off <= right. first, splits: None where there are none. varlen_tiles: those of
    packed queries (varlen_scheduler.py), `tiles` of them; else None, and row_blocks for each head.

    Q_STAGES: tiles of 64 queries that shared memory has room for, at least one for each consumer.
    PACK_GQA: rows of a tile that share a position. Above 1, `heads` are KV heads, `group` is 1, and
    row r is position r // PACK_GQA of query head r % PACK_GQA of `packed_heads` that share a KV
    head.
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
    l2_heads: gl.tensor
    l2_groups: gl.tensor
    left: gl.tensor
    right: gl.tensor
    shift: gl.tensor
    align: gl.tensor
    first: gl.tensor | gl.constexpr
    splits: gl.tensor | gl.constexpr
    dim_v: gl.tensor | gl.constexpr
    packed_heads: gl.tensor | gl.constexpr
    cu_q: gl.tensor | gl.constexpr
    cu_k: gl.tensor | gl.constexpr
    varlen_tiles: gl.tensor | gl.constexpr
    storage: Storage
    score_mods: ScoreMods
    dropout: Dropout
    BLOCK_N: gl.constexpr
    PACK_GQA: gl.constexpr
    CONSUMERS: gl.constexpr
    Q_STAGES: gl.constexpr
    OUT_IN_Q: gl.constexpr
    PINGPONG: gl.constexpr
    RESCALE: gl.constexpr
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
        l2_heads,
        l2_groups,
        left,
        right,
        shift,
        align,
        first,
        splits,
        dim_v,
        packed_heads,
        cu_q,
        cu_k,
        varlen_tiles,
        storage,
        score_mods,
        dropout,
        BLOCK_N,
        PACK_GQA,
        CONSUMERS,
        Q_STAGES,
        OUT_IN_Q,
        PINGPONG,
        RESCALE,
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
        self.l2_heads = l2_heads
        self.l2_groups = l2_groups
        self.left = left
        self.right = right
        self.shift = shift
        self.align = align
        self.first = optional(first)
        self.splits = optional(splits)
        self.dim_v = optional(dim_v)
        self.packed_heads = optional(packed_heads)
        self.cu_q = optional(cu_q)
        self.cu_k = optional(cu_k)
        self.varlen_tiles = optional(varlen_tiles)
        self.storage = storage
        self.score_mods = score_mods
        self.dropout = dropout
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.PACK_GQA = gl.constexpr(PACK_GQA)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.Q_STAGES = gl.constexpr(Q_STAGES)
        self.OUT_IN_Q = gl.constexpr(OUT_IN_Q)
        self.PINGPONG = gl.constexpr(PINGPONG)
        self.RESCALE = gl.constexpr(RESCALE)
        self.IS_RIGHT = gl.constexpr(IS_RIGHT)
        self.IS_LEFT = gl.constexpr(IS_LEFT)
        self.HAS_SOFTCAP = gl.constexpr(HAS_SOFTCAP)
