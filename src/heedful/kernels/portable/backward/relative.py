"""Gradient of a bias by relative position, which is a sum over diagonals of the scores.

`diagonal_sums`, launched by `launch/bind/portable.py` after `query_gradients`, which stores delta,
adds up the gradients of scores along each diagonal. `relative_gradients` adds these sums to the
entries of the bias, of which the first and the last have many. There are no atomics, so that each
sum has one order.

A diagonal is the number i + off - j of query i and key j. A column of the sums is one diagonal,
counted from the least that sequences of the call can have.

Shapes: H query heads, M query rows, N key rows, W diagonals of a window, R distances.
"""

import triton
import triton.language as tl

from heedful.kernels.args.portable import DiagonalSumsIO, RelativeGradientsIO
from heedful.kernels.args.shared import Mask, PortableParams, Shape
from heedful.kernels.common.rows import wide
from heedful.kernels.common.sequences import place_of
from heedful.kernels.portable.backward.bias import score_gradients
from heedful.kernels.portable.shared.dropout import dropout_words


@triton.jit
def least_diagonal(shape: Shape, mask: Mask):
    """The least diagonal that a sequence of the call can have."""
    return mask.shift + 1 - tl.where(mask.bottom_right != 0, shape.longest_q, shape.longest_k)


@triton.jit
def is_hidden(first, WINDOW: tl.constexpr, mask: Mask):
    """Whether positions hide all diagonals of a window from `first` on."""
    hidden = first != first
    if mask.HAS_RIGHT:
        hidden |= first + WINDOW - 1 < -mask.right
    if mask.HAS_LEFT:
        hidden |= (first > mask.left) & (mask.first == 0)
    return hidden


@triton.jit
def sheared(ds_MN, shift, stop, WINDOW: tl.constexpr):
    """[M, W] of a tile of gradients [M, N]: row m has column n at m - n + shift. Columns from
    `stop` on are left out."""
    M: tl.constexpr = ds_MN.shape[0]
    N: tl.constexpr = ds_MN.shape[1]
    column_MW = tl.arange(0, M)[:, None] - tl.arange(0, WINDOW)[None, :] + shift
    ok_MW = (column_MW >= 0) & (column_MW < tl.minimum(N, stop))
    inside_MW = tl.minimum(tl.maximum(column_MW, 0), N - 1)
    return tl.where(ok_MW, tl.gather(ds_MN, inside_MW, 1), 0.0)


@triton.jit
def diagonal_sums(
    io: DiagonalSumsIO,
    params: PortableParams,
    columns,
    PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Stores sums (PARTS, H, columns). A program has a window of diagonals of one head, in every
    PARTS-th sequence. Gradients of a tile of scores are computed with each window that it meets."""
    M: tl.constexpr = params.tile.BLOCK_M
    N: tl.constexpr = params.tile.BLOCK_N
    # Words of the dropout mask are drawn for aligned groups of four columns.
    EACH: tl.constexpr = 4 if params.dropout.IS_ON else 1
    TILES: tl.constexpr = (M + WINDOW + EACH - 2 + N - 1) // N
    pid = tl.program_id(0)
    windows = columns // WINDOW
    window = pid % windows
    h = pid // windows % params.shape.heads_q
    part = pid // windows // params.shape.heads_q
    g = h // (params.shape.heads_q // params.shape.heads_k)
    first = least_diagonal(params.shape, params.mask) + window * WINDOW
    words = dropout_words(params.dropout)
    acc_MW = tl.zeros([M, WINDOW], tl.float32)
    batch = tl.where(is_hidden(first, WINDOW, params.mask), 0, params.shape.batch)
    HAS_BIAS: tl.constexpr = params.mods.bias.ptr is not None
    for b in range(part, batch, PARTS):
        place = place_of(b, h, g, params.seqs, params.shape, params.mask, HAS_BIAS)
        off, len_k = place.seq.off, place.seq.len_k
        # Rows whose keys on these diagonals may exist.
        begin = tl.maximum(first - off, 0) // M
        stop = tl.minimum(place.seq.len_q, tl.maximum(len_k - off + first + WINDOW - 1, 0))
        for block in range(begin, tl.cdiv(stop, M)):
            row0 = block * M
            left = row0 + off - first - WINDOW + 1
            if EACH > 1:
                left = left & -EACH
            for n in range(0, TILES):
                # A tile that would begin before the first key begins there, and is narrower.
                col = left + n * N
                col0 = tl.maximum(col, 0)
                if (col + N > 0) & (col < len_k):
                    ds_MN = score_gradients(row0, col0, place, words, io, params)
                    shift = row0 + off - col0 - first
                    acc_MW += sheared(ds_MN, shift, col + N - col0, WINDOW)
    places = (wide(part) * params.shape.heads_q + h) * columns + window * WINDOW
    tl.store(io.sums + places + tl.arange(0, WINDOW), tl.sum(acc_MW, 0))


@triton.jit
def sums_of(base, begin, stop, columns, heads, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK] sums of columns from `begin` on, 0 of those before the first, and from `stop` on.
    base: where those of a head begin."""
    column = begin + tl.arange(0, BLOCK)
    ok = (column >= 0) & (column < tl.minimum(stop, columns))
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(base + wide(part) * heads * columns + column, mask=ok, other=0.0)
    return total


@triton.jit
def relative_gradients(
    io: RelativeGradientsIO,
    shape: Shape,
    mask: Mask,
    distances,
    columns,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores drel_bias (H, R), a program for each BLOCK entries of a head. The first entry has all
    diagonals before its own, too, and the last all after."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(distances, BLOCK)
    entry0 = pid % blocks * BLOCK
    h = pid // blocks
    base = io.sums + wide(h) * columns
    heads = shape.heads_q
    # The column of entry 0.
    column0 = -least_diagonal(shape, mask) - distances // 2
    entries = entry0 + tl.arange(0, BLOCK)
    total = sums_of(base, column0 + entry0, columns, columns, heads, PARTS, BLOCK)
    stop = tl.where(entry0 == 0, tl.minimum(column0, columns), 0)
    before = tl.zeros([BLOCK], tl.float32)
    for column in range(0, stop, BLOCK):
        before += sums_of(base, column, stop, columns, heads, PARTS, BLOCK)
    begin = tl.maximum(column0 + distances, 0)
    end = tl.where(entry0 + BLOCK >= distances, columns, 0)
    after = tl.zeros([BLOCK], tl.float32)
    for column in range(begin, end, BLOCK):
        after += sums_of(base, column, columns, columns, heads, PARTS, BLOCK)
    total += tl.where(entries == 0, tl.sum(before, 0), 0.0)
    total += tl.where(entries == distances - 1, tl.sum(after, 0), 0.0)
    gradient = io.drel_bias + wide(h) * distances + entries
    kind = io.drel_bias.dtype.element_ty
    tl.store(gradient, total.to(kind), mask=entries < distances)
