"""Where the rows of a sequence lie, from its lengths in device memory.

Shapes: B batch, H query heads, G KV heads.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from heedful.kernels.args.shared import Mask, Sequences, Shape
from heedful.kernels.common.rows import wide

# No diagonal is moved so far: `core.base.numbers.FAR`.
FARTHEST = tl.constexpr(1 << 29)
# Sequences that `tile_of_sequences` looks at together.
SEQUENCES = tl.constexpr(256)


@triton.jit
def within(value, low, high):
    """The value, clamped to [low, high]."""
    return tl.minimum(tl.maximum(value, low), high)


@triton.jit
def diagonal_offset(b, len_q, len_k, mask: Mask):
    """How far the diagonal of sequence b, or of a tensor of sequences, is moved."""
    if mask.offsets is None:
        return mask.shift + mask.bottom_right * (len_k - len_q)
    else:
        return within(tl.load(mask.offsets + b), 1 - FARTHEST, FARTHEST - 1)


@triton.jit
def sequence(b, cu_seqlens, seqused, leftpad, seqlen, new=None):
    """(first token, rows in use, rows in storage from the first token on) of sequence b.

    seqlen: rows that each sequence has in storage, or the packed tokens of all sequences. new: rows
    to add to seqused, or None. Beside it, seqused counts padding too and is negative for an entry
    that holds no sequence. The results are clamped: whatever values the arrays hold, a sequence
    lies within memory that exists.
    """
    token = tl.cast(0, tl.int64)
    stored = seqlen
    if cu_seqlens is not None:
        begin = within(tl.load(cu_seqlens + b), 0, seqlen)
        stored = within(tl.load(cu_seqlens + b + 1), begin, seqlen) - begin
        token += begin
    used = stored
    if seqused is not None:
        used = tl.load(seqused + b)
        if new is not None:
            used = tl.where(used < 0, 0, used + new)
            if leftpad is not None:
                used -= tl.load(leftpad + b)
        used = within(used, 0, stored)
    if leftpad is not None:
        pad = within(tl.load(leftpad + b), 0, stored)
        token += pad
        stored -= pad
        used = tl.minimum(used, stored)
    return token, used, stored


class Seqlens(NamedTuple):
    """The queries and keys of a sequence: first token (0 unless packed or padded), rows in use,
    rows in storage. off: how far the diagonal is moved. It is built by keyword."""

    # ptxas: a loop that carries these fields has its registers in their order.
    token_q: Any
    token_k: Any
    len_q: Any
    len_k: Any
    off: Any
    stored_q: Any
    stored_k: Any


class Place(NamedTuple):
    """The work of a program: sequence b, query head h and KV head g, as 64 bits, and the sequence's
    `Seqlens`."""

    b: Any
    h: Any
    g: Any
    seq: Any


@triton.jit
def seqlens_of(b, x: Sequences, mask: Mask, longest_q=None, longest_k=None):
    """The `Seqlens` of sequence b, or of a tensor of sequences. longest_q, longest_k: bounds on
    lengths in use, given where an array of scores (a bias) has room for only so many rows and keys.
    """
    token_q, len_q, stored_q = sequence(b, x.cu_q, x.used_q, None, x.seqlen_q)
    token_k, len_k, stored_k = sequence(b, x.cu_k, x.used_k, x.leftpad_k, x.seqlen_k, x.new_k)
    if longest_q is not None:
        len_q = tl.minimum(len_q, longest_q)
        len_k = tl.minimum(len_k, longest_k)
    off = diagonal_offset(b, len_q, len_k, mask)
    return Seqlens(
        token_q=token_q,
        len_q=len_q,
        stored_q=stored_q,
        token_k=token_k,
        len_k=len_k,
        stored_k=stored_k,
        off=off,
    )


@triton.jit
def tile_of_sequences(number, cu_seqlens, batch, TILE: tl.constexpr):
    """(sequence, first row) of a tile of TILE rows, where tiles are numbered over all packed
    sequences, and sequence b begins with tile cu_seqlens[b] // TILE + b. The tile may be past its
    sequence's rows."""
    before = 0
    for first in range(0, batch, SEQUENCES):
        sequence_B = first + tl.arange(0, SEQUENCES)
        exists_B = sequence_B < batch
        token_B = tl.load(cu_seqlens + sequence_B, mask=exists_B, other=0)
        before += tl.sum((exists_B & (token_B // TILE + sequence_B <= number)).to(tl.int32), 0)
    b = before - 1
    return b, (number - (tl.load(cu_seqlens + b) // TILE + b)) * TILE


@triton.jit
def place_of(b, h, g, x: Sequences, shape: Shape, mask: Mask, IS_BOUNDED: tl.constexpr):
    """The `Place` of query head h and KV head g in sequence b. IS_BOUNDED: lengths in use are
    bounded by the room of an array of scores (`shape.longest_q`, `shape.longest_k`)."""
    if IS_BOUNDED:
        seq = seqlens_of(b, x, mask, shape.longest_q, shape.longest_k)
    else:
        seq = seqlens_of(b, x, mask)
    return Place(wide(b), wide(h), wide(g), seq)


@triton.jit
def place_of_queries(bh, sequences: Sequences, shape: Shape, mask: Mask, IS_BOUNDED: tl.constexpr):
    """The `Place` of a query head that is numbered over all sequences."""
    h = bh % shape.heads_q
    g = h // (shape.heads_q // shape.heads_k)
    return place_of(bh // shape.heads_q, h, g, sequences, shape, mask, IS_BOUNDED)
