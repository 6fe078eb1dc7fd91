"""Groups of the portable decode kernel; the Hopper and MLA decodes share `DecodeWork`."""

from typing import NamedTuple

from heedful.kernels.args.kinds import Const, InOut, Num, Out, Ptr
from heedful.kernels.args.portable import CacheAppend
from heedful.kernels.args.shared import Descales, KVLayout, Mask, ScoreMods, Sequences, Shape


class DecodeMerge(NamedTuple):
    """Where the segments of a work tile leave partial results, and how these are merged.

    A segment that is not a whole work tile stores float32 results in `partial_out` (slots, rows,
    dim), and each row's maximum and sum in `partial_sums` (slots, rows, 2). Then it adds one to the
    work tile's entry in `counts`. There is one count for each row tile of each KV head, and it is 0
    before and after a launch.

    PARTS: segments that are merged at once. STAGES: how many such loads are in flight.
    AWAITS_STORES: each thread waits for its own stores before a barrier, because the barrier does
    not (CDNA).
    """

    partial_out: Out[Ptr]
    partial_sums: Out[Ptr]
    counts: InOut[Ptr]
    PARTS: Const
    STAGES: Const
    AWAITS_STORES: Const


class DecodeWork(NamedTuple):
    """How work is divided among programs, see split_kv/work.py.

    splits: segments of a work tile; None where programs share all keys evenly. tiles: row tiles of
    a KV head. least: the least length of a share, in key tiles. short_q: packed sequences of more
    queries belong to another kernel; None if there is no other.

    IS_UNIFORM: all sequences are as long as their storage. SKIPS_EMPTY: sequences without keys have
    no work tiles, and the kernel clears their results separately; never set with packed queries.
    OVERHEAD: the fixed cost of a segment, in key tiles. FEWEST_SHARES: shares that a line is cut
    into at least, if it has as many key tiles; they may be shorter than `least`. LOOKS: sequences
    that a program examines at once.
    """

    merge: DecodeMerge
    splits: Num
    tiles: Num
    least: Num
    short_q: Num
    IS_UNIFORM: Const
    SKIPS_EMPTY: Const
    OVERHEAD: Const
    FEWEST_SHARES: Const
    LOOKS: Const


class DecodeTile(NamedTuple):
    """The shape of a tile. HEAD_DIM, HEAD_DIM_V: of the problem. BLOCK_M: query rows. BLOCK_N:
    keys.

    VALUES: stored values in a 16-bit word of the cache: 1, 2 (8 bits each) or 4. A row of keys has
    SLICES_D slices of BLOCK_D words, a row of values SLICES_E of BLOCK_E; each slice is a product
    of its own, because it may have a scale of its own. ROWS: a power of two, at least the query
    rows of a sequence's tile. CONVERSION: how stored values become numbers
    (portable/decode/cache.py). V_IN_K: values are the first HEAD_DIM_V columns of the keys, BLOCK_D
    words, and are not loaded separately.
    """

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


class DecodeParams(NamedTuple):
    """The groups of the portable decode beside its arrays. FETCH_AHEAD: how many key tiles ahead
    rows are prefetched to the L2 cache; 0 for no prefetch."""

    seqs: Sequences
    shape: Shape
    mask: Mask
    mods: ScoreMods
    cache: KVLayout
    descales: Descales
    work: DecodeWork
    append: CacheAppend
    tile: DecodeTile
    FETCH_AHEAD: Const
