"""Groups of the Hopper forward, and of the kernels that run before it: varlen scheduler, transpose
of V."""

from typing import NamedTuple

from heedful.kernels.args.kinds import (
    Const,
    In,
    InOut,
    Num,
    Out,
    Ptr,
    RelativeBias,
    RowArray,
    Rows,
    ScoreArray,
)
from heedful.kernels.args.shared import (
    Descales,
    Dropout,
    KeyHulls,
    KVLayout,
    Mask,
    Sequences,
)


class HopperIO(NamedTuple):
    """q, k, v and out are tensor maps; out is None where results are float32, see SplitKV. v: in
    fp8 it is transposed, with keys innermost. lse: with several splits it has a leading index for
    the split."""

    q: In[Ptr]
    k: In[Ptr]
    v: In[Ptr]
    out: Out[Ptr]
    lse: Out[Ptr]


class Gqa(NamedTuple):
    """heads: heads that have work tiles of their own. group: how many of these share a KV head.

    PACK_GQA: rows of a tile that share a position. Above 1, `heads` counts KV heads, and row r of a
    tile is position r // PACK_GQA of query head r % PACK_GQA among the `packed_heads` of a KV head.
    """

    heads: Num
    group: Num
    packed_heads: Num
    PACK_GQA: Const


class HopperScoreMods(NamedTuple):
    """Score modifiers. Raw scores times scale_log2 are logits in base 2. With softcap, the kernel
    first computes tanh(s scale / softcap), by 2^(s softcap_scale).

    per_unit: raw scores in one unit of the logits, used for ALiBi on raw scores. unit: its
    inverse, there where scores turn to natural units: with a bias, and with ALiBi in float16. One
    of bias and relative at most is there.
    longest_q, longest_k: the extents of a bias, where sequences might claim to be longer; else
    None. alibi: (B, H) slopes. sink: (H,).
    """

    scale_log2: Num
    softcap_scale: Num
    per_unit: Num
    unit: Num
    alibi: In[Ptr]
    stride_alibib: Num
    bias: In[ScoreArray]
    relative: In[RelativeBias]
    longest_q: Num
    longest_k: Num
    sink: In[Ptr]
    HAS_SOFTCAP: Const


class KVRows(NamedTuple):
    """k_rows, v_rows: rows of the tensor map from one batch entry or page to the next. IS_RAGGED: K
    and V are mapped as packed tokens, so that reads end with each sequence. NO_PAGE: a power of two
    above all page numbers."""

    k_rows: Num
    v_rows: Num
    IS_RAGGED: Const
    NO_PAGE: Const


class HopperTileOrder(NamedTuple):
    """tiles: work tiles of one split. row_blocks: row tiles of one head. l2_heads: heads whose
    tiles are scheduled together. l2_groups: such groups before the last one. varlen_tiles: the work
    tiles of packed queries, see varlen_scheduler.py. tile_counter: the counter of the dynamic
    scheduler, see tile_scheduler.py. entry_rows: rows of a batch entry, if packed sequences are
    pieces of entries, see forward/cut_rows.py; else None."""

    tiles: Num
    row_blocks: Num
    l2_heads: Num
    l2_groups: Num
    varlen_tiles: In[Ptr]
    tile_counter: InOut[Ptr]
    hulls: KeyHulls
    entry_rows: Num


class SplitKV(NamedTuple):
    """partials: float32 results of each split, dense (splits, batch, row, head, dim_v), stored in
    place of `out`; packed queries have no batch index, and batch is None. rest: the part that the
    rounding of each log-sum-exp lost, of results that are merged later; else None. max_scores: of
    rows, without the sink, laid out as lse; else None. Without splits all other fields are None.
    PART_TILES: with numerics="invariant" a split is a part of so many key tiles, at multiples of
    them; else None. held: if a program takes all parts of its work tile, one after the other, its
    merged results so far, see `epilogue.with_held`; else None. exact: float32 results of 16-bit
    inputs, with dim_v columns, which are stored from registers; else its fields are None."""

    partials: Out[Ptr]
    rest: Out[Ptr]
    max_scores: Out[Ptr]
    splits: Num
    batch: Num
    dim_v: Num
    PART_TILES: Const
    held: InOut[Ptr]
    exact: Out[Rows]


class HopperStages(NamedTuple):
    """How many tiles of queries (at least one for each consumer), keys and values shared memory
    holds. KV_SHARE_STAGES: keys and values use the same stages, see kv_pipeline.py. STORED_STAGES:
    tiles of keys, and of values, as they are stored, which are converted, see conversion.py; 0 =
    they need not be."""

    Q_STAGES: Const
    K_STAGES: Const
    V_STAGES: Const
    KV_SHARE_STAGES: Const
    STORED_STAGES: Const


class HopperTile(NamedTuple):
    """The shape of a tile, and the variants of the kernel.

    BLOCK_N: keys of a tile. CONSUMERS: warpgroups that compute, 64 rows each. TAIL_D, TAIL_E:
    whether a tile of queries and keys, or of values and results, has 192 columns: 128 and a tail of
    64. OUT_IN_Q: results are stored through the shared memory of the queries. PINGPONG: consumers
    queue their products in turn. RESCALE: "exact" updates a row's maximum with every tile,
    "threshold" looks at the scores first, "speculative" looks at sums afterwards. V_TRANSPOSED:
    values have keys innermost. VISITS_SECOND: see `block_range.visits_last_second`.
    PREFETCHES_TILE: consumers fetch the next work tile while their last P V runs.
    """

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
    """For queries of 16 bits beside keys and values of 8 only descales are there.

    PROMOTION_INTERVAL: key tiles between two promotions of the accumulators to float32 sums.
    SUMS_IN_REGS: these sums are in registers, else in shared memory. VOTES_LAST: the overflow vote
    comes after the wait for P V, while P is packed."""

    descales: Descales
    PROMOTION_INTERVAL: Const
    SUMS_IN_REGS: Const
    VOTES_LAST: Const


class HopperParams(NamedTuple):
    """All groups that the roles of a Hopper forward share. With packed queries, seqs.seqlen_q
    counts the tokens of all sequences. The order of fields decides the spills of kernels with
    splits and biases (Triton 3.9)."""

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
    """For warps that transpose V beside the attention: v is the tensor map of (B, N, G, E), v_t is
    (B, G, dim_v, padded_k).

    counts: how many tiles of V were taken, then how many of each head's chunks are ready. tiles: of
    V. l2_heads, l2_groups: as in HopperTileOrder, of KV heads.
    """

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
    """The work tiles of packed queries, in order, and the arrays whose uncovered rows are cleared:
    out (total_q, heads, DIM) and lse (heads, total_q). Either may be None."""

    cu_q: In[Ptr]
    cu_k: In[Ptr]
    varlen_tiles: Out[Ptr]
    tile_counter: Out[Ptr]
    out: InOut[Ptr]
    lse: InOut[Ptr]
    stride_om: Num
    stride_oh: Num


class VarlenSizes(NamedTuple):
    """capacity: tiles that `varlen_tiles` has room for; sequences that overlap would exceed it.
    short_q: sequences of up to so many queries have no tiles, because another kernel handles them;
    None if all sequences have tiles."""

    total_q: Num
    total_k: Num
    batch: Num
    heads: Num
    capacity: Num
    short_q: Num


class HullIO(NamedTuple):
    """key_hulls: int32 (entries, 8), see forward/key_hulls.py. heads: with ranges of their own.
    blocks: of 64 rows that the longest sequence has. entries: of a head."""

    key_hulls: Out[Ptr]
    heads: Num
    blocks: Num
    entries: Num


class CutIO(NamedTuple):
    """ranges: of all heads. parts: int32, two numbers of each block of rows. tokens: int32, where
    sequences begin. Both: see forward/cut_rows.py. rows, blocks: of a batch entry."""

    ranges: In[RowArray]
    parts: InOut[Ptr]
    tokens: Out[Ptr]
    rows: Num
    blocks: Num


class CutHullIO(NamedTuple):
    """tokens: as `CutIO` has them, (sequences + 1,). ranges: int32 (tokens, 2), which count from
    the first key of their sequence. key_hulls: as in `HullIO`. rows: of a batch entry."""

    tokens: In[Ptr]
    ranges: Out[Ptr]
    key_hulls: Out[Ptr]
    sequences: Num
    rows: Num


class SeenListsIO(NamedTuple):
    """seen: int32, lists of tiles of queries, see forward/seen_lists.py; its strides are those of
    batch entries, heads and tiles. tiles: of a head. heads: with lists of their own."""

    seen: Out[Ptr]
    stride_b: Num
    stride_h: Num
    stride_m: Num
    tiles: Num
    heads: Num


class TransposeIO(NamedTuple):
    """v, (B, N, G, E) or packed (T, G, E); v_t, (B, G, E, padded_k) or (G, E, padded_k).
    tile_counter: the attention kernel's, which this kernel sets to 0."""

    v: In[Rows]
    v_t: Out[Ptr]
    cu_k: In[Ptr]
    tile_counter: Out[Ptr]


class TransposeSizes(NamedTuple):
    """seqlen_k: N, or T. blocks: tiles of positions of one head."""

    heads_k: Num
    seqlen_k: Num
    blocks: Num
    batch: Num
    dim_v: Num
    padded_k: Num
