"""What kernels are given, declared once: groups of parameters that host and device share.

On the host a leaf is an `Argument` (a pointer, a number or a tensor map) that is given at run time;
any other leaf is a constant that the kernel is compiled for, and None stands for an absent operand.
A kernel reads a leaf by the same name; one that is a constant is known when compiling. Launchers
know leaves by dotted names: mask.left, io.q.ptr.

A field says what it holds. `Num` is a number, `Const` (an upper-case name) always a constant. `In`,
`Out` and `InOut` are memory that the kernel reads, writes, or has to find as it was: because it
reads and writes it, or because it writes a part and keeps the rest. Said of a group, they hold for
the `Ptr` in it. What must start at zero is said by a `Workspace`.
"""

from typing import NamedTuple

from heedful.kernels.arg_kinds import (
    Const,
    In,
    InOut,
    Num,
    Out,
    Ptr,
)
from heedful.kernels.arg_kinds import Kind as Kind
from heedful.kernels.arg_kinds import Rows as Rows
from heedful.kernels.arg_kinds import RowVector as RowVector
from heedful.kernels.arg_kinds import ScoreArray as ScoreArray
from heedful.kernels.arg_kinds import SplitRows as SplitRows
from heedful.kernels.arg_kinds import SplitRowVector as SplitRowVector
from heedful.kernels.args_decode import DecodeTile as DecodeTile
from heedful.kernels.args_decode import DecodeWork as DecodeWork


class Sequences(NamedTuple):
    """Where sequences lie. seqlen_q, seqlen_k: rows that each has in storage, or packed tokens of
    all. cu_q, cu_k: (B + 1,); the others: (B,)."""

    cu_q: In[Ptr]
    cu_k: In[Ptr]
    used_q: In[Ptr]
    used_k: In[Ptr]
    leftpad_k: In[Ptr]
    seqlen_q: Num
    seqlen_k: Num


class Shape(NamedTuple):
    """longest_q, longest_k: rows that the longest sequence may have; also those of a bias."""

    batch: Num
    heads_q: Num
    heads_k: Num
    longest_q: Num
    longest_k: Num


class Mask(NamedTuple):
    """Query i sees key j iff -left <= j - i - off <= right, or j < first and j - i - off <= right;
    off = shift, or shift + len_k - len_q if bottom_right is 1.

    tree: (B, M, M) over the last M keys, or None.
    """

    left: Num
    right: Num
    first: Num
    bottom_right: Num
    shift: Num
    tree: In[Ptr]
    stride_treeb: Num
    stride_treem: Num
    HAS_LEFT: Const
    HAS_RIGHT: Const


class ScoreMods(NamedTuple):
    """What makes scores of raw products, in this order: scale, softcap, ALiBi, bias.
    sink: (H,), one more logit of each row.

    IS_ADJUSTED: scores pass through softcap, ALiBi or bias, or the scale is not positive, so that
    the maximum must be taken after them.
    """

    scale: Num
    softcap: Num
    alibi: In[Ptr]
    stride_alibib: Num
    bias: In[ScoreArray]
    sink: In[Ptr]
    HAS_SOFTCAP: Const
    IS_ADJUSTED: Const


class Dropout(NamedTuple):
    """threshold: Philox words below it are kept, as the signed integer of its bits.
    inverse_keep: what kept probabilities are multiplied by. origin_*: added to the indices that a
    word is drawn for; None where they are four numbers in memory behind the seed.

    IS_QUAD: columns of the mask come in aligned fours.
    """

    seed: In[Ptr]
    threshold: Num
    inverse_keep: Num
    origin_b: Num
    origin_h: Num
    origin_m: Num
    origin_n: Num
    IS_ON: Const
    IS_QUAD: Const


class KVLayout(NamedTuple):
    """Where a sequence's keys and values lie in a cache. table: (B, pages of a sequence), or None;
    entries: pages or batch entries that there are; batch_idx: (B,), or None."""

    table: In[Ptr]
    stride_tableb: Num
    page_size: Num
    entries: Num
    batch_idx: In[Ptr]


class Descale(NamedTuple):
    """What stored numbers are multiplied by and then moved by; the strides are of both."""

    ptr: In[Ptr]
    shift: In[Ptr]
    stride_b: Num
    stride_n: Num
    stride_h: Num


class Descales(NamedTuple):
    """KV_GROUP: dims of a key that share a descale, 0 for one of a (batch, kv head)."""

    q: Descale
    k: Descale
    v: Descale
    KV_GROUP: Const
    IS_INT4: Const


class TileOrder(NamedTuple):
    """Which program makes which tile. tiles: of a head; l2_heads: whose keys fit in L2 together;
    splits: of a tile's keys."""

    tiles: Num
    l2_heads: Num
    splits: Num


class Tile(NamedTuple):
    """BLOCK_R: above 0, columns R of q and k that BLOCK_D leaves: a product of their own."""

    HEAD_DIM: Const
    HEAD_DIM_V: Const
    BLOCK_M: Const
    BLOCK_N: Const
    BLOCK_D: Const
    BLOCK_E: Const
    BLOCK_R: Const
    PRECISION: Const


class ForwardIO(NamedTuple):
    """Of several splits out and lse are float32 partial results."""

    q: In[Rows]
    k: In[Rows]
    v: In[Rows]
    out: Out[SplitRows]
    lse: Out[SplitRowVector]


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
    the logits. longest_q, longest_k: of a bias, where sequences might be said to be longer, else
    None. alibi: (B, H) slopes; sink: (H,)."""

    scale_log2: Num
    softcap_scale: Num
    per_unit: Num
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
    """partials: dense float32 results of each split, (splits, tokens, head, dim_v), in place of
    `out`. None without splits."""

    partials: Out[Ptr]
    splits: Num
    tokens: Num
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
    tokens of all."""

    seqs: Sequences
    gqa: Gqa
    mask: Mask
    mods: HopperScoreMods
    dropout: Dropout
    kv: KVLayout
    kv_rows: KVRows
    order: HopperTileOrder
    split: SplitKV
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
    exceed."""

    total_q: Num
    total_k: Num
    batch: Num
    heads: Num
    capacity: Num


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


class RowArray(NamedTuple):
    """A (batch, head, row) array with any strides."""

    ptr: Ptr
    stride_b: Num
    stride_h: Num
    stride_m: Num


class QueryGradientsIO(NamedTuple):
    """delta lies as lse does."""

    q: In[Rows]
    k: In[Rows]
    v: In[Rows]
    out: In[Rows]
    dout: In[Rows]
    lse: In[RowVector]
    dlse: In[RowArray]
    delta: Out[Ptr]
    dq: Out[Rows]


class KeyGradientsIO(NamedTuple):
    """delta lies as lse does."""

    q: In[Rows]
    k: In[Rows]
    v: In[Rows]
    dout: In[Rows]
    lse: In[RowVector]
    delta: In[Ptr]
    dk: Out[Rows]
    dv: Out[Rows]


class BiasGradientsIO(NamedTuple):
    """delta lies as lse does."""

    q: In[Rows]
    k: In[Rows]
    v: In[Rows]
    dout: In[Rows]
    lse: In[RowVector]
    delta: In[Ptr]
    dbias: Out[ScoreArray]


class SinkGradientsIO(NamedTuple):
    """delta lies as lse does; sink and dsink: (H,)."""

    sink: In[Ptr]
    lse: In[RowVector]
    delta: In[Ptr]
    dsink: Out[Ptr]


class ProbabilitiesIO(NamedTuple):
    """What no sequence uses of probs is left as it is."""

    q: In[Rows]
    k: In[Rows]
    lse: In[RowVector]
    probs: InOut[ScoreArray]


class CombineIO(NamedTuple):
    partial_out: In[SplitRows]
    partial_lse: In[SplitRowVector]
    sink: In[Ptr]
    out: Out[Rows]
    lse: Out[RowVector]


class ClearOutsideIO(NamedTuple):
    """Tokens of sequences are left as they are."""

    cu_seqlens: In[Ptr]
    out: InOut[SplitRows]
    lse: InOut[SplitRowVector]


class ClearUnusedIO(NamedTuple):
    """Rows that a sequence uses are left as they are."""

    cu_seqlens: In[Ptr]
    seqused: In[Ptr]
    leftpad: In[Ptr]
    x: InOut[Rows]
    y: InOut[Rows]


class AppendIO(NamedTuple):
    """cache_seqlens, leftpad_k, seqused: (B,). All other rows of the cache are left as they are."""

    k_new: In[Rows]
    v_new: In[Rows]
    cache_seqlens: In[Ptr]
    leftpad_k: In[Ptr]
    k: InOut[Rows]
    v: InOut[Rows]
    seqused: Out[Ptr]


class RotateIO(NamedTuple):
    """cache_seqlens: (B,)."""

    q: In[Rows]
    cache_seqlens: In[Ptr]
    rotated: Out[Rows]


class Rotary(NamedTuple):
    """Tables of (positions, half). position0: added to a row's place in the cache."""

    cos: In[Ptr]
    sin: In[Ptr]
    stride_n: Num
    half: Num
    positions: Num
    position0: Num
    IS_INTERLEAVED: Const


class OwnShape(NamedTuple):
    """The shape of a bias, each size 1 or the scores'."""

    b: Num
    h: Num
    m: Num
    n: Num
