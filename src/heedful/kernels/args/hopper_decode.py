"""Groups of the Hopper decode kernel."""

from typing import NamedTuple

from heedful.kernels.args.decode import DecodeWork
from heedful.kernels.args.hopper import KVRows
from heedful.kernels.args.kinds import Const, In, Num, Out, Ptr, Rows, SplitRows, SplitRowVector
from heedful.kernels.args.mla import MlaSwapTile, MlaTile
from heedful.kernels.args.portable import AppendIO, Rotary
from heedful.kernels.args.shared import KVLayout, Mask, Sequences, Shape


class HopperDecodeIO(NamedTuple):
    """k, v: tensor maps. rest: as `ForwardIO` has it."""

    q: In[Rows]
    k: In[Ptr]
    v: In[Ptr]
    out: Out[SplitRows]
    lse: Out[SplitRowVector]
    rest: Out[Ptr]


class HopperDecodeTile(NamedTuple):
    """HEAD_DIM, HEAD_DIM_V: of the problem; BLOCK_D, BLOCK_E: columns of tiles. BLOCK_M: query
    rows, 64. BLOCK_N: keys of a tile. STAGES: tiles of keys, and of values, that shared memory has
    room for. ROWS: a power of two that a tile's rows are within; FEW_ROWS: that those of a sequence
    of the fewest queries are. MERGE: all programs that have a part of a sequence merge some of its
    rows."""

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
    """What the roles of a program share, of the MLA decodes, too. Raw scores times scale_log2 are
    logits in base 2. sink: (H,), one more logit of each row; no call of MLA has one yet."""

    seqs: Sequences
    shape: Shape
    mask: Mask
    kv: KVLayout
    kv_rows: KVRows
    work: DecodeWork
    tile: HopperDecodeTile | MlaTile | MlaSwapTile
    sink: In[Ptr]
    scale_log2: Num


class HopperDecodeAppend(NamedTuple):
    """New rows that go into the cache ahead of attention, see hopper/decode/append.py, as many of
    each sequence as `Sequences` says; keys and queries are rotated if there are rotary tables.

    What is written stands last: there alone a launch of JAX can have it as an operand, too. io:
    without leftpad_k, which `Sequences` has, and scales. advance: 1 where queries have a position
    each, 0 where all have that of the first new row.
    """

    rotary: Rotary
    io: AppendIO
    advance: Num
