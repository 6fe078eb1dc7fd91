"""Groups of the portable kernels beside the forward: gradients, probabilities, splits, caches."""

from typing import NamedTuple

from heedful.kernels.args.kinds import (
    Const,
    In,
    InOut,
    Num,
    Out,
    Ptr,
    RowArray,
    Rows,
    RowVector,
    ScoreArray,
    SplitRows,
    SplitRowVector,
)
from heedful.kernels.args.shared import Descale


class SeenKeys(NamedTuple):
    """The keys that tiles of query rows see, of calls with key_ranges; else all None. ptr: int32
    (entries, 8), see portable/backward/seen.py. heads: entries of a query head; tiles: of a batch
    entry, None where sequences are packed. ROWS: query rows of an entry."""

    ptr: Ptr
    heads: Num
    tiles: Num
    ROWS: Const


class RowReferences(NamedTuple):
    """Numbers of rows, in the layout of lse. reference: what to subtract from a row's scores, in
    their units. factor: exponentials times it are probabilities. near: the reference of a row whose
    factor is 1, NaN for rows far from 0."""

    near: Ptr
    reference: Ptr
    factor: Ptr


class QueryGradientsIO(NamedTuple):
    """delta has the layout of lse."""

    q: In[Rows]
    k: In[Rows]
    v: In[Rows]
    out: In[Rows]
    dout: In[Rows]
    lse: In[RowVector]
    dlse: In[RowArray]
    delta: Out[Ptr]
    rows: Out[RowReferences]
    seen: Out[SeenKeys]
    dq: Out[Rows]


class KeyGradientsIO(NamedTuple):
    """delta and rows are those of `QueryGradientsIO`."""

    q: In[Rows]
    k: In[Rows]
    v: In[Rows]
    dout: In[Rows]
    lse: In[RowVector]
    delta: In[Ptr]
    rows: In[RowReferences]
    seen: In[SeenKeys]
    dk: Out[Rows]
    dv: Out[Rows]


class BiasGradientsIO(NamedTuple):
    """delta, reference and factor have the layout of lse."""

    q: In[Rows]
    k: In[Rows]
    v: In[Rows]
    dout: In[Rows]
    lse: In[RowVector]
    delta: In[Ptr]
    reference: In[Ptr]
    factor: In[Ptr]
    dbias: Out[ScoreArray]


class DiagonalSumsIO(NamedTuple):
    """delta, reference and factor have the layout of lse. sums: (parts, H, columns), see
    backward/relative.py."""

    q: In[Rows]
    k: In[Rows]
    v: In[Rows]
    dout: In[Rows]
    lse: In[RowVector]
    delta: In[Ptr]
    reference: In[Ptr]
    factor: In[Ptr]
    sums: Out[Ptr]


class RelativeGradientsIO(NamedTuple):
    """sums: as `DiagonalSumsIO` has them. drel_bias: (H, distances), dense."""

    sums: In[Ptr]
    drel_bias: Out[Ptr]


class SinkGradientsIO(NamedTuple):
    """delta, reference and factor have the layout of lse. The last two are absent where no kernel
    computes them. sink, dsink: (H,)."""

    sink: In[Ptr]
    lse: In[RowVector]
    delta: In[Ptr]
    reference: In[Ptr]
    factor: In[Ptr]
    dsink: Out[Ptr]


class ProbabilitiesIO(NamedTuple):
    """Elements of probs that no sequence covers keep their values."""

    q: In[Rows]
    k: In[Rows]
    lse: In[RowVector]
    probs: InOut[ScoreArray]


class CombineIO(NamedTuple):
    """The parts to merge. apart_out, apart_lse: one more part, in memory of its own; may be absent.
    partial_rest, apart_rest, rest: the parts that the rounding of each lse lost, in the layout of
    that lse, see common/log_sum.py; None where one number is enough."""

    partial_out: In[SplitRows]
    partial_lse: In[SplitRowVector]
    partial_rest: In[Ptr]
    apart_out: In[Rows]
    apart_lse: In[RowVector]
    apart_rest: In[Ptr]
    sink: In[Ptr]
    out: Out[Rows]
    lse: Out[RowVector]
    rest: Out[Ptr]


class MergeIntoIO(NamedTuple):
    """out, lse: float32 results, into which a part with as many rows is merged."""

    out: InOut[Rows]
    lse: InOut[RowVector]
    part: In[Rows]
    part_lse: In[RowVector]


class MergePartsIO(NamedTuple):
    """Parts of the keys, float32, with a leading part, as `ForwardIO` has them. out, lse, rest: as
    there, of all parts; rest may be None."""

    partial_out: In[SplitRows]
    partial_lse: In[SplitRowVector]
    partial_rest: In[Ptr]
    out: Out[SplitRows]
    lse: Out[SplitRowVector]
    rest: Out[Ptr]


class ClearOutsideIO(NamedTuple):
    """Tokens of sequences keep their values."""

    cu_seqlens: In[Ptr]
    out: InOut[SplitRows]
    lse: InOut[SplitRowVector]


class ClearUnusedIO(NamedTuple):
    """Rows that a sequence uses keep their values."""

    cu_seqlens: In[Ptr]
    seqused: In[Ptr]
    leftpad: In[Ptr]
    x: InOut[Rows]
    y: InOut[Rows]


class AppendIO(NamedTuple):
    """cache_seqlens, leftpad_k, seqused: (B,). k_descale, v_descale: (B, G), by which new values
    are quantised. All other rows of the cache keep their values."""

    k_new: In[Rows]
    v_new: In[Rows]
    k_descale: Descale
    v_descale: Descale
    cache_seqlens: In[Ptr]
    leftpad_k: In[Ptr]
    k: InOut[Rows]
    v: InOut[Rows]
    seqused: Out[Ptr]


class Slots(NamedTuple):
    """Where new tokens go in a cache of pages. ptr: (S,), page_size * page + row of the page."""

    ptr: In[Ptr]
    page_size: Num


class GroupScale(NamedTuple):
    """A scale of each group of dims, (.., rows, G, groups), as Descale has it, to be written."""

    ptr: InOut[Ptr]
    shift: InOut[Ptr]
    stride_b: Num
    stride_n: Num
    stride_h: Num


class Quantization(NamedTuple):
    """How new values are stored. STORAGE: the dtype, as core/call/quant.py names it; LIMIT: its
    largest magnitude. GROUP: dims that share a scale, which the kernel computes and writes to
    k_groups and v_groups; 0 where scales of heads are inputs."""

    k_groups: GroupScale
    v_groups: GroupScale
    GROUP: Const
    STORAGE: Const
    LIMIT: Const


class RotateIO(NamedTuple):
    """cache_seqlens: (B,)."""

    q: In[Rows]
    cache_seqlens: In[Ptr]
    rotated: Out[Rows]


class RowTiles(NamedTuple):
    """The rows of an array (B, seqlen, heads, dim), cut into `tiles` of each head. A program has
    one tile."""

    seqlen: Num
    heads: Num
    tiles: Num


class Rotary(NamedTuple):
    """cos, sin: tables of (positions, half). position0: number to add to a row's place in the
    cache."""

    cos: In[Ptr]
    sin: In[Ptr]
    stride_n: Num
    half: Num
    positions: Num
    position0: Num
    IS_INTERLEAVED: Const


class CacheTile(NamedTuple):
    """HEAD_DIM, HEAD_DIM_V: of keys and values. BLOCK_M, BLOCK_N: rows of queries and of new keys
    that are written at once. BLOCK_D, BLOCK_E: powers of two, at least the head dims."""

    HEAD_DIM: Const
    HEAD_DIM_V: Const
    BLOCK_M: Const
    BLOCK_N: Const
    BLOCK_D: Const
    BLOCK_E: Const


class CacheAppend(NamedTuple):
    """New rows that a kernel writes into the cache. If there are rotary tables, keys and queries
    are rotated.

    A decode writes them before its attention, see split_kv/append.py. The count for each sequence
    is in `Sequences` then, and so io has no seqused and leftpad_k. advance: 1 if each query has its
    own position, 0 if all have that of the first new row. Written operands come last, because a
    launch from JAX needs them there.
    """

    rotary: Rotary
    io: AppendIO
    quantization: Quantization
    advance: Num
    tile: CacheTile


class BiasShape(NamedTuple):
    """The shape of a bias. Each size is 1, which broadcasts, or that of the scores."""

    b: Num
    h: Num
    m: Num
    n: Num
