"""New rows of a decode: whoever reads them writes them first.

A program appends those new rows of a sequence that are among the keys of its segment, before it
reads them with the others. So none waits for another program. Row tiles of a head each write what
they read: the same values. Rows that no query of a window sees are written, too, by the segment
that jumps over them. Rows ahead of a sequence's first, of a length below its padding, are not: they
are nobody's.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class NewRows(NamedTuple):
    """New rows [first, stop) of a sequence, which lie within rows [low, high) of storage; the first
    of all stands at row `start`, which is negative for no sequence."""

    first: Any
    stop: Any
    start: Any
    low: Any
    high: Any


@triton.jit
def rows_of(segment, BLOCK_N: tl.constexpr):
    """Rows [low, high) of a sequence that are a segment's: its keys, and those that no segment
    visits and that it jumps over. Each row of storage is some segment's of a work tile."""
    span = segment.span
    low = segment.start
    last = segment.stop - 1
    # Visits jump from the first keys to the window. What is between is of the segment that begins
    # ahead of the jump and goes on behind it, or begins at it.
    low = tl.where(low <= span.first_end, low, low - span.first_end + span.begin)
    last = tl.where(last < span.first_end, last, last - span.first_end + span.begin)
    high = (last + 1) * BLOCK_N
    high = tl.where(segment.stop >= span.visits, segment.seq.stored_k, high)
    return low * BLOCK_N, high


@triton.jit
def new_rows(segment, cache_seqlen, params):
    """The new rows that are a segment's. cache_seqlen: address of its sequence's length before."""
    low, high = rows_of(segment, params.tile.BLOCK_N)
    low += segment.seq.token_k
    high = tl.minimum(high + segment.seq.token_k, params.seqs.seqlen_k)
    start = tl.load(cache_seqlen)
    first = tl.maximum(low - start, 0)
    stop = tl.minimum(high - start, params.seqs.new_k)
    return NewRows(first, stop, start, low, high)
