"""Where a sequence's rows lie."""

import triton
import triton.language as tl


@triton.jit
def within(value, low, high):
    """The value, or the bound beyond which it is."""
    return tl.minimum(tl.maximum(value, low), high)


@triton.jit
def sequence(b, cu_seqlens, seqused, leftpad, seqlen, new=None):
    """(first token, used length, stored length from there on) of sequence b.

    seqlen: rows that each sequence has in storage, or packed tokens of all. new: rows on top of
    seqused, which then counts padding too and is negative for no sequence; None for none. Whatever
    values arrays hold, a sequence lies within these: what is read and written through it exists.
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
