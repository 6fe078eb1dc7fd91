"""Groups of the decode kernel."""

from typing import NamedTuple

from heedful.kernels.args.kinds import Const, InOut, Num, Out, Ptr
from heedful.kernels.args.portable import AppendIO, Quantization, Rotary


class DecodeMerge(NamedTuple):
    """Where segments of a work tile leave their results, and how they are merged. One that is not
    the whole leaves float32 results in `partial_out` (slots, rows, dim) and in `partial_sums`
    (slots, rows, 2), the maximum of a row and its sum, and counts itself in `counts`, one for each
    tile of rows of each KV head, which are 0 before a launch and after it.

    PARTS: segments that are merged at once; STAGES: how often so many are on their way.
    AWAITS_STORES: each thread waits for its own stores ahead of a barrier that does not (CDNA).
    """

    partial_out: Out[Ptr]
    partial_sums: Out[Ptr]
    counts: InOut[Ptr]
    PARTS: Const
    STAGES: Const
    AWAITS_STORES: Const


class DecodeWork(NamedTuple):
    """How work is dealt out, see split_kv/work.py. splits: segments of a work tile, or None
    where programs share all keys evenly; tiles: of rows of a KV head; least: key tiles of a
    share. short_q: packed sequences of more queries are another kernel's; None: there is no other.

    IS_UNIFORM: all sequences are as long as their storage. SKIPS_EMPTY: sequences without keys are
    no work tiles, and are cleared apart; of packed queries such have none. OVERHEAD: what a segment
    costs beside its keys, in key tiles. FEWEST_PARTS: shares that a line is cut in, if it has as
    many key tiles; shares are shorter than `least` then. LOOKS: sequences that a program looks at
    at once.
    """

    merge: DecodeMerge
    splits: Num
    tiles: Num
    least: Num
    short_q: Num
    IS_UNIFORM: Const
    SKIPS_EMPTY: Const
    OVERHEAD: Const
    FEWEST_PARTS: Const
    LOOKS: Const


class DecodeTile(NamedTuple):
    """VALUES: stored values of a 16-bit word of the cache: 1, 2 (8 bits each) or 4. A row of keys
    or values is SLICES of BLOCK words, each a product of its own: several where each has its own
    scale. ROWS: a power of two that a tile's rows are within. CONVERSION: how stored values
    become numbers (portable/decode/cache.py). V_IN_K: values are the first HEAD_DIM_V of each row
    of keys, BLOCK_D words, and are loaded as such alone."""

    HEAD_DIM: Const
    HEAD_DIM_V: Const
    BLOCK_M: Const
    BLOCK_N: Const
    BLOCK_D: Const
    BLOCK_E: Const
    SLICES_D: Const
    SLICES_E: Const
    VALUES: Const
    ROWS: Const
    CONVERSION: Const
    V_IN_K: Const


class DecodeAppend(NamedTuple):
    """New rows that go into the cache ahead of attention, see split_kv/append.py, as many of
    each sequence as `Sequences` says; keys and queries are rotated if there are rotary tables.

    What is written stands last: there alone a launch of JAX can have it as an operand, too. io:
    without seqused and leftpad_k, which `Sequences` has. advance: 1 where queries have a position
    each, 0 where all have that of the first new row. ROWS: that are written at once, of BLOCK_D and
    BLOCK_E columns.
    """

    rotary: Rotary
    io: AppendIO
    quantization: Quantization
    advance: Num
    ROWS: Const
    BLOCK_D: Const
    BLOCK_E: Const
