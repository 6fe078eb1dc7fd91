"""Philox4x32-10 (Salmon et al., SC'11), the counter-based generator of dropout masks.

Forward and backward kernels draw the same words from the same counters, so no mask is stored.
"""

import triton
import triton.language as tl


@triton.jit
def philox_words(c0, c1, c2, c3, key0, key1):
    """The four words of counters (c0, c1, c2, c3); all are uint32 and broadcast."""
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product2 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product2 >> 32).to(tl.uint32) ^ c1 ^ key0
        c1 = product2.to(tl.uint32)
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ key1
        c3 = product0.to(tl.uint32)
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def seed_words(seed):
    """The low and the high word of the 64-bit seed at this address."""
    value = tl.load(seed)
    return value.to(tl.uint32), (value >> 32).to(tl.uint32)


@triton.jit
def place_of(dropout, b, h):
    """(batch, head, first row, first column) in the whole problem of head h of sequence b. The
    launch passes where the call lies; where one program serves several shards, four numbers stand
    in memory after the seed; and each sequence may have four of its own."""
    if dropout.origins is not None:
        place = dropout.origins + b * 4
        column = tl.load(place + 3)
        if dropout.IS_QUAD:
            column *= 4
        return tl.load(place), tl.load(place + 1) + h, tl.load(place + 2), column
    elif dropout.origin_b is None:
        place = dropout.seed + 1
        origin_b, origin_h = tl.load(place).to(tl.int32), tl.load(place + 1).to(tl.int32)
        row, column = tl.load(place + 2).to(tl.int32), tl.load(place + 3).to(tl.int32)
        return origin_b + b, origin_h + h, row, column
    else:
        return dropout.origin_b + b, dropout.origin_h + h, dropout.origin_m, dropout.origin_n


@triton.jit
def quad_words(dropout, quads, rows, head, batch, zeros):
    """The words of four neighbouring keys, as four uint32 tensors shaped like `zeros`. quads: the
    first key of each four; rows: query rows; both broadcast, and have the origin added."""
    key0, key1 = seed_words(dropout.seed)
    return philox_words(
        zeros + (quads.to(tl.uint32) >> 2),
        zeros + rows.to(tl.uint32),
        zeros + head.to(tl.uint32),
        zeros + batch.to(tl.uint32),
        key0,
        key1,
    )


@triton.jit
def kept_quads(dropout, quads, rows, head, batch, zeros):
    """Which scores of four neighbouring keys are kept, as four int8 tensors. The inputs are those
    of `quad_words`."""
    w0, w1, w2, w3 = quad_words(dropout, quads, rows, head, batch, zeros)
    threshold = dropout.threshold.to(tl.uint32)
    k0, k1 = (w0 < threshold).to(tl.int8), (w1 < threshold).to(tl.int8)
    return k0, k1, (w2 < threshold).to(tl.int8), (w3 < threshold).to(tl.int8)
