"""The dropout mask of one tile in torch, bit for bit that of `reference.philox`."""

import torch

from heedful.reference.philox import MULTIPLIERS, ROUNDS, WEYL, WORD, keep_threshold, key_words


def philox4x32(key: tuple[int, int], counter: tuple) -> tuple[torch.Tensor, ...]:
    """Ten rounds on int64 tensors that hold 32-bit words; the four broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The product wraps in int64, which leaves its 64 bits right, and >> copies the sign: what
        # is above a word is cut off once, before the next product needs the word alone.
        wide0, wide1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = ((wide1 >> 32) ^ c1).bitwise_xor_(k0).bitwise_and_(WORD)
        c2 = ((wide0 >> 32) ^ c3).bitwise_xor_(k1).bitwise_and_(WORD)
        c1, c3 = wide1, wide0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1 & WORD, c2, c3 & WORD


def keep_tile(
    seed: int,
    dropout_p: float,
    batches: range,
    heads: range,
    rows: range,
    cols: range,
    origin: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> torch.Tensor:
    """Which scores of a tile survive: bool (batches, heads, rows, cols), ranges of step 1.

    origin: (batch, head, row, column) added to the indices, each modulo 2^32.
    """
    batch, head, row = (
        (torch.arange(r.start, r.stop, dtype=torch.int64, device="cpu") + o) & WORD
        for r, o in zip((batches, heads, rows), origin[:3], strict=True)
    )
    # One block of four words serves four columns; a column index is modulo 2^32, a block's 2^30.
    first = cols.start + origin[3]
    last = first + len(cols)
    block = torch.arange(first >> 2, (last + 3) >> 2, dtype=torch.int64, device="cpu")
    block &= WORD >> 2
    counter = (block, row[:, None], head[:, None, None], batch[:, None, None, None])
    words = torch.stack(torch.broadcast_tensors(*philox4x32(key_words(seed), counter)), -1)
    return words.flatten(-2)[..., first & 3 :][..., : len(cols)] < keep_threshold(dropout_p)
