"""Where each sequence of a call lies in its storage, as plain integers.

Every storage is seen as a list of tokens: (B, S, ...) and pages (num_pages, page_size, ...) with
their first two dims flattened, packed (T, ...) as it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from heedful.core.base.numbers import FAR
from heedful.core.call.mask import MaskSpec
from heedful.core.call.operands import Operands
from heedful.core.call.problem import AttentionProblem


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence of the batch.

    batch: its index. q_token: its first query token. len_q, len_k: lengths used.
    mask: the call's, with the offset of this sequence's diagonal.
    origin: (batch, head, row, column) of its first score in the mask of dropout.
    k_spans: (first token, count) runs of its keys in storage, in order; count sums to len_k.
    """

    batch: int
    q_token: int
    len_q: int
    len_k: int
    mask: MaskSpec
    origin: tuple[int, int, int, int]
    k_spans: tuple[tuple[int, int], ...]

    @property
    def offset(self) -> int:
        """That of the diagonal, for the lengths in use."""
        return self.mask.offset(self.len_q, self.len_k)

    def spans(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The storage runs of keys [begin, end)."""
        spans, position = [], 0
        for token, count in self.k_spans:
            lo, hi = max(begin, position), min(end, position + count)
            if lo < hi:
                spans.append((token + lo - position, hi - lo))
            position += count
        return spans


def _ints(array: Any) -> list:
    return [] if array is None else array.tolist()


def sequences(problem: AttentionProblem, x: Operands) -> Iterator[Sequence]:
    """Each sequence of the batch in turn; lengths are those actually used, 0 for one below 0.

    Raises ValueError for block_table together with kv_batch_idx: a table is per sequence already.
    """
    if x.block_table is not None and x.kv_batch_idx is not None:
        raise ValueError("kv_batch_idx cannot be combined with block_table: reorder the table")
    cu_q, cu_k = _ints(x.cu_seqlens_q), _ints(x.cu_seqlens_k)
    used_q, used_k = _ints(x.seqused_q), _ints(x.seqused_k)
    offsets, origins = _ints(x.q_offsets), _ints(x.origins)
    rows, leftpad, table = _ints(x.kv_batch_idx), _ints(x.leftpad_k), _ints(x.block_table)
    for b in range(problem.batch):
        q_token, room_q = b * problem.seqlen_q, problem.seqlen_q
        if cu_q:
            q_token, room_q = cu_q[b], cu_q[b + 1] - cu_q[b]
        pad = leftpad[b] if leftpad else 0
        room_k = (cu_k[b + 1] - cu_k[b] if cu_k else _stored_keys(x)) - pad
        len_k = max(0, used_k[b] if used_k else room_k)
        if table:
            spans = _page_spans(table[b], x.k.shape[1], pad, len_k)
        elif cu_k:
            spans = ((cu_k[b] + pad, len_k),)
        else:
            spans = (((rows[b] if rows else b) * x.k.shape[1] + pad, len_k),)
        len_q = max(0, used_q[b]) if used_q else room_q
        mask = problem.mask
        if offsets:
            mask = replace(mask, shift=max(1 - FAR, min(offsets[b], FAR - 1)))
        batch, head, row, column = problem.dropout_origin
        origin = batch + b, head, row, column
        if problem.origins:
            batch, head, row, column = origins[b]
            origin = batch, head, row, column * problem.origins
        yield Sequence(b, q_token, len_q, len_k, mask, origin, spans)


def _stored_keys(x: Operands) -> int:
    """Keys a sequence's storage has room for, where no cu_seqlens_k says otherwise."""
    if x.block_table is not None:
        return x.block_table.shape[1] * x.k.shape[1]
    return x.k.shape[1]


def _page_spans(pages: list[int], page_size: int, begin: int, count: int):
    """Runs of storage that hold positions [begin, begin + count) of a paged sequence."""
    spans = []
    while count > 0:
        page, slot = divmod(begin, page_size)
        run = min(page_size - slot, count)
        spans.append((pages[page] * page_size + slot, run))
        begin, count = begin + run, count - run
    return tuple(spans)
