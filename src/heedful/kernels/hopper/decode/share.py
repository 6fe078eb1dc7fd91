"""Walks over the share of a program in the Hopper and MLA decodes. Each role of a program walks
over the same share by itself, segment by segment (split_kv/walk.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.common.sequences import seqlens_of
from heedful.kernels.split_kv.walk import Share, line_of, segment_at, share_of, with_span
from heedful.kernels.split_kv.work import sequence_length, tile_at


@gluon.jit
def own_share(params):
    """(this program's share, how many sequences have no keys), computed before the roles begin."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    # Each warp looks at all sequences, so that none waits for another, unless there are too many.
    EACH: gl.constexpr = min(params.work.LOOKS // 32, 4)
    layout: gl.constexpr = gl.BlockedLayout([EACH], [32], [4], [0])
    lines = line_of(params).lines
    first_B = gl.arange(0, 1, layout=one)
    looks_B = gl.arange(0, params.work.LOOKS, layout=layout)
    number, shares = gl.program_id(0) // lines, gl.num_programs(0) // lines
    return share_of(number, shares, first_B, looks_B, params)


@gluon.jit
def look(share, params):
    """(the segment at the share's position, the share after it). The portable decode branches over
    sequences instead; one form for both would change the machine code of one of them."""
    line = line_of(params)
    row_tile, begin = line.number // params.shape.heads_k, share.base
    seq = seqlens_of(share.b, params.seqs, params.mask)
    visits, length = sequence_length(seq, params)
    is_here = share.x < share.base + length
    if params.seqs.cu_q is not None:
        row_tile, begin = tile_at(share.x, share.base, visits, params.work)
    number = share.x // share.each
    segment, x = segment_at(share, number, line, row_tile, begin, seq, visits, is_here, params)
    behind = Share(
        gl.where(is_here, x, share.x),
        share.end,
        share.each,
        gl.where(is_here, share.b, share.b + 1),
        gl.where(is_here, share.base, share.base + length),
    )
    return with_span(segment, params), behind
