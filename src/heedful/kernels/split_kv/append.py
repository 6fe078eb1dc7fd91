"""Appends new keys and values to the cache: each program writes the new rows that it is about to
read.

A program appends those new rows of a sequence that are among the keys of its segment, and then
reads them with the others. So no program waits for another. The row tiles of a head write the rows
that they read, which gives the same values several times. Rows that no query of a window sees are
written too, by the segment that jumps over them. A length below the padding would put new rows
before the sequence's first row: these rows belong to no sequence and are not written.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class NewRows(NamedTuple):
    """New rows [first, stop) of a sequence that this segment writes. They lie within rows [low,
    high) of storage. New row 0 goes to row `start` of storage; start is negative for an entry
    without a sequence."""

    first: Any
    stop: Any
    start: Any
    low: Any
    high: Any


@triton.jit
def rows_of(segment, BLOCK_N: tl.constexpr):
    """Rows [low, high) of a sequence that belong to a segment: its keys, and rows that the segment
    jumps over and that no segment visits. Each row of storage belongs to one segment of a work
    tile."""
    span = segment.span
    low = segment.start
    last = segment.stop - 1
    # Visits jump from the leading keys to the window. The rows between belong to the segment that
    # begins before the jump and goes on after it, or that begins at the jump.
    low = tl.where(low <= span.first_end, low, low - span.first_end + span.begin)
    last = tl.where(last < span.first_end, last, last - span.first_end + span.begin)
    high = (last + 1) * BLOCK_N
    high = tl.where(segment.stop >= span.visits, segment.seq.stored_k, high)
    return low * BLOCK_N, high


@triton.jit
def new_rows(segment, cache_seqlen, params):
    """The new rows that belong to a segment. cache_seqlen: address of the sequence's length before
    them."""
    low, high = rows_of(segment, params.tile.BLOCK_N)
    low += segment.seq.token_k
    high = tl.minimum(high + segment.seq.token_k, params.seqs.seqlen_k)
    start = tl.load(cache_seqlen)
    first = tl.maximum(low - start, 0)
    stop = tl.minimum(high - start, params.seqs.new_k)
    return NewRows(first, stop, start, low, high)
