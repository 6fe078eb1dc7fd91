"""Which keys a program of a decode has, as each of its roles finds out by itself: all walk the same
share of a line, piece by piece (portable/decode/work.py)."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.common.sequences import seqlens_of
from heedful.kernels.portable.decode.work import (
    first_unit,
    next_piece,
    sequence_length,
    share_of,
    span_of,
    unit_at,
)


class Share(NamedTuple):
    """A program's share of a line: where on the line it is and ends, how long each share is, the
    sequence there, and where that begins."""

    x: Any
    end: Any
    each: Any
    b: Any
    base: Any


class Piece(NamedTuple):
    """What a program does next: visits [start, stop) of key tiles, perhaps none, of sequence b for
    rows from row0 on of KV head g. seq: that sequence; span: which key tiles those are; work: where
    results go."""

    start: Any
    stop: Any
    b: Any
    g: Any
    row0: Any
    seq: Any
    span: Any
    work: Any


@gluon.jit
def lines_of_head(params):
    """How many lines of units a KV head has: one of each row tile; of packed queries one of all."""
    if params.seqs.cu_q is None:
        return params.work.tiles
    else:
        return 1


@gluon.jit
def own_share(params):
    """(a program's share, how many sequences have no keys), ahead of all roles."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    # Each warp looks at all, so that none waits for another, unless they are too many.
    EACH: gl.constexpr = min(params.work.LOOKS // 32, 4)
    layout: gl.constexpr = gl.BlockedLayout([EACH], [32], [4], [0])
    lines = params.shape.heads_k * lines_of_head(params)
    x, end, each, b, base, empty = share_of(
        gl.program_id(0) // lines,
        gl.num_programs(0) // lines,
        gl.arange(0, 1, layout=one),
        gl.arange(0, params.work.LOOKS, layout=layout),
        params.seqs,
        params.shape,
        params.mask,
        params.work,
        params.tile,
    )
    return Share(x, end, each, b, base), empty


@gluon.jit
def look(share, params):
    """(the piece where the share is, the share behind it)."""
    lines = params.shape.heads_k * lines_of_head(params)
    line = gl.program_id(0) % lines
    g = line % params.shape.heads_k
    row_tile, unit_begin = line // params.shape.heads_k, share.base
    seq = seqlens_of(share.b, params.seqs, params.mask)
    visits, length = sequence_length(
        seq, params.seqs, params.shape, params.mask, params.work, params.tile
    )
    is_here = share.x < share.base + length
    if params.seqs.cu_q is not None:
        row_tile, unit_begin = unit_at(share.x, share.base, visits, params.work)
    first = first_unit(share.b, seq.token_q, params.seqs, params.shape, params.work, params.tile)
    index = (first + row_tile) * params.shape.heads_k + g
    own = share.x // share.each
    work = next_piece(
        own, share.x, share.end, share.each, unit_begin, index, visits, line, lines, params.work
    )
    stop = gl.where(is_here, work.stop, work.start)
    row0 = row_tile * params.tile.BLOCK_M
    group = params.shape.heads_q // params.shape.heads_k
    last = gl.minimum((row0 + params.tile.BLOCK_M - 1) // group, seq.len_q - 1)
    span = span_of(row0 // group, last, seq, params.mask, params.tile)
    piece = Piece(
        work.start,
        stop,
        share.b,
        g,
        row0,
        seq,
        span,
        work,
    )
    behind = Share(
        gl.where(is_here, work.next, share.x),
        share.end,
        share.each,
        gl.where(is_here, share.b, share.b + 1),
        gl.where(is_here, share.base, share.base + length),
    )
    return piece, behind
