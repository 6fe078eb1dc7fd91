"""Groups of the Hopper decode kernel; the MLA decodes share `HopperDecodeParams`."""

from typing import NamedTuple

from heedful.kernels.args.decode import DecodeWork
from heedful.kernels.args.hopper import KVRows
from heedful.kernels.args.kinds import Const, In, Num, Out, Ptr, Rows, SplitRows, SplitRowVector
from heedful.kernels.args.mla import (
    MlaConvertingPairTile,
    MlaConvertingTile,
    MlaSwapTile,
    MlaTile,
)
from heedful.kernels.args.portable import AppendIO, Rotary
from heedful.kernels.args.shared import KVLayout, Mask, Sequences, Shape


class HopperDecodeIO(NamedTuple):
    """k and v are tensor maps. rest: as in `ForwardIO`."""

    q: In[Rows]
    k: In[Ptr]
    v: In[Ptr]
    out: Out[SplitRows]
    lse: Out[SplitRowVector]
    rest: Out[Ptr]


class HopperDecodeTile(NamedTuple):
    """HEAD_DIM, HEAD_DIM_V: of the problem. BLOCK_D, BLOCK_E: columns of tiles. BLOCK_M: query
    rows, 64; of wide heads 16 or 32. BLOCK_N: keys of a tile. STAGES: tiles of keys, and as many of
    values, that shared memory holds; of wide heads, tiles of both. ROWS: a power of two, at least
    the rows of a tile. FEW_ROWS: the same for a sequence of the fewest queries. MERGE: all programs
    that have a segment of a work tile merge some of its rows."""

    HEAD_DIM: Const
    HEAD_DIM_V: Const
    BLOCK_M: Const
    BLOCK_N: Const
    BLOCK_D: Const
    BLOCK_E: Const
    STAGES: Const
    ROWS: Const
    FEW_ROWS: Const
    MERGE: Const
    PRODUCER_REGS: Const


class HopperDecodeParams(NamedTuple):
    """All groups that the roles of a Hopper or MLA decode share. Raw scores times scale_log2 are
    logits in base 2. sink: (H,), one more logit of each row; no MLA call has one yet."""

    seqs: Sequences
    shape: Shape
    mask: Mask
    kv: KVLayout
    kv_rows: KVRows
    work: DecodeWork
    tile: HopperDecodeTile | MlaTile | MlaSwapTile | MlaConvertingTile | MlaConvertingPairTile
    sink: In[Ptr]
    scale_log2: Num


class HopperDecodeAppend(NamedTuple):
    """New rows that a decode writes into the cache before its attention, see
    hopper/decode/append.py. The count for each sequence is in `Sequences`. If there are rotary
    tables, keys and queries are rotated.

    io: leftpad_k is None in it, since `Sequences` has it, and so are the scales. advance: 1 if each
    query has its own position, 0 if all have that of the first new row. Written operands come last,
    because a launch from JAX needs them there.
    """

    rotary: Rotary
    io: AppendIO
    advance: Num
