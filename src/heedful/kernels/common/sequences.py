"""Where a sequence's rows lie."""

import triton
import triton.language as tl


@triton.jit
def within(value, low, high):
    """The value, or the bound beyond which it is."""
    return tl.minimum(tl.maximum(value, low), high)


@triton.jit
def sequence(b, cu_seqlens, seqused, leftpad, seqlen):
    """(first token, used length, stored length from there on) of sequence b.

    seqlen: rows that each sequence has in storage, or packed tokens of all. Whatever values the
    arrays hold, a sequence lies within these: what is read and written through it exists.
    """
    token = tl.cast(0, tl.int64)
    stored = seqlen
    if cu_seqlens is not None:
        begin = within(tl.load(cu_seqlens + b), 0, seqlen)
        stored = within(tl.load(cu_seqlens + b + 1), begin, seqlen) - begin
        token += begin
    used = stored
    if seqused is not None:
        used = within(tl.load(seqused + b), 0, stored)
    if leftpad is not None:
        pad = within(tl.load(leftpad + b), 0, stored)
        token += pad
        stored -= pad
        used = tl.minimum(used, stored)
    return token, used, stored
