"""Groups of the portable kernels around the forward: gradients, probabilities, splits, caches."""

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


class QueryGradientsIO(NamedTuple):
    """delta, reference and factor lie as lse does. reference: what is subtracted from a row's
    scores, in their units; factor: what comes of their exponents is multiplied by."""

    q: In[Rows]
    k: In[Rows]
    v: In[Rows]
    out: In[Rows]
    dout: In[Rows]
    lse: In[RowVector]
    dlse: In[RowArray]
    delta: Out[Ptr]
    reference: Out[Ptr]
    factor: Out[Ptr]
    dq: Out[Rows]


class KeyGradientsIO(NamedTuple):
    """delta, reference and factor lie as lse does."""

    q: In[Rows]
    k: In[Rows]
    v: In[Rows]
    dout: In[Rows]
    lse: In[RowVector]
    delta: In[Ptr]
    reference: In[Ptr]
    factor: In[Ptr]
    dk: Out[Rows]
    dv: Out[Rows]


class BiasGradientsIO(NamedTuple):
    """delta, reference and factor lie as lse does; the last two are absent where no kernel makes
    them."""

    q: In[Rows]
    k: In[Rows]
    v: In[Rows]
    dout: In[Rows]
    lse: In[RowVector]
    delta: In[Ptr]
    reference: In[Ptr]
    factor: In[Ptr]
    dbias: Out[ScoreArray]


class SinkGradientsIO(NamedTuple):
    """delta, reference and factor as of BiasGradientsIO; sink and dsink: (H,)."""

    sink: In[Ptr]
    lse: In[RowVector]
    delta: In[Ptr]
    reference: In[Ptr]
    factor: In[Ptr]
    dsink: Out[Ptr]


class ProbabilitiesIO(NamedTuple):
    """What no sequence uses of probs is left as it is."""

    q: In[Rows]
    k: In[Rows]
    lse: In[RowVector]
    probs: InOut[ScoreArray]


class CombineIO(NamedTuple):
    """apart_out, apart_lse: one more part, which does not lie where the others do, or absent.
    partial_rest, apart_rest, rest: what the rounding of each lse left, see common/log_sum.py, laid
    out as it is; None where one number tells it."""

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
    """cache_seqlens, leftpad_k, seqused: (B,). k_descale, v_descale: of heads, (B, G), by which new
    values are quantised. All other rows of the cache are left as they are."""

    k_new: In[Rows]
    v_new: In[Rows]
    k_descale: Descale
    v_descale: Descale
    cache_seqlens: In[Ptr]
    leftpad_k: In[Ptr]
    k: InOut[Rows]
    v: InOut[Rows]
    seqused: Out[Ptr]


class GroupScale(NamedTuple):
    """As Descale beside the keys, (.., rows, G, groups), written."""

    ptr: InOut[Ptr]
    shift: InOut[Ptr]
    stride_b: Num
    stride_n: Num
    stride_h: Num


class Quantization(NamedTuple):
    """How new values are stored: as `STORAGE` (core/call/quant.py), of which LIMIT is the largest
    magnitude, over scales of heads, which are given, or of groups of GROUP values, which are
    written: k_groups, v_groups."""

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
    """The rows of an array (B, seqlen, heads, dim), cut in `tiles` of each head: a program has one
    tile."""

    seqlen: Num
    heads: Num
    tiles: Num


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
