"""Groups of the MLA decode kernels. Their roles share `HopperDecodeParams`."""

from typing import NamedTuple

from heedful.kernels.args.kinds import Const, In, Out, Ptr, Rows, SplitRows, SplitRowVector
from heedful.kernels.args.shared import Descale


class MlaIO(NamedTuple):
    """k: the tensor map of keys, in boxes of 64 columns. q_map: that of queries, in boxes of 64
    rows and 64 columns; None where consumers load queries by themselves. rest: as in
    `ForwardIO`."""

    q: In[Rows]
    q_map: In[Ptr]
    k: In[Ptr]
    out: Out[SplitRows]
    lse: Out[SplitRowVector]
    rest: Out[Ptr]


class StoredLatentIO(NamedTuple):
    """As `MlaIO`, for keys of 8 bits. Tensor maps: k: their values, in boxes of 128 columns.
    rest_k: the columns past them, in boxes of 64. scales: those of rows of bytes, four of a key;
    else None."""

    q: In[Rows]
    q_map: In[Ptr]
    k: In[Ptr]
    rest_k: In[Ptr]
    scales: In[Ptr]
    k_descale: Descale
    v_descale: Descale
    out: Out[SplitRows]
    lse: Out[SplitRowVector]
    rest: Out[Ptr]


class MlaTile(NamedTuple):
    """HEAD_DIM: columns of queries and keys. HEAD_DIM_V: columns of values; each consumer has
    BLOCK_E of them. BLOCK_M: query rows, 64. BLOCK_N: keys of a step, 128. ROWS: a power of two, at
    least the rows of a tile.

    QUERY_BOXES: boxes of 64 columns of queries that consumers keep in registers. AHEAD: boxes of
    the next step's first scores that are queued after a step's last values. IN_ORDER: the first
    consumer queues its product with the second block's values after the second consumer's. MERGE:
    all programs that have a segment of a work tile merge some of its rows. 2, 3: the same as 0 and
    1, with partial results in the order of threads (`hopper/mla/thread_order.py`).
    """

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
    """As `MlaTile`, with one consumer. BLOCK_M: query rows, 16 or 32. BLOCK_N: keys of a step, 64.
    STAGES: blocks of 64 keys that shared memory holds."""

    HEAD_DIM: Const
    HEAD_DIM_V: Const
    BLOCK_M: Const
    BLOCK_N: Const
    BLOCK_E: Const
    ROWS: Const
    STAGES: Const
    MERGE: Const
    PRODUCER_REGS: Const


class MlaConvertingPairTile(NamedTuple):
    """As `MlaConvertingTile`, with two consumers. BLOCK_M: query rows, 64. BLOCK_N: keys of a step,
    128."""

    HEAD_DIM: Const
    HEAD_DIM_V: Const
    BLOCK_M: Const
    BLOCK_N: Const
    BLOCK_E: Const
    ROWS: Const
    STAGES: Const
    MERGE: Const
    CONSUMER_REGS: Const
    PRODUCER_REGS: Const
    REST_COLUMN: Const
    SCALE_COLUMN: Const


class MlaConvertingTile(NamedTuple):
    """As `MlaSwapTile`. REST_COLUMN, SCALE_COLUMN: where in a row the columns past the values
    begin, and its scales, in numbers of their dtype."""

    HEAD_DIM: Const
    HEAD_DIM_V: Const
    BLOCK_M: Const
    BLOCK_N: Const
    BLOCK_E: Const
    ROWS: Const
    STAGES: Const
    MERGE: Const
    PRODUCER_REGS: Const
    REST_COLUMN: Const
    SCALE_COLUMN: Const
