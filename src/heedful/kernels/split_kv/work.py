"""How the keys of a decode are dealt out: every program finds its own share, from lengths that only
the device knows.

A work tile is one tile of query rows of one KV head of one sequence, over all key tiles that its
sequence's queries see: its visits. Work tiles of a head and row tile stand in a line, by sequence;
those of packed queries, of which sequences have more or fewer, in one line of the head. Each is as
long as its visits, and OVERHEAD for what it costs beside. The line is cut into shares, and every
line has a program for each. A work tile that several shares have a segment of is merged by who
finishes its last segment. Packed sequences that another kernel has are of length 0, and so are
those without keys, which padded batches are full of: they are cleared apart.

Neighbours among programs have the same share of all heads: what they read at a time lies side by
side. Rows of one head alone, 64 bytes of every 512, would be read at half the speed. And so do row
tiles of a head: the second finds in the cache what the first reads.

Without `splits` the line is cut evenly, wherever that is: no program is idle, and a work tile has
as few segments as there can be. With `splits` a work tile is cut in so many segments by its own
visits alone, so that its result does not depend on what else is in the batch; a program has the
segments that begin in its share.

Shapes: B sequences.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from heedful.kernels.args.decode import DecodeTile, DecodeWork
from heedful.kernels.args.shared import Mask, Sequences, Shape
from heedful.kernels.common.key_range import key_bounds
from heedful.kernels.common.sequences import seqlens_of


class SplitKVParams(NamedTuple):
    """What functions of this folder take as `params`: a kernel's own groups, or others that have
    these among them. Of the tile they need BLOCK_M, BLOCK_N and HEAD_DIM_V."""

    seqs: Sequences
    shape: Shape
    mask: Mask
    work: DecodeWork
    tile: DecodeTile


class Span(NamedTuple):
    """The key tiles that some rows visit: [0, first_end), then [begin, ..), `visits` in all."""

    first_end: Any
    begin: Any
    visits: Any


class Partials(NamedTuple):
    """Where the results of a work tile's segments lie. tile: number of the work tile; count: of its
    segments; slot: of this one's; first: of segment 0's; rest + step * i: of segment i > 0's."""

    tile: Any
    count: Any
    slot: Any
    first: Any
    rest: Any
    step: Any


@triton.jit
def span_of(row, last, seq, params):
    """The key tiles that queries [row, last] visit, at least one."""
    BLOCK_N: tl.constexpr = params.tile.BLOCK_N
    bounds = key_bounds(row, last, seq.off, seq.len_k, params.mask)
    end = tl.cdiv(bounds.stop_last, BLOCK_N)
    begin = end * 0
    first_end = begin
    if params.mask.HAS_LEFT:
        begin = tl.minimum(bounds.start_first // BLOCK_N, end)
        seen = tl.minimum(params.mask.first, bounds.stop_last)
        first_end = tl.minimum(tl.cdiv(seen, BLOCK_N), begin)
    return Span(first_end, begin, tl.maximum(end - begin + first_end, 1))


@triton.jit
def block_of(visit, span, mask: Mask):
    """The key tile of a visit: all in turn or, beside a window, leading ones first."""
    if mask.HAS_LEFT:
        return tl.where(visit < span.first_end, visit, visit - span.first_end + span.begin)
    else:
        return visit


@triton.jit
def visit_of(block, span):
    """The first visit of a key tile, or of one behind it."""
    before = tl.minimum(block, span.first_end)
    return tl.where(block < span.begin, before, block - span.begin + span.first_end)


@triton.jit
def segment_visits(visits, work: DecodeWork):
    """Visits of each segment, where a work tile is cut by its own visits."""
    return tl.cdiv(visits, work.splits)


@triton.jit
def tile_length(visits, work: DecodeWork):
    """How long a work tile is on the line."""
    if work.splits is None:
        return visits + work.OVERHEAD
    else:
        return visits + work.OVERHEAD * tl.cdiv(visits, segment_visits(visits, work))


@triton.jit
def tile_at(x, base, visits, work: DecodeWork):
    """(number within its sequence, begin on the line) of the work tile at x, of packed queries
    whose sequence begins at base."""
    number = (x - base) // tile_length(visits, work)
    return number, base + number * tile_length(visits, work)


@triton.jit
def first_tile(b, token_q, params):
    """The number of a sequence's first tile of rows among those of all, of one KV head. Packed
    sequences before it have no more than their tokens fill, and one each."""
    number = b * params.work.tiles
    if params.seqs.cu_q is not None:  # noqa: SIM102  (known when compiling, and `and` is not)
        if params.work.short_q is None:
            group = params.shape.heads_q // params.shape.heads_k
            number = (token_q * group // params.tile.BLOCK_M).to(tl.int32) + b
    return number


@triton.jit
def sequence_length(seq, params):
    """(visits, length on a line) of a sequence, or of many."""
    visits = span_of(0, seq.len_q - 1, seq, params).visits
    length = tile_length(visits, params.work)
    if params.seqs.cu_q is not None:
        group = params.shape.heads_q // params.shape.heads_k
        length *= tl.cdiv(seq.stored_q * group, params.tile.BLOCK_M)
    if params.work.short_q is not None:
        length = tl.where(seq.stored_q <= params.work.short_q, length, 0)
    if params.work.SKIPS_EMPTY:
        length = tl.where(seq.len_k > 0, length, 0)
    return visits, length


@triton.jit
def lengths_of(b_B, params):
    """How long sequences are on the line; 0 past the last."""
    inside_B = b_B < params.shape.batch
    b_B = tl.minimum(b_B, params.shape.batch - 1)
    _visits, length = sequence_length(seqlens_of(b_B, params.seqs, params.mask), params)
    return tl.where(inside_B, length, 0)


@triton.jit
def segment_of(share, number, line, begin, tile, visits, work: DecodeWork):
    """(first visit, last but one, where results go, where on the line the program goes on) of the
    segment where a share is, of a work tile of this number that begins at `begin`; no segment if
    both visits are the same. number: of the share."""
    if work.splits is None:
        keys = begin + work.OVERHEAD
        start = tl.maximum(share.x - keys, 0)
        stop = tl.maximum(tl.minimum(share.end - keys, visits), start)
        first = keys // share.each
        segments = (keys + visits - 1) // share.each - first + 1
        # A program has one segment that is not a work tile's first at most, and one that is, with
        # others behind: two slots.
        slot = (2 * number + tl.where(number == first, 1, 0)) * line.lines + line.number
        slot_0 = (2 * first + 1) * line.lines + line.number
        rest = 2 * first * line.lines + line.number
        partials = Partials(tile, segments, slot, slot_0, rest, 2 * line.lines)
        return start, stop, partials, tl.minimum(share.end, keys + visits)
    else:
        each = segment_visits(visits, work)
        length = each + work.OVERHEAD
        segments = tl.cdiv(visits, each)
        i = tl.cdiv(share.x - begin, length)
        x = begin + i * length
        is_own = (i < segments) & (x < share.end)
        start = i * each
        stop = tl.where(is_own, tl.minimum(start + each, visits), start)
        # Behind the last segment of the work tile the next one begins.
        behind = tl.minimum(x + length, begin + visits + work.OVERHEAD * segments)
        first = tile * work.splits
        partials = Partials(tile, segments, first + i, first, first, 1)
        return start, stop, partials, behind
