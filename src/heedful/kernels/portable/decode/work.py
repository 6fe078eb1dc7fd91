"""How the keys of a decode are dealt out: every program finds its own share, from lengths that only
the device knows.

A unit is one tile of query rows of one KV head of one sequence, over all key tiles that its
sequence's queries see: its visits. Units of a head and row tile stand in a line, by sequence; those
of packed queries, of which sequences have more or fewer, in one line of the head. Each is as long
as its visits, and OVERHEAD for what it costs beside. The line is cut into shares, and every line
has a program for each. A unit that several shares have a part of is merged by who finishes its last
part. Packed sequences that another kernel has are of length 0, and so are those without
keys, which padded batches are full of: they are cleared apart.

Neighbours among programs have the same share of all heads: what they read at a time lies side by
side. Rows of one head alone, 64 bytes of every 512, would be read at half the speed. And so do row
tiles of a head: the second finds in the cache what the first reads.

Without `splits` the line is cut evenly, wherever that is: no program is idle, and a unit has as few
parts as there can be. With `splits` a unit is cut in so many parts by its own visits alone, so that
its result does not depend on what else is in the batch; a program has the parts that begin in its
share.

Shapes: B sequences.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from heedful.kernels.args.decode import DecodeTile, DecodeWork
from heedful.kernels.args.shared import Mask, Sequences, Shape
from heedful.kernels.common.key_range import key_bounds
from heedful.kernels.common.rows import wide
from heedful.kernels.common.sequences import Place, seqlens_of


class Span(NamedTuple):
    """The key tiles that some rows visit: [0, first_end), then [begin, ..), `visits` in all."""

    first_end: Any
    begin: Any
    visits: Any


class Piece(NamedTuple):
    """Visits [start, stop) of a unit. index: of the unit; parts: how many there are of it; slot:
    where its partial results go; first, step: slots of part 0, and of part i > 0 at first + step
    * i. next: where on the line the program goes on."""

    start: Any
    stop: Any
    index: Any
    parts: Any
    slot: Any
    first: Any
    rest: Any
    step: Any
    next: Any


@triton.jit
def span_of(row, last, seq, mask: Mask, tile: DecodeTile):
    """The key tiles that queries [row, last] visit, at least one."""
    bounds = key_bounds(row, last, seq.off, seq.len_k, mask)
    end = tl.cdiv(bounds.stop_last, tile.BLOCK_N)
    begin = end * 0
    first_end = begin
    if mask.HAS_LEFT:
        begin = tl.minimum(bounds.start_first // tile.BLOCK_N, end)
        seen = tl.minimum(mask.first, bounds.stop_last)
        first_end = tl.minimum(tl.cdiv(seen, tile.BLOCK_N), begin)
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
def part_visits(visits, work: DecodeWork):
    """Visits of each part, where a unit is cut by its own visits."""
    return tl.cdiv(visits, work.splits)


@triton.jit
def unit_length(visits, work: DecodeWork):
    """How long a unit is on the line."""
    if work.splits is None:
        return visits + work.OVERHEAD
    else:
        return visits + work.OVERHEAD * tl.cdiv(visits, part_visits(visits, work))


@triton.jit
def unit_at(x, base, visits, work: DecodeWork):
    """(number within its sequence, begin on the line) of the unit at x, of packed queries whose
    sequence begins at base."""
    number = (x - base) // unit_length(visits, work)
    return number, base + number * unit_length(visits, work)


@triton.jit
def first_unit(b, token_q, seqs: Sequences, shape: Shape, work: DecodeWork, tile: DecodeTile):
    """The number of a sequence's first tile of rows among those of all, of one KV head. Packed
    sequences before it have no more than their tokens fill, and one each."""
    number = b * work.tiles
    if seqs.cu_q is not None:  # noqa: SIM102  (known when compiling, and `and` is not)
        if work.short_q is None:
            group = shape.heads_q // shape.heads_k
            number = (token_q * group // tile.BLOCK_M).to(tl.int32) + b
    return number


@triton.jit
def sequence_length(seq, x: Sequences, shape: Shape, mask: Mask, work, tile: DecodeTile):
    """(visits, length on a line) of a sequence, or of many."""
    visits = span_of(0, seq.len_q - 1, seq, mask, tile).visits
    length = unit_length(visits, work)
    if x.cu_q is not None:
        length *= tl.cdiv(seq.stored_q * (shape.heads_q // shape.heads_k), tile.BLOCK_M)
    if work.short_q is not None:
        length = tl.where(seq.stored_q <= work.short_q, length, 0)
    if work.SKIPS_EMPTY:
        length = tl.where(seq.len_k > 0, length, 0)
    return visits, length


@triton.jit
def lengths_of(b_B, x: Sequences, shape: Shape, mask: Mask, work: DecodeWork, tile: DecodeTile):
    """How long sequences are on the line; 0 past the last."""
    inside_B = b_B < shape.batch
    b_B = tl.minimum(b_B, shape.batch - 1)
    seq = seqlens_of(b_B, x, mask)
    _visits, length = sequence_length(seq, x, shape, mask, work, tile)
    return tl.where(inside_B, length, 0)


@triton.jit
def share_of(
    number, shares, first_B, looks_B, x: Sequences, shape: Shape, mask: Mask, work, tile: DecodeTile
):
    """(begin, end, length of each share, sequence that `begin` is in, where that begins, how many
    sequences are not on the line for want of keys) of one share of a line. first_B: 0; looks_B: 0
    to LOOKS - 1, in any layout."""
    LOOKS: tl.constexpr = work.LOOKS
    empty = 0
    if work.IS_UNIFORM:
        each = tl.sum(lengths_of(first_B, x, shape, mask, work, tile), 0)
        total = each * shape.batch
    else:
        each = 0
        total = 0
        # A sequence alone is where its share begins: LOOKS for one length would be the better part
        # of a microsecond before its first key.
        looked = shape.batch
        if shape.batch == 1:
            looked = looked * 0
            total += tl.sum(lengths_of(first_B, x, shape, mask, work, tile), 0)
            if work.SKIPS_EMPTY:
                empty += (total == 0).to(tl.int32)
        for b0 in range(0, looked, LOOKS):
            length_B = lengths_of(b0 + looks_B, x, shape, mask, work, tile)
            total += tl.sum(length_B, 0)
            if work.SKIPS_EMPTY:
                is_empty_B = (length_B == 0) & (b0 + looks_B < shape.batch)
                empty += tl.sum(is_empty_B.to(tl.int32), 0)
    least = work.least
    if work.FEWEST_PARTS > 1:
        least = tl.minimum(least, tl.maximum(tl.cdiv(total, work.FEWEST_PARTS), 1))
    share = tl.maximum(tl.cdiv(total, shares), least)
    begin = tl.minimum(number * share, total)
    end = tl.minimum(begin + share, total)
    if work.IS_UNIFORM:
        b = begin // tl.maximum(each, 1)
        base = b * each
    else:
        b = 0
        base = 0
        before = 0
        for b0 in range(0, looked, LOOKS):
            length_B = lengths_of(b0 + looks_B, x, shape, mask, work, tile)
            end_B = before + tl.cumsum(length_B, 0)
            before += tl.sum(length_B, 0)
            is_before_B = (end_B <= begin) & (b0 + looks_B < shape.batch)
            b += tl.sum(is_before_B.to(tl.int32), 0)
            base += tl.sum(tl.where(is_before_B, length_B, 0), 0)
    return begin, end, share, b, base, empty


@triton.jit
def place_at(b, g, seq):
    """A place of all query heads of KV head g; `h` is its first."""
    return Place(wide(b), wide(0), wide(g), seq)


@triton.jit
def next_piece(own, x, end, share, unit_begin, index, visits, line, lines, work: DecodeWork):
    """The piece at `x` of the unit of a line that begins at `unit_begin`; none if start == stop.
    own: number of the share."""
    if work.splits is None:
        keys = unit_begin + work.OVERHEAD
        start = tl.maximum(x - keys, 0)
        stop = tl.maximum(tl.minimum(end - keys, visits), start)
        first = keys // share
        parts = (keys + visits - 1) // share - first + 1
        # A program has one part that is not a unit's first at most, and one that is, with others
        # behind: two slots.
        slot = (2 * own + tl.where(own == first, 1, 0)) * lines + line
        return Piece(
            start,
            stop,
            index,
            parts,
            slot,
            (2 * first + 1) * lines + line,
            2 * first * lines + line,
            2 * lines,
            tl.minimum(end, keys + visits),
        )
    else:
        each = part_visits(visits, work)
        length = each + work.OVERHEAD
        parts = tl.cdiv(visits, each)
        part = tl.cdiv(x - unit_begin, length)
        begin = unit_begin + part * length
        is_own = (part < parts) & (begin < end)
        start = part * each
        stop = tl.where(is_own, tl.minimum(start + each, visits), start)
        # Behind the last part of the unit the next one begins.
        behind = tl.minimum(begin + length, unit_begin + visits + work.OVERHEAD * parts)
        slot = index * work.splits + part
        first = index * work.splits
        return Piece(start, stop, index, parts, slot, first, first, 1, behind)
