"""Groups of the MLA decode kernels; what their roles share is as of the Hopper decode."""

from typing import NamedTuple

from heedful.kernels.args.kinds import Const, In, Out, Ptr, Rows, SplitRows, SplitRowVector


class MlaIO(NamedTuple):
    """k: a tensor map of keys, in boxes of 64 columns. rest: as `ForwardIO` has it."""

    q: In[Rows]
    k: In[Ptr]
    out: Out[SplitRows]
    lse: Out[SplitRowVector]
    rest: Out[Ptr]


class MlaTile(NamedTuple):
    """HEAD_DIM: of queries and keys. HEAD_DIM_V: of values, of which each consumer has
    BLOCK_E. BLOCK_M: query rows, 64. BLOCK_N: keys of a step, 128. ROWS: a power of two that a
    tile's rows are within. QUERY_BOXES: of 64 columns, that consumers keep in registers. AHEAD:
    boxes of the next step's first scores that are queued behind a step's last values. IN_ORDER: the
    first consumer's product with the second block's values is queued behind the second's. MERGE:
    all programs that have a part of a sequence merge some of its rows."""

    HEAD_DIM: Const
    HEAD_DIM_V: Const
    BLOCK_M: Const
    BLOCK_N: Const
    BLOCK_E: Const
    ROWS: Const
    QUERY_BOXES: Const
    AHEAD: Const
    IN_ORDER: Const
    MERGE: Const
    CONSUMER_REGS: Const
    PRODUCER_REGS: Const


class MlaSwapTile(NamedTuple):
    """As of `MlaTile`, of one consumer. BLOCK_M: query rows, 16 or 32. BLOCK_N: keys of a step, 64.
    STAGES: blocks of 64 keys."""

    HEAD_DIM: Const
    HEAD_DIM_V: Const
    BLOCK_M: Const
    BLOCK_N: Const
    BLOCK_E: Const
    ROWS: Const
    STAGES: Const
    MERGE: Const
    PRODUCER_REGS: Const
