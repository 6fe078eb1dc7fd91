"""Groups of the Hopper forward and of the kernels before it: varlen scheduler, transpose of V."""

from typing import NamedTuple

from heedful.kernels.args.kinds import Const, In, InOut, Num, Out, Ptr, Rows, ScoreArray
from heedful.kernels.args.shared import Descales, Dropout, KVLayout, Mask, Sequences


class HopperIO(NamedTuple):
    """q, k, v and out are tensor maps. v: of fp8 transposed, keys innermost. lse: of several splits
    with a leading split."""

    q: In[Ptr]
    k: In[Ptr]
    v: In[Ptr]
    out: Out[Ptr]
    lse: Out[Ptr]


class Gqa(NamedTuple):
    """heads: those that have tiles of their own. group: of them, how many share a KV head.

    PACK_GQA: rows of a tile that share a position. Above 1, `heads` are KV heads, and row r is
    position r // PACK_GQA of query head r % PACK_GQA of `packed_heads` that share a KV head.
    """

    heads: Num
    group: Num
    packed_heads: Num
    PACK_GQA: Const


class HopperScoreMods(NamedTuple):
    """Raw scores times scale_log2 are logits in base 2; under softcap the kernel takes
    tanh(s scale / softcap) first, through 2^(s softcap_scale). per_unit: raw scores in one unit of
    the logits, for ALiBi without a bias; unit: the other way round, for a bias. longest_q,
    longest_k: of a bias, where sequences might be said to be longer, else None. alibi: (B, H)
    slopes; sink: (H,)."""

    scale_log2: Num
    softcap_scale: Num
    per_unit: Num
    unit: Num
    alibi: In[Ptr]
    stride_alibib: Num
    bias: In[ScoreArray]
    longest_q: Num
    longest_k: Num
    sink: In[Ptr]
    HAS_SOFTCAP: Const


class KVRows(NamedTuple):
    """k_rows, v_rows: from one batch entry or page to the next, in rows of the map. IS_RAGGED: K
    and V are mapped as packed tokens, so that reads end with each sequence. NO_PAGE: a power of two
    that no page reaches."""

    k_rows: Num
    v_rows: Num
    IS_RAGGED: Const
    NO_PAGE: Const


class HopperTileOrder(NamedTuple):
    """tiles: work tiles of one split; row_blocks: of one head. l2_heads: heads whose tiles are
    scheduled together; l2_groups: such groups before the last. varlen_tiles: of packed queries, see
    varlen_scheduler.py. tile_counter: of the dynamic scheduler, see tile_scheduler.py."""

    tiles: Num
    row_blocks: Num
    l2_heads: Num
    l2_groups: Num
    varlen_tiles: In[Ptr]
    tile_counter: InOut[Ptr]


class SplitKV(NamedTuple):
    """partials: dense float32 results of each split, (splits, batch, row, head, dim_v), in place of
    `out`; batch is absent, and None, of packed queries. Without splits all these are None. rest:
    what the rounding of each log-sum-exp left, of results that a kernel merges; else None."""

    partials: Out[Ptr]
    rest: Out[Ptr]
    splits: Num
    batch: Num
    dim_v: Num


class HopperStages(NamedTuple):
    """Tiles of queries (at least one for each consumer), keys and values that shared memory has
    room for. KV_SHARE_STAGES: see kv_pipeline.py."""

    Q_STAGES: Const
    K_STAGES: Const
    V_STAGES: Const
    KV_SHARE_STAGES: Const


class HopperTile(NamedTuple):
    """TAIL_D, TAIL_E: whether a tile of queries or keys, of values or results is 192 columns.
    OUT_IN_Q: results leave through memory of queries. RESCALE: "exact" moves a row's maximum with
    every tile; "threshold" looks at scores first, "speculative" at sums afterwards. V_TRANSPOSED:
    values lie with keys innermost. VISITS_SECOND: see `block_range.visits_last_second`.
    PREFETCHES_TILE: consumers get the next work tile while their last P V runs."""

    BLOCK_N: Const
    CONSUMERS: Const
    TAIL_D: Const
    TAIL_E: Const
    OUT_IN_Q: Const
    PINGPONG: Const
    RESCALE: Const
    V_TRANSPOSED: Const
    VISITS_SECOND: Const
    PREFETCHES_TILE: Const
    CONSUMER_REGS: Const
    PRODUCER_REGS: Const


class HopperFp8(NamedTuple):
    """PROMOTION_INTERVAL: key tiles between two promotions of the accumulators to float32 sums, in
    registers (SUMS_IN_REGS) or shared memory. VOTES_LAST: the overflow vote comes behind the wait
    for P V, amid the packing of P."""

    descales: Descales
    PROMOTION_INTERVAL: Const
    SUMS_IN_REGS: Const
    VOTES_LAST: Const


class HopperParams(NamedTuple):
    """All that the roles of a Hopper forward share. Of packed queries seqs.seqlen_q counts the
    tokens of all. Spills of kernels with splits and biases depend on the order (Triton 3.9)."""

    seqs: Sequences
    mods: HopperScoreMods
    dropout: Dropout
    split: SplitKV
    kv: KVLayout
    order: HopperTileOrder
    kv_rows: KVRows
    gqa: Gqa
    mask: Mask
    stages: HopperStages
    tile: HopperTile
    fp8: HopperFp8


class TransposeV(NamedTuple):
    """For warps that transpose V beside the attention: v, the tensor map of (B, N, G, E), into v_t,
    (B, G, dim_v, padded_k). tiles: of V. counts: how many tiles were taken, then how many of each
    head's chunks are ready. l2_heads, l2_groups: KV heads, as in HopperTileOrder."""

    v: In[Ptr]
    v_t: Out[Ptr]
    counts: InOut[Ptr]
    heads_k: Num
    dim_v: Num
    padded_k: Num
    tiles: Num
    l2_heads: Num
    l2_groups: Num
    E: Const


class VarlenIO(NamedTuple):
    """Packed queries' tiles in order, and what is cleared of tokens of no sequence: out
    (total_q, heads, DIM) and lse (heads, total_q), either of which may be None."""

    cu_q: In[Ptr]
    cu_k: In[Ptr]
    varlen_tiles: Out[Ptr]
    tile_counter: Out[Ptr]
    out: InOut[Ptr]
    lse: InOut[Ptr]
    stride_om: Num
    stride_oh: Num


class VarlenSizes(NamedTuple):
    """capacity: tiles that `varlen_tiles` has room for, which sequences that overlap would
    exceed. short_q: sequences of up to so many queries have no tiles, another kernel has them; None
    where all have."""

    total_q: Num
    total_k: Num
    batch: Num
    heads: Num
    capacity: Num
    short_q: Num


class TransposeIO(NamedTuple):
    """v, (B, N, G, E) or packed (T, G, E), into v_t, (B, G, E, padded_k) or (G, E, padded_k).
    tile_counter: the attention kernel's, which begins at 0."""

    v: In[Rows]
    v_t: Out[Ptr]
    cu_k: In[Ptr]
    tile_counter: Out[Ptr]


class TransposeSizes(NamedTuple):
    """seqlen_k: N, or T. blocks: of the positions of one head."""

    heads_k: Num
    seqlen_k: Num
    blocks: Num
    batch: Num
    dim_v: Num
    padded_k: Num
