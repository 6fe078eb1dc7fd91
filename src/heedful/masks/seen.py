"""How many tiles of scores a mask shows whole, in part and not at all: its values are read, on the
host. Dims: M rows of a tile, R runs of keys of a row, T tiles of keys, P tiles seen in part.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from heedful.core.call.mask import MaskSpec
from heedful.core.call.operands import Operands
from heedful.core.call.problem import AttentionProblem

# Arrays of a call that are read.
ARRAYS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "q_offsets")
ARRAYS += ("key_ranges", "block_rows", "block_bits")


class Seen(NamedTuple):
    """Tiles seen whole, in part, and not at all; seen pairs of a query and a key; and the scores of
    the tiles that are seen. All of all heads and sequences."""

    whole: int
    part: int
    hidden: int
    pairs: int
    scores: int


class _Sequence(NamedTuple):
    """A batch entry: its first packed query, lengths, and the diagonal's offset."""

    batch: int
    first: int
    len_q: int
    len_k: int
    offset: int


def seen_tiles(problem: AttentionProblem, x: Operands, tile: tuple[int, int]) -> Seen:
    """The tiles of a call by what its queries see. x: NumPy arrays for ARRAYS, with sizes of 1
    where batch entries or heads share them. tile: rows and keys, which divide a block mask's."""
    counts = np.zeros(5, np.int64)
    of_heads = [a.shape[1] for a in (x.key_ranges, x.block_rows) if a is not None and a.ndim == 4]
    heads = max([1, *of_heads])
    for seq in _sequences(problem, x):
        for head in range(heads):
            for first in range(0, seq.len_q, tile[0]):
                rows = np.arange(first, min(first + tile[0], seq.len_q))
                counts += _of_rows(problem.mask, x, seq, head, rows, tile[1])
    return Seen(*(int(n) for n in counts * (problem.heads_q // heads)))


def _sequences(problem: AttentionProblem, x: Operands) -> Iterator[_Sequence]:
    mask = problem.mask
    for b in range(problem.batch):
        first, len_q, len_k = 0, problem.seqlen_q, problem.seqlen_k
        if x.cu_seqlens_q is not None:
            first, end = x.cu_seqlens_q[b : b + 2]
            len_q = end - first
        if x.cu_seqlens_k is not None:
            len_k = x.cu_seqlens_k[b + 1] - x.cu_seqlens_k[b]
        if x.leftpad_k is not None:
            len_k = len_k - x.leftpad_k[b]
        if x.seqused_q is not None:
            len_q = min(len_q, x.seqused_q[b])
        if x.seqused_k is not None:
            len_k = min(len_k, x.seqused_k[b])
        len_q, len_k = max(0, int(len_q)), max(0, int(len_k))
        offset = (len_k - len_q if mask.bottom_right else 0) + mask.shift
        offset = offset if x.q_offsets is None else int(x.q_offsets[b])
        yield _Sequence(b, int(first), len_q, len_k, offset)


def _of_rows(mask: MaskSpec, x: Operands, seq: _Sequence, head: int, rows, width: int):
    """The numbers of `Seen` of the tiles of these rows of a sequence and a head."""
    begin_MR, end_MR = _runs(mask, x, seq, head, rows)
    keys_T = np.arange(0, seq.len_k, width)
    ends_T = np.minimum(keys_T + width, seq.len_k)
    shown = np.minimum(end_MR[..., None], ends_T) - np.maximum(begin_MR[..., None], keys_T)
    pairs_T = np.maximum(shown, 0).sum((0, 1))
    if x.block_rows is not None:
        pairs_T = _of_lists(x, seq, head, rows, keys_T, width, pairs_T, (begin_MR, end_MR))
    scores_T = len(rows) * (ends_T - keys_T)
    whole_T, hidden_T = pairs_T == scores_T, pairs_T == 0
    part_T = ~(whole_T | hidden_T)
    return np.array(
        [
            *(which.sum() for which in (whole_T, part_T, hidden_T)),
            *(pairs_T.sum(), scores_T[~hidden_T].sum()),
        ]
    )


def _runs(mask: MaskSpec, x: Operands, seq: _Sequence, head: int, rows):
    """(begins, ends), each (M, R), of the keys that rows see by positions and ranges: runs that do
    not overlap."""
    diagonal = rows + seq.offset
    stop = np.full(len(rows), seq.len_k)
    if mask.right >= 0:
        stop = np.clip(diagonal + mask.right + 1, 0, seq.len_k)
    start = np.zeros(len(rows), np.int64)
    if mask.left >= 0:
        start = np.maximum(diagonal - mask.left, 0)
    leading = np.minimum(np.minimum(mask.first, start), stop)
    begin, end = np.stack([0 * start, start], -1), np.stack([leading, stop], -1)
    if x.key_ranges is None:
        return begin, end
    if x.key_ranges.ndim == 2:
        ranges = x.key_ranges[seq.first + rows]
    else:
        batch, heads = x.key_ranges.shape[:2]
        ranges = x.key_ranges[min(seq.batch, batch - 1), min(head, heads - 1), rows]
    pairs = ranges.astype(np.int64).reshape(len(rows), -1, 2)
    # Empty ones last; a second one begins where the first has ended.
    empty = pairs[..., 0] >= pairs[..., 1]
    pairs = np.where(empty[..., None], seq.len_k, np.clip(pairs, 0, seq.len_k))
    pairs = np.take_along_axis(pairs, np.argsort(pairs[..., :1], 1, "stable"), 1)
    pairs[:, 1:, 0] = np.maximum(pairs[:, 1:, 0], pairs[:, :-1, 1])
    begin = np.maximum(begin[:, :, None], pairs[:, None, :, 0]).reshape(len(rows), -1)
    end = np.minimum(end[:, :, None], pairs[:, None, :, 1]).reshape(len(rows), -1)
    return begin, end


def _of_lists(x: Operands, seq: _Sequence, head: int, rows, keys_T, width: int, pairs_T, runs):
    """Seen pairs by tiles of keys, of which lists show some, and bits some pairs. pairs_T: by
    positions and ranges alone; runs: of `_runs`."""
    batch, heads = x.block_rows.shape[:2]
    side = x.block_bits.shape[1]
    row = x.block_rows[min(seq.batch, batch - 1), min(head, heads - 1), rows[0] // side]
    listed = row[2:].reshape(-1, 2)[: max(0, row[0] + row[1])]
    index = np.full(-(-seq.len_k // side), -2)
    listed = listed[(listed[:, 0] >= 0) & (listed[:, 0] < len(index))]
    index[listed[:, 0]] = listed[:, 1]
    index_T = index[keys_T // side]
    found_T = np.where(index_T == -1, pairs_T, 0)
    (part_P,) = np.nonzero((index_T >= 0) & (pairs_T > 0))
    if len(part_P):
        key_PN = keys_T[part_P, None] + np.arange(width)
        words = x.block_bits[
            index_T[part_P, None, None], rows[:, None] % side, key_PN[:, None] % side // 32
        ]
        seen = words >> (key_PN[:, None] % 32) & 1 != 0
        begin_MR, end_MR = (a[None, :, None] for a in runs)
        place = key_PN[:, None, :, None]
        seen &= ((begin_MR <= place) & (place < end_MR)).any(-1)
        found_T[part_P] = seen.sum((1, 2))
    return found_T
