"""Walks over a program's share of the keys, segment by segment. `work` defines lines, shares and
segments. Each role of a program, such as the producer, walks for itself."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from heedful.kernels.split_kv.work import (
    first_tile,
    lengths_of,
    segment_of,
    span_of,
)


class Share(NamedTuple):
    """A program's share of a line. x: where on the line the walk is. end: where the share ends.
    each: the length of every share. b: the sequence at x. base: where that sequence begins on the
    line."""

    x: Any
    end: Any
    each: Any
    b: Any
    base: Any


class Segment(NamedTuple):
    """The next work of a program: visits [start, stop) of key tiles, possibly none, of sequence b,
    for rows from row0 on of KV head g.

    seq: the sequence's `Seqlens`. partials: where results go. span: which key tiles are visited; it
    is 0 until `with_span` sets it, since Triton 3.6 cannot return None.
    """

    start: Any
    stop: Any
    b: Any
    g: Any
    row0: Any
    seq: Any
    partials: Any
    span: Any


class Line(NamedTuple):
    """A program's line: its number, the count of lines, and its KV head."""

    number: Any
    lines: Any
    g: Any


@triton.jit
def line_of(params):
    """The line of this program: there is one for each head and row tile or, with packed queries,
    one for each head."""
    lines = params.shape.heads_k
    if params.seqs.cu_q is None:
        lines = lines * params.work.tiles
    line = tl.program_id(0) % lines
    return Line(line, lines, line % params.shape.heads_k)


@triton.jit
def share_of(number, shares, first_B, looks_B, params):
    """(a `Share` of a line, at its begin; how many sequences without keys are left off the line).

    number: of the share. shares: how many the line has. first_B: 0; looks_B: 0 to LOOKS - 1; both
    in any layout.
    """
    empty = 0
    if params.work.IS_UNIFORM:
        each = tl.sum(lengths_of(first_B, params), 0)
        total = each * params.shape.batch
    else:
        each = 0
        total = 0
        # A single sequence begins where its share does. To look at LOOKS sequences for its one
        # length would cost most of a microsecond before the first key.
        looked = params.shape.batch
        if params.shape.batch == 1:
            looked = looked * 0
            total += tl.sum(lengths_of(first_B, params), 0)
            if params.work.SKIPS_EMPTY:
                empty += (total == 0).to(tl.int32)
        for b0 in range(0, looked, params.work.LOOKS):
            length_B = lengths_of(b0 + looks_B, params)
            total += tl.sum(length_B, 0)
            if params.work.SKIPS_EMPTY:
                is_empty_B = (length_B == 0) & (b0 + looks_B < params.shape.batch)
                empty += tl.sum(is_empty_B.to(tl.int32), 0)
    least = params.work.least
    if params.work.FEWEST_SHARES > 1:
        least = tl.minimum(least, tl.maximum(tl.cdiv(total, params.work.FEWEST_SHARES), 1))
    share = tl.maximum(tl.cdiv(total, shares), least)
    begin = tl.minimum(number * share, total)
    end = tl.minimum(begin + share, total)
    if params.work.IS_UNIFORM:
        b = begin // tl.maximum(each, 1)
        base = b * each
    else:
        b = 0
        base = 0
        before = 0
        for b0 in range(0, looked, params.work.LOOKS):
            length_B = lengths_of(b0 + looks_B, params)
            end_B = before + tl.cumsum(length_B, 0)
            before += tl.sum(length_B, 0)
            is_before_B = (end_B <= begin) & (b0 + looks_B < params.shape.batch)
            b += tl.sum(is_before_B.to(tl.int32), 0)
            base += tl.sum(tl.where(is_before_B, length_B, 0), 0)
    return Share(begin, end, share, b, base), empty


@triton.jit
def segment_at(share, number, line, row_tile, begin, seq, visits, is_here, params):
    """(the segment at the share's position, where on the line the program goes on after it).

    number: of the share. row_tile, begin: the work tile there, counted within its sequence, and
    where it begins on the line. is_here: whether the share still is in this sequence; if not, the
    segment is empty.
    """
    first = first_tile(share.b, seq.token_q, params)
    row0 = row_tile * params.tile.BLOCK_M
    tile = (first + row_tile) * params.shape.heads_k + line.g
    start, stop, partials, behind = segment_of(
        share, number, line, begin, tile, visits, params.work
    )
    stop = tl.where(is_here, stop, start)
    return Segment(start, stop, share.b, line.g, row0, seq, partials, 0), behind


@triton.jit
def with_span(segment, params):
    """The segment with its span. This is a step of its own, since registers are few while it is
    unknown whether there is a segment."""
    group = params.shape.heads_q // params.shape.heads_k
    last = (segment.row0 + params.tile.BLOCK_M - 1) // group
    last = tl.minimum(last, segment.seq.len_q - 1)
    span = span_of(segment.row0 // group, last, segment.seq, params)
    return Segment(
        segment.start,
        segment.stop,
        segment.b,
        segment.g,
        segment.row0,
        segment.seq,
        segment.partials,
        span,
    )
