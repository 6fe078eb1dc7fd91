"""Groups of the Hopper backward."""

from typing import NamedTuple

from heedful.kernels.args.hopper import HopperScoreMods
from heedful.kernels.args.kinds import Const, In, InOut, Num, Out, Ptr, RowArray, Rows, RowVector
from heedful.kernels.args.shared import Dropout, KeyHulls, Mask, Sequences


class HopperBackwardIO(NamedTuple):
    """q, k, v, dout, dk and dv are tensor maps.

    lse_log2: the number to subtract from a row's logits in base 2; it includes the scale of
    probabilities. delta lies in the same layout. So does dout_scale, which only rows far from 0 use
    (`hopper.backward.far_rows`). dq_accum: sums of dq in tiles of BLOCK_M rows, with the scale of
    probabilities but without that of scores, see `hopper.backward.dq.sums`.

    k_rows, v_rows: rows of the maps of k and v from one batch entry to the next, where dense keys
    end before their storage does; else None.
    """

    q: In[Ptr]
    k: In[Ptr]
    v: In[Ptr]
    k_rows: Num
    v_rows: Num
    dout: In[Ptr]
    lse_log2: In[RowVector]
    delta: In[Ptr]
    dout_scale: In[Ptr]
    dk: Out[Ptr]
    dv: Out[Ptr]
    dq_accum: InOut[Ptr]


class HopperBackwardSizes(NamedTuple):
    """group: query heads of a KV head. scale: of raw scores. accum_rows: rows of a query head in
    dq_accum, where each sequence is rounded up to whole tiles. sequences, entry_rows: packed
    sequences, and rows of a batch entry, if sequences are pieces of entries, see
    hopper/forward/cut_rows.py; else None."""

    heads_k: Num
    group: Num
    scale: Num
    accum_rows: Num
    sequences: Num
    entry_rows: Num


class BackwardHulls(NamedTuple):
    """of_keys: which keys rows see. query_hulls: which query tiles see a key tile, see
    hopper/backward/query_hulls.py. entries: of a KV head, None where heads share them. HIDES_ROWS:
    see `HopperBackwardConfig`."""

    of_keys: KeyHulls
    query_hulls: In[Ptr]
    entries: Num
    HIDES_ROWS: Const


class QueryHullIO(NamedTuple):
    """query_hulls: int32 (entries, 4 or 5). heads: KV heads that have entries of their own, and how
    many query heads each of them has. blocks: key tiles of the longest sequence. entries: of a
    head. sequences: packed ones, if there is a program for each entry; else None."""

    of_keys: KeyHulls
    query_hulls: Out[Ptr]
    heads: Num
    group: Num
    blocks: Num
    entries: Num
    sequences: Num


class BackwardLists(NamedTuple):
    """visits: int32, which query tiles visit a key tile, see hopper/backward/list_visits.py; its
    strides are those of batch entries, KV heads and key tiles. blocks: key tiles of a head.
    list_heads: query heads that a list is of. shared: query heads of a KV head that have the same
    list. All are None without a block mask."""

    visits: In[Ptr]
    stride_b: Num
    stride_h: Num
    stride_n: Num
    blocks: Num
    list_heads: Num
    shared: Num


class ListVisitsIO(NamedTuple):
    """heads: KV heads that have lists of their own. Others: as in BackwardLists."""

    visits: Out[Ptr]
    stride_b: Num
    stride_h: Num
    stride_n: Num
    blocks: Num
    list_heads: Num
    heads: Num


class BackwardParts(NamedTuple):
    """splits: parts that the visits of a key tile are split into; each part is a work tile.
    partials: dV and dK of each split, KV head and 64 keys, in the order of
    `hopper.backward.dq.sums`. rows: keys of a head in them, where each sequence is rounded up to
    whole tiles. All three are None if nothing is split. whole: how many work tiles come before the
    first that is split, where only the last ones are; partials then have these alone, as one head.
    Else None."""

    splits: Num
    partials: Out[Ptr]
    rows: Num
    whole: Num


class HopperBackwardOrder(NamedTuple):
    """Which work tiles there are, and in which order. A work tile is a key tile of a KV head.

    tiles: of all heads. key_blocks: of one head. l2_heads, l2_groups: as in HopperTileOrder, of KV
    heads. varlen_tiles: the work tiles of packed keys, see varlen_scheduler.py. tile_counter: how
    many work tiles were fetched; None with one program for each tile. turns: for every query tile
    in dq_accum, how many key tiles have been added to it; None where their order is free.

    parts: of work tiles that are split. hulls: of rows with key_ranges; else its fields are None.
    lists: of a block mask.
    """

    tiles: Num
    key_blocks: Num
    l2_heads: Num
    l2_groups: Num
    varlen_tiles: In[Ptr]
    tile_counter: InOut[Ptr]
    turns: InOut[Ptr]
    parts: BackwardParts
    hulls: BackwardHulls
    lists: BackwardLists


class HopperBackwardTile(NamedTuple):
    """A step is BLOCK_M queries x BLOCK_N keys; each consumer has 64 of the keys, or both have the
    same 64. *_STAGES: tiles that shared memory holds, powers of two. D, E: columns of q and k, and
    of v, in products. DQ_REGS: registers of the dQ warpgroup; None where consumers compute dQ."""

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


class HopperBackwardWays(NamedTuple):
    """In which order query tiles are visited, and where dK leaves: see `HopperBackwardConfig`."""

    HEADS_INNERMOST: Const
    DK_IN_KEYS: Const
    ROTATES: Const


class HopperBackwardParams(NamedTuple):
    """All groups that the roles of a Hopper backward share."""

    seqs: Sequences
    sizes: HopperBackwardSizes
    mask: Mask
    mods: HopperScoreMods
    dropout: Dropout
    order: HopperBackwardOrder
    tile: HopperBackwardTile
    ways: HopperBackwardWays


class BackwardPrologueIO(NamedTuple):
    """delta has the layout of lse. tile_counter, turns: as in HopperBackwardOrder; the prologue
    sets them to 0."""

    out: In[Rows]
    dout: In[Rows]
    lse: In[RowVector]
    dlse: In[RowArray]
    delta: Out[Ptr]
    dq_accum: Out[Ptr]
    tile_counter: Out[Ptr]
    turns: Out[Ptr]


class FarRowsIO(NamedTuple):
    """Inputs from which rows far from 0 are recomputed, and results for all rows, in the layout of
    lse.

    lse_log2, dout_scale: as in HopperBackwardIO. reference, factor: as in `portable.References`;
    None where nothing reads them.
    """

    q: In[Rows]
    k: In[Rows]
    lse_log2: Out[Ptr]
    dout_scale: Out[Ptr]
    reference: Out[Ptr]
    factor: Out[Ptr]


class BackwardEpilogueIO(NamedTuple):
    """partials: as in HopperBackwardOrder. Without partials there are no dk and dv either."""

    dq_accum: In[Ptr]
    dq: Out[Rows]
    partials: In[Ptr]
    dk: Out[Rows]
    dv: Out[Rows]


class BackwardTail(NamedTuple):
    """The work tiles that are split where only the last ones are, as in HopperBackwardOrder; else
    all are None. programs: those of the epilogue that store dq. heads: KV heads of all
    sequences."""

    whole: Num
    key_blocks: Num
    l2_heads: Num
    l2_groups: Num
    heads: Num
    programs: Num


class BackwardEpilogueTile(NamedTuple):
    """BLOCK_M, BLOCK_N: tiles that sequences are rounded up to in the sums. D, E: columns of the
    results. BLOCK_D, BLOCK_E: columns of the sums."""

    BLOCK_M: Const
    BLOCK_N: Const
    D: Const
    BLOCK_D: Const
    E: Const
    BLOCK_E: Const
