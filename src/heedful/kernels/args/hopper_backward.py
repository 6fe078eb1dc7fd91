"""Groups of the Hopper backward."""

from typing import NamedTuple

from heedful.kernels.args.hopper import HopperScoreMods
from heedful.kernels.args.kinds import Const, In, InOut, Num, Out, Ptr, RowArray, Rows, RowVector
from heedful.kernels.args.shared import Dropout, Mask, Sequences


class HopperBackwardIO(NamedTuple):
    """q, k, v, dout, dk and dv are tensor maps. lse_log2: what a row's logits in base 2 are less
    by, with the scale of probabilities. delta and dout_scale, of rows far from 0 alone
    (`hopper.backward.far_rows`), lie as it does. dq_accum: sums of dq, with
    the scale of probabilities and without that of scores, in tiles of BLOCK_M rows, see
    `hopper.backward.dq.sums`."""

    q: In[Ptr]
    k: In[Ptr]
    v: In[Ptr]
    dout: In[Ptr]
    lse_log2: In[RowVector]
    delta: In[Ptr]
    dout_scale: In[Ptr]
    dk: Out[Ptr]
    dv: Out[Ptr]
    dq_accum: InOut[Ptr]


class HopperBackwardSizes(NamedTuple):
    """group: query heads of a KV head. scale: of raw scores. accum_rows: rows of a query head in
    dq_accum, those of every sequence rounded up to tiles."""

    heads_k: Num
    group: Num
    scale: Num
    accum_rows: Num


class HopperBackwardOrder(NamedTuple):
    """tiles: work tiles, each a key tile of a KV head; key_blocks: of one head. l2_heads and
    l2_groups: of KV heads, as in HopperTileOrder. varlen_tiles: of packed keys, see
    varlen_scheduler.py. tile_counter: how many work tiles were fetched; None with a program for
    each. turns: of every tile of queries in dq_accum, how many key tiles have been added to it;
    None where their order is free. splits: parts in which the visits of a key tile are split, work
    tiles of their own. partials: dV and dK of each split, KV head and 64 keys, in the order of
    `hopper.backward.dq.sums`; partial_rows: keys of a head in them, those of every sequence rounded
    up to tiles. All None if not split."""

    tiles: Num
    key_blocks: Num
    l2_heads: Num
    l2_groups: Num
    varlen_tiles: In[Ptr]
    tile_counter: InOut[Ptr]
    turns: InOut[Ptr]
    splits: Num
    partials: Out[Ptr]
    partial_rows: Num


class HopperBackwardTile(NamedTuple):
    """A step is BLOCK_M queries x BLOCK_N keys, 64 of the keys for each consumer. *_STAGES: tiles
    that shared memory has room for, powers of two. D, E: columns of q and k, and of v, that
    products are made of. DQ_REGS: None where consumers make dQ."""

    BLOCK_M: Const
    BLOCK_N: Const
    D: Const
    E: Const
    Q_STAGES: Const
    DO_STAGES: Const
    DS_STAGES: Const
    K_STAGES: Const
    CONSUMER_REGS: Const
    DQ_REGS: Const
    PRODUCER_REGS: Const


class HopperBackwardParams(NamedTuple):
    """All that the roles of a Hopper backward share."""

    seqs: Sequences
    sizes: HopperBackwardSizes
    mask: Mask
    mods: HopperScoreMods
    dropout: Dropout
    order: HopperBackwardOrder
    tile: HopperBackwardTile


class BackwardPrologueIO(NamedTuple):
    """delta lies as lse does. tile_counter, turns: as in HopperBackwardOrder, to begin at 0."""

    out: In[Rows]
    dout: In[Rows]
    lse: In[RowVector]
    dlse: In[RowArray]
    delta: Out[Ptr]
    dq_accum: Out[Ptr]
    tile_counter: Out[Ptr]
    turns: Out[Ptr]


class FarRowsIO(NamedTuple):
    """What rows far from 0 are made anew from, and what is told of all rows, which lies as lse
    does: lse_log2 and dout_scale as in HopperBackwardIO; reference and factor as in
    `portable.References`, None where nobody reads them."""

    q: In[Rows]
    k: In[Rows]
    lse_log2: Out[Ptr]
    dout_scale: Out[Ptr]
    reference: Out[Ptr]
    factor: Out[Ptr]


class BackwardEpilogueIO(NamedTuple):
    """partials: as in HopperBackwardOrder; without them there are no dk and dv either."""

    dq_accum: In[Ptr]
    dq: Out[Rows]
    partials: In[Ptr]
    dk: Out[Rows]
    dv: Out[Rows]
