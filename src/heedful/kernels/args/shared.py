"""Groups that several families of kernels share."""

from typing import NamedTuple

from heedful.kernels.args.kinds import (
    Const,
    In,
    Num,
    Out,
    Ptr,
    RelativeBias,
    RowArray,
    Rows,
    ScoreArray,
    SplitRows,
    SplitRowVector,
)


class Sequences(NamedTuple):
    """Where sequences lie. seqlen_q, seqlen_k: rows that each sequence has in storage, or the
    packed tokens of all. cu_q, cu_k: (B + 1,). The other arrays: (B,). new_k: rows that the kernel
    appends after used_k, which then counts padding too; None where it appends none. Only decodes
    append."""

    cu_q: In[Ptr]
    cu_k: In[Ptr]
    used_q: In[Ptr]
    used_k: In[Ptr]
    leftpad_k: In[Ptr]
    seqlen_q: Num
    seqlen_k: Num
    new_k: Num


class Shape(NamedTuple):
    """longest_q, longest_k: rows that the longest sequence may have; a bias has the same
    extents."""

    batch: Num
    heads_q: Num
    heads_k: Num
    longest_q: Num
    longest_k: Num


class TreeMask(NamedTuple):
    """A mask (B, M, M) over the last M keys, or all None."""

    ptr: In[Ptr]
    stride_b: Num
    stride_m: Num


class BlockLists(NamedTuple):
    """Lists of tiles, int32 (B, H, tiles, 2 + 2 width), as Operands has them: of keys by tiles of
    queries or, in `key_gradients`, the other way round; or all None. bits: (pool, SIDE, SIDE / 32).
    tiles: of a head, where a packed sequence may be longer than the longest was said to be.
    IS_PLAIN: neither positions nor lengths hide keys of a tile that is seen whole. IS_EXACT: nor
    those of the last tile, as hopper/forward/seen_lists.py has made the lists."""

    ptr: In[Ptr]
    bits: In[Ptr]
    stride_b: Num
    stride_h: Num
    stride_m: Num
    width: Num
    pool: Num
    tiles: Num
    SIDE: Const
    IS_PLAIN: Const
    IS_EXACT: Const


class Mask(NamedTuple):
    """Query i sees key j if -left <= j - i - off <= right, or if j < first and j - i - off <=
    right. The diagonal's offset is off = shift, or shift + len_k - len_q if bottom_right is 1, or
    that of the sequence in offsets, (B,).

    ranges: int32 (B, H, M), or packed (M,), of RANGES pairs: a row sees keys from the first of a
    pair to before its second; or both None.
    """

    left: Num
    right: Num
    first: Num
    bottom_right: Num
    shift: Num
    offsets: In[Ptr]
    tree: TreeMask
    blocks: BlockLists
    ranges: In[RowArray]
    HAS_LEFT: Const
    HAS_RIGHT: Const
    RANGES: Const


class KeyHulls(NamedTuple):
    """The keys that each 64 rows see by key_ranges, as hopper/forward/key_hulls.py stores them.
    entries: of a head, None where heads share them. blocks: of a batch entry, None where sequences
    are packed."""

    key_hulls: In[Ptr]
    entries: Num
    blocks: Num


class ScoreMods(NamedTuple):
    """How scores are computed from raw products, in this order: scale, softcap, ALiBi, biases.
    sink: (H,), one more logit of each row.

    IS_ADJUSTED: scores pass through softcap, ALiBi or a bias, or the scale is not positive. The
    maximum must then be taken after them.
    """

    scale: Num
    softcap: Num
    alibi: In[Ptr]
    stride_alibib: Num
    bias: In[ScoreArray]
    relative: In[RelativeBias]
    sink: In[Ptr]
    HAS_SOFTCAP: Const
    IS_ADJUSTED: Const


class Dropout(NamedTuple):
    """threshold: Philox words below it are kept; a signed integer with the bits of the unsigned
    one. inverse_keep: factor of kept probabilities. origin_*: numbers to add to a score's indices
    before its word is drawn; None where they are four numbers in memory after the seed, or
    `origins` are there: (B, 4), of each sequence, in place of its number.

    IS_QUAD: columns of the mask are drawn in aligned groups of four; those of origins count them.
    """

    seed: In[Ptr]
    threshold: Num
    inverse_keep: Num
    origin_b: Num
    origin_h: Num
    origin_m: Num
    origin_n: Num
    origins: In[Ptr]
    IS_ON: Const
    IS_QUAD: Const


class KVLayout(NamedTuple):
    """Where a sequence's keys and values lie in a cache. table: (B, pages of a sequence), or None.
    entries: how many pages or batch entries exist. batch_idx: (B,), or None."""

    table: In[Ptr]
    stride_tableb: Num
    page_size: Num
    entries: Num
    batch_idx: In[Ptr]


class Descale(NamedTuple):
    """ptr: factors of stored numbers. shift: numbers to add to the products. The strides hold for
    both."""

    ptr: In[Ptr]
    shift: In[Ptr]
    stride_b: Num
    stride_n: Num
    stride_h: Num


class Descales(NamedTuple):
    """KV_GROUP: dims of a key that share a descale; 0 if each (batch, KV head) has one. IS_INT4:
    keys and values are stored as four bits each."""

    q: Descale
    k: Descale
    v: Descale
    KV_GROUP: Const
    IS_INT4: Const


class TileOrder(NamedTuple):
    """Which program computes which tile. tiles: row tiles of a head. l2_heads: heads whose keys fit
    in the L2 cache together. splits: of a tile's keys."""

    tiles: Num
    l2_heads: Num
    splits: Num


class Tile(NamedTuple):
    """BLOCK_M: query rows. BLOCK_N: keys. BLOCK_D, BLOCK_E: columns of q and k, and of v. BLOCK_R:
    above 0, the columns of q and k past BLOCK_D, which are a product of their own."""

    HEAD_DIM: Const
    HEAD_DIM_V: Const
    BLOCK_M: Const
    BLOCK_N: Const
    BLOCK_D: Const
    BLOCK_E: Const
    BLOCK_R: Const
    PRECISION: Const


class PortableParams(NamedTuple):
    """The groups of the portable kernels beside their arrays. A group that a kernel does not use is
    None."""

    seqs: Sequences
    shape: Shape
    mask: Mask
    mods: ScoreMods
    dropout: Dropout | None
    cache: KVLayout | None
    descales: Descales | None
    order: TileOrder | None
    tile: Tile


class ForwardIO(NamedTuple):
    """With several splits, out and lse are float32 partial results. rest: the part that the
    rounding of lse lost, in the layout of lse, of results that are merged later, see
    common/log_sum.py; else None. max_scores: of rows, likewise laid out, without the sink; else
    None."""

    q: In[Rows]
    k: In[Rows]
    v: In[Rows]
    out: Out[SplitRows]
    lse: Out[SplitRowVector]
    rest: Out[Ptr]
    max_scores: Out[Ptr]
