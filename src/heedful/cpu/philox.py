"""The dropout mask of one tile in torch, bit for bit that of `reference.philox`."""

import torch

from heedful.reference.philox import MULTIPLIERS, ROUNDS, WEYL, WORD, keep_threshold, key_words

# Words that are made at a time: the six tensors of a round stay in the inner caches. One core of an
# AMD EPYC, torch 2.13, 22 November 2026: 4 ns a score, 9 to 16 with four times as many.
CHUNK = 64 * 1024


def philox4x32(key: tuple[int, int], counter: tuple) -> tuple[torch.Tensor, ...]:
    """Ten rounds on int64 tensors that hold 32-bit words; the four broadcast together. The second
    and the fourth of the words that come out have other bits above 32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    whole = torch.broadcast_shapes(*(word.shape for word in counter))
    spare: list[torch.Tensor] = []
    for _ in range(ROUNDS):
        # The product wraps in int64, which leaves its 64 bits right, and >> copies the sign: what
        # is above a word is cut off once, before the next product needs the word alone.
        if all(word.shape == whole for word in (c0, c1, c2, c3)):
            # All four were made here: from now on their memory goes round.
            spare = spare or [torch.empty_like(c0), torch.empty_like(c2)]
            wide0 = torch.mul(c0, MULTIPLIERS[0], out=spare[0])
            wide1 = torch.mul(c2, MULTIPLIERS[1], out=spare[1])
            spare = [c1, c3]
            c0 = torch.bitwise_right_shift(wide1, 32, out=c0).bitwise_xor_(c1)
            c2 = torch.bitwise_right_shift(wide0, 32, out=c2).bitwise_xor_(c3)
        else:
            wide0, wide1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
            c0, c2 = (wide1 >> 32) ^ c1, (wide0 >> 32) ^ c3
        c0.bitwise_xor_(k0).bitwise_and_(WORD)
        c2.bitwise_xor_(k1).bitwise_and_(WORD)
        c1, c3 = wide1, wide0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


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
    key, threshold = key_words(seed), keep_threshold(dropout_p)
    shape = (len(batch), len(head), len(row), len(block), 4)
    keep = torch.empty(shape, dtype=torch.bool, device="cpu")
    a_row = len(batch) * len(head) * len(block)
    step = max(1, CHUNK // max(1, a_row))
    for begin in range(0, len(row), step):
        part = row[begin : begin + step, None]
        counter = (block, part, head[:, None, None], batch[:, None, None, None])
        for place, word in enumerate(philox4x32(key, counter)):
            word = word & WORD if place % 2 else word
            torch.lt(word, threshold, out=keep[:, :, begin : begin + step, :, place])
    return keep.flatten(-2)[..., first & 3 :][..., : len(cols)]
