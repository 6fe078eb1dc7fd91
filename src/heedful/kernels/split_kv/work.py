"""Divides the keys of a decode among programs. Each program finds its share by itself, since only
the device knows the lengths.

A work tile is one tile of query rows of one KV head of one sequence, over all key tiles that the
sequence's queries see. To process one key tile is a visit. The work tiles of a head and row tile
form a line, in the order of sequences; with packed queries, whose counts differ, all row tiles of a
head form one line. A work tile is as long as its visits plus OVERHEAD, its fixed cost in key tiles.
Each line is cut into shares, and each share has a program. The part of a work tile in one share is
a segment. If a work tile has several segments, the program that finishes the last one merges them.
Packed sequences that another kernel handles have length 0. So do sequences without keys, of which
padded batches have many: their results are cleared separately.

Neighbouring programs have the same share of different heads, so that they read adjacent memory at a
time. Reads of one head alone, 64 of every 512 bytes, would have half the bandwidth. Row tiles of a
head are neighbours too: the second one finds in the L2 cache what the first one reads.

Without `splits` the line is cut into equal shares, at any visit: no program is idle, and a work
tile has as few segments as possible. With `splits` a work tile is cut into that many segments by
its own visits alone, so that its result does not depend on the rest of the batch. A program then
has the segments that begin in its share.

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
    """The groups that functions of this folder read from `params`. A kernel passes its own groups,
    which must include these. From the tile they read BLOCK_M, BLOCK_N and HEAD_DIM_V."""

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
    """Where the segments of a work tile store their results. tile: number of the work tile. count:
    of its segments. slot: of this segment. first: slot of segment 0. Segment i > 0 has slot rest +
    step * i."""

    tile: Any
    count: Any
    slot: Any
    first: Any
    rest: Any
    step: Any


@triton.jit
def span_of(row, last, seq, params):
    """The key tiles that queries [row, last] visit; at least one."""
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
    """The key tile of a visit. All come in order; beside a window, leading tiles come first."""
    if mask.HAS_LEFT:
        return tl.where(visit < span.first_end, visit, visit - span.first_end + span.begin)
    else:
        return visit


@triton.jit
def visit_of(block, span):
    """The visit of a key tile, or of the next tile that is visited."""
    before = tl.minimum(block, span.first_end)
    return tl.where(block < span.begin, before, block - span.begin + span.first_end)


@triton.jit
def segment_visits(visits, work: DecodeWork):
    """Visits of each segment, where a work tile is cut by its own visits."""
    return tl.cdiv(visits, work.splits)


@triton.jit
def tile_length(visits, work: DecodeWork):
    """The length of a work tile on the line."""
    if work.splits is None:
        return visits + work.OVERHEAD
    else:
        return visits + work.OVERHEAD * tl.cdiv(visits, segment_visits(visits, work))


@triton.jit
def tile_at(x, base, visits, work: DecodeWork):
    """(number within its sequence, begin on the line) of the work tile at x, for packed queries
    whose sequence begins at base."""
    number = (x - base) // tile_length(visits, work)
    return number, base + number * tile_length(visits, work)


@triton.jit
def first_tile(b, token_q, params):
    """The number of a sequence's first row tile among all row tiles of a KV head. The packed
    sequences before it fill at most as many tiles as their tokens do, and one more each."""
    number = b * params.work.tiles
    if params.seqs.cu_q is not None:  # noqa: SIM102  (known when compiling, and `and` is not)
        if params.work.short_q is None:
            group = params.shape.heads_q // params.shape.heads_k
            number = (token_q * group // params.tile.BLOCK_M).to(tl.int32) + b
    return number


@triton.jit
def sequence_length(seq, params):
    """(visits of a row tile, length on the line) of a sequence, or of a tensor of sequences."""
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
    """Lengths of sequences on the line; 0 past the last sequence."""
    inside_B = b_B < params.shape.batch
    b_B = tl.minimum(b_B, params.shape.batch - 1)
    _visits, length = sequence_length(seqlens_of(b_B, params.seqs, params.mask), params)
    return tl.where(inside_B, length, 0)


@triton.jit
def segment_of(share, number, line, begin, tile, visits, work: DecodeWork):
    """(first visit, end of visits, partials, where on the line the program goes on) of the segment
    at the share's position. The work tile has number `tile` and begins at `begin`. If both visits
    are equal, there is no segment. number: of the share."""
    if work.splits is None:
        keys = begin + work.OVERHEAD
        start = tl.maximum(share.x - keys, 0)
        stop = tl.maximum(tl.minimum(share.end - keys, visits), start)
        first = keys // share.each
        segments = (keys + visits - 1) // share.each - first + 1
        # A share holds at most one segment that is not its work tile's first, and one that is the
        # first of a work tile which goes on in other shares. So each share has two slots.
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
        # The next work tile begins after the last segment of this one.
        behind = tl.minimum(x + length, begin + visits + work.OVERHEAD * segments)
        first = tile * work.splits
        partials = Partials(tile, segments, first + i, first, first, 1)
        return start, stop, partials, behind
