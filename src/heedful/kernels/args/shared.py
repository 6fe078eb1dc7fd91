"""Groups of several families of kernels."""

from typing import NamedTuple

from heedful.kernels.args.kinds import (
    Const,
    In,
    Num,
    Out,
    Ptr,
    Rows,
    ScoreArray,
    SplitRows,
    SplitRowVector,
)


class Sequences(NamedTuple):
    """Where sequences lie. seqlen_q, seqlen_k: rows that each has in storage, or packed tokens of
    all. cu_q, cu_k: (B + 1,); the others: (B,). new_k: rows that the kernel appends behind
    used_k, which then counts padding too; None where it appends none, as all but decode do."""

    cu_q: In[Ptr]
    cu_k: In[Ptr]
    used_q: In[Ptr]
    used_k: In[Ptr]
    leftpad_k: In[Ptr]
    seqlen_q: Num
    seqlen_k: Num
    new_k: Num


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
    """Of several splits out and lse are float32 partial results. rest: what the rounding of lse
    left, see common/log_sum.py, laid out as lse is, of results that a kernel merges; else None."""

    q: In[Rows]
    k: In[Rows]
    v: In[Rows]
    out: Out[SplitRows]
    lse: Out[SplitRowVector]
    rest: Out[Ptr]
