"""A mask as the lengths of sequences: no array of queries x keys, and one tensor for all layers.

Transformers passes a mask of four dimensions unchanged, from `generate` through the model to each
layer. So a compact mask has four: (1 + causal, 2 + left, 16 * (n + 1), 1), for n sequences in the
tokens of the batch, one row of it after the other. Only the third dimension holds memory: the bytes
of cu_q, cu_k, used_q and used_k, the last two with a 0 at their end. The sizes of the first two say
what the lengths do not: whether the mask is causal, and its window.

A layer that knows nothing of this must not use it as a mask. So the bytes are called float8: torch
raises if they are added to scores of another dtype, or if scores are filled or chosen by them. The
last dimension is 1, so that a slice of keys leaves it whole.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from heedful.core.call.arguments import UNBOUNDED

_ATTRIBUTE = "_heedful_compact"
# No model computes masks in it.
_DTYPE = torch.float8_e4m3fn


class Compact(NamedTuple):
    """n sequences in the tokens of a batch.

    cu_q, cu_k: int32 (n + 1,), where their storage begins. used_q, used_k: int32 (n,), how many
    tokens of it they use. causal, left: as in `Pattern`.

    In eager mode a mask also knows:
    whole: each row of the batch is one sequence that uses all of it.
    seqused_k, leftpad_k: int32 (batch,), where each row of the batch is one sequence whose last
    tokens are the queries: how many keys it has, and where they begin; at 0 without leftpad_k.
    pieces_q, pieces_k: as cu_q and cu_k, of sequences that use all of their storage: tokens that
    count for nothing are sequences without keys, or without queries.
    """

    cu_q: Tensor
    cu_k: Tensor
    used_q: Tensor
    used_k: Tensor
    causal: bool
    left: int
    whole: bool = False
    seqused_k: Tensor | None = None
    leftpad_k: Tensor | None = None
    pieces_q: Tensor | None = None
    pieces_k: Tensor | None = None

    @property
    def window(self) -> tuple[int, int]:
        """As `window_size` of our calls."""
        if self.left < 0:
            return UNBOUNDED
        return self.left, 0 if self.causal else self.left

    def as_mask(self) -> Tensor:
        """The mask that transformers hands to the layers."""
        used = [torch.nn.functional.pad(x, (0, 1)) for x in (self.used_q, self.used_k)]
        rows = torch.cat([self.cu_q, self.cu_k, *used]).int()
        mask = _of_bytes(rows, self.causal, self.left)
        if not is_compiling():
            setattr(mask, _ATTRIBUTE, self)
        return mask


def _of_bytes(rows: Tensor, causal: bool, left: int) -> Tensor:
    return rows.view(_DTYPE).view(1, 1, -1, 1).expand(1 + causal, 2 + left, -1, 1)


def is_compact(mask: Tensor) -> bool:
    return mask.dtype == _DTYPE


def read(mask: Tensor, batch: int, q_length: int, k_length: int) -> Compact:
    """The sequences of a compact mask. Raises ValueError if it was cut on its way."""
    if not is_compiling():
        known = getattr(mask, _ATTRIBUTE, None)
        if known is not None:
            return known
    if mask.dim() != 4 or mask.shape[0] > 2 or mask.shape[1] < 1 or mask.shape[2] % 16:
        raise ValueError(f"a compact mask was changed on its way to a layer: {tuple(mask.shape)}")
    causal, left, rows = mask.shape[0] == 2, mask.shape[1] - 2, mask[0, 0, :, 0]
    compact = Compact(**_parts(rows.contiguous().view(torch.int32)), causal=causal, left=left)
    if not is_compiling():
        _check(compact, batch * q_length, batch * k_length)
        setattr(mask, _ATTRIBUTE, compact)
    return compact


def _parts(rows: Tensor) -> dict[str, Any]:
    cu_q, cu_k, used_q, used_k = rows.view(4, -1).unbind(0)
    return {"cu_q": cu_q, "cu_k": cu_k, "used_q": used_q[:-1], "used_k": used_k[:-1]}


def _check(compact: Compact, tokens_q: int, tokens_k: int) -> None:
    """Checks that the sequences cover all tokens. Waits for the device if the mask is not the
    tensor that was made, but a copy or a part of it."""
    ends = torch.stack(
        [compact.cu_q[0], compact.cu_k[0], compact.cu_q[-1], compact.cu_k[-1]]
    ).tolist()
    if ends != [0, 0, tokens_q, tokens_k]:
        raise ValueError(
            f"a compact mask was changed on its way to a layer: it is of {ends[2]} queries and "
            f"{ends[3]} keys, and the layer has {tokens_q} and {tokens_k}"
        )


def of_rows(begin: Tensor, stop: Tensor, first: Tensor, last: Tensor, lengths: tuple[int, int]):
    """cu_q, cu_k, used_q and used_k of one sequence in each row of a batch, whose rows are
    lengths = (queries, keys) long. Its queries are those from begin to stop, its keys those from
    first to last, all (batch,). A sequence without tokens comes first and takes what lies before
    the first row's."""
    rows = torch.arange(begin.shape[0] + 1, device=begin.device)
    pad = torch.nn.functional.pad
    cu = [
        pad(rows * length + pad(start, (0, 1)), (1, 0))
        for start, length in zip((begin, first), lengths, strict=True)
    ]
    used = [
        pad((end - start).clamp(min=0), (1, 0)) for start, end in ((begin, stop), (first, last))
    ]
    return {
        "cu_q": cu[0].int(),
        "cu_k": cu[1].int(),
        "used_q": used[0].int(),
        "used_k": used[1].int(),
    }


def known_mask(
    rows: tuple[list[int], ...], lengths: tuple[int, int], device, has_last: bool, **facts: Any
) -> Tensor:
    """The mask of one sequence in each row of a batch, whose numbers the host knows. rows: begin,
    stop, first, last, and lengths: as of `of_rows`. has_last: the queries are each row's last
    tokens. facts: causal, left and whole of a Compact."""
    begin, stop, first, last = rows
    batch = len(begin)
    cu_q, cu_k = (
        [0, *[row * length + offset for row, offset in enumerate(starts)], batch * length]
        for length, starts in zip(lengths, (begin, first), strict=True)
    )
    used_q, used_k = (
        [0, *[max(0, end - start) for start, end in zip(starts, ends, strict=True)]]
        for starts, ends in ((begin, stop), (first, last))
    )
    parts = {"cu_q": cu_q, "cu_k": cu_k, "used_q": used_q, "used_k": used_k}
    if has_last:
        parts["seqused_k"] = used_k[1:]
    if has_last and any(first):
        parts["leftpad_k"] = first
    if torch.is_grad_enabled():
        parts["pieces_q"], parts["pieces_k"] = _pieces(rows, lengths)
    values, places = [*cu_q, *cu_k, *used_q, 0, *used_k, 0], {}
    end = len(values)
    for name, part in parts.items():
        # Calls are known the fastest whose operands begin at multiples of 16 bytes.
        values += [0] * (-len(values) % 4)
        places[name] = slice(len(values), len(values) + len(part))
        values += part
    made = torch.tensor(values, dtype=torch.int32, device="cpu").to(device)
    mask = _of_bytes(made[:end], facts["causal"], facts["left"])
    compact = Compact(**{name: made[place] for name, place in places.items()}, **facts)
    setattr(mask, _ATTRIBUTE, compact)
    return mask


def _pieces(rows: tuple[list[int], ...], lengths: tuple[int, int]) -> tuple[list[int], list[int]]:
    """As of a Compact, from what `known_mask` is given."""
    cu_q, cu_k = [0], [0]
    queries, keys = lengths
    for begin, stop, first, last in zip(*rows, strict=True):
        sizes = (begin, 0), (0, first), (stop - begin, last - first), (queries - stop, 0)
        for of_q, of_k in (*sizes, (0, keys - last)):
            if of_q or of_k:
                cu_q.append(cu_q[-1] + of_q)
                cu_k.append(cu_k[-1] + of_k)
    return cu_q, cu_k


def dense(compact: Compact, batch: int, q_length: int, k_length: int) -> Tensor:
    """The mask as bool (batch, 1, q_length, k_length), for what only takes such."""
    row_q, at_q, own_q = _places(compact.cu_q, compact.used_q, batch, q_length)
    row_k, at_k, own_k = _places(compact.cu_k, compact.used_k, batch, k_length)
    shift = (compact.used_k - compact.used_q).long()
    diagonal = (at_q + shift[row_q])[:, :, None]
    key = at_k[:, None, :]
    sees = (row_q[:, :, None] == row_k[:, None, :]) & own_q[:, :, None] & own_k[:, None, :]
    if compact.causal:
        sees &= key <= diagonal
    left, right = compact.window
    if left >= 0:
        sees &= key >= diagonal - left
    if right >= 0:
        sees &= key <= diagonal + right
    return sees[:, None]


def _places(cu: Tensor, used: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each token (batch, length): its sequence, its place there, and whether it is used."""
    tokens = torch.arange(batch * length, device=cu.device)
    row = torch.bucketize(tokens, cu[1:].long(), right=True).clamp(max=used.shape[0] - 1)
    place = tokens - cu.long()[row]
    is_used = (place >= 0) & (place < used.long()[row])
    return row.view(batch, -1), place.view(batch, -1), is_used.view(batch, -1)
