"""The strategy "gather": a rank gets the keys and values that its queries see, by groups of KV
heads, so that one group's kernel runs while the next group's rows arrive.

Every query meets all its keys in one call: nothing is merged, and a sink enters once. Gradients of
keys and values travel back, and are summed, in float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heedful.distributed.exchange import swap
from heedful.distributed.plan import ContextPlan, OnDevice
from heedful.torch import attention_backward, flash_attn_varlen_func

# Most groups of KV heads on a GPU, and the fewest bytes that one of them receives: more groups hide
# more of the transfers, and take the host longer to launch.
GROUPS, GROUP_BYTES = 4, 32 << 20


@dataclass(frozen=True)
class Group:
    """KV heads, and the query heads that use them."""

    keys: slice
    queries: slice


def groups(q: Tensor, k: Tensor, v: Tensor, on: OnDevice) -> list[Group]:
    """KV heads in groups of equal size; one where nothing runs beside a transfer."""
    heads_q, heads_k = q.shape[1], k.shape[1]
    head_bytes = on.schedule.most_received * (k.shape[-1] + v.shape[-1]) * k.itemsize
    most = min(GROUPS, heads_k, heads_k * head_bytes // GROUP_BYTES)
    wanted = most if q.device.type == "cuda" else 1
    count = max(n for n in range(1, max(1, wanted) + 1) if heads_k % n == 0)
    size, each = heads_k // count, heads_q // heads_k
    spans = [(n * size, (n + 1) * size) for n in range(count)]
    return [Group(slice(a, b), slice(a * each, b * each)) for a, b in spans]


class Keys:
    """k and v of one group of heads: this rank's rows, then those of others, on their way."""

    def __init__(self, k: Tensor, v: Tensor, group: Group, made: ContextPlan, on: OnDevice):
        self._dims = k.shape[-1], v.shape[-1]
        own, received = [k[:, group.keys], v[:, group.keys]], on.schedule.received
        shape = len(k) + sum(received), own[0].shape[1], sum(self._dims)
        self.rows = k.new_empty(shape)
        torch.cat(own, dim=-1, out=self.rows[: len(k)])
        self._transfer = None
        if on.schedule.most_received:
            sent = self.rows.index_select(0, on.sent_rows)
            counts = [len(rows) for rows in on.sent]
            self._transfer = swap(made.group, sent, counts, received, self.rows[len(k) :])

    def of(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """k and v of a call: views of memory that holds a head's k and v side by side."""
        if self._transfer is not None:
            self._transfer.wait()
        k, v = self.rows.index_select(0, keys).split(self._dims, -1)
        return k, v


class KeyGradients:
    """The gradients of the rows of a `Keys`, in float32."""

    def __init__(self, like: Tensor, dims: tuple[int, int], own: int):
        self._sums = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
        self._dims, self._own = dims, own

    def add(self, keys: Tensor, dk: Tensor, dv: Tensor) -> None:
        # A key is a row of at most two sequences of a call, so the order of additions shows in no
        # bit.
        self._sums.index_add_(0, keys, torch.cat([dk, dv], dim=-1).float())

    def send(self, made: ContextPlan, on: OnDevice) -> None:
        """Begins to send what belongs to others."""
        if not on.schedule.most_received:
            return
        counts = [len(rows) for rows in on.sent]
        foreign = self._sums[self._own :]
        self._transfer = swap(made.group, foreign, on.schedule.received, counts)

    def total(self, on: OnDevice) -> tuple[Tensor, Tensor]:
        """The gradients of this rank's own rows: added one rank after the other, in one order."""
        own = self._sums[: self._own]
        if on.schedule.most_received:
            parts = self._transfer.wait().split([len(rows) for rows in on.sent])
            for rows, part in zip(on.sent, parts, strict=True):
                own.index_add_(0, rows, part)
        dk, dv = own.split(self._dims, -1)
        return dk, dv


def _ahead(
    q: Tensor, k: Tensor, v: Tensor, made: ContextPlan, on: OnDevice
) -> Iterator[tuple[Group, Keys]]:
    """Groups and their keys; the next group's are on their way before one's are asked for."""
    waiting: list[tuple[Group, Keys]] = []
    for group in groups(q, k, v, on):
        waiting.append((group, Keys(k, v, group, made, on)))
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def _call(options: dict[str, Any], on: OnDevice, index: int, group: Group) -> dict[str, Any]:
    """The arguments of one call on one group of heads, but for tensors with rows."""
    call = on.schedule.calls[index]
    made = options | {
        "cu_seqlens_q": on.cu_q[index],
        "cu_seqlens_k": on.cu_k[index],
        "max_seqlen_q": max(call.lengths_q),
        "max_seqlen_k": max(call.lengths_k),
        "window_size": call.window,
    }
    for name in ("sink", "alibi_slopes"):
        if made.get(name) is not None:
            made[name] = made[name][group.queries]
    if made.get("dropout_p"):
        (piece,), (first,) = call.pieces, call.firsts
        made["dropout_origin"] = (piece.document, group.queries.start, piece.begin, first)
    return made


def forward(
    q: Tensor, k: Tensor, v: Tensor, made: ContextPlan, on: OnDevice, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's queries."""
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    lse = torch.empty((q.shape[1], len(q)), dtype=torch.float32, device=q.device)
    for group, keys in _ahead(q, k, v, made, on):
        for index, call in enumerate(on.schedule.calls):
            _, lse[group.queries, call.rows] = flash_attn_varlen_func(
                q[call.rows, group.queries],
                *keys.of(on.keys[index]),
                **_call(options, on, index, group),
                return_lse=True,
                out=out[call.rows, group.queries],
            )
    return out, lse


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    saved: tuple[Tensor, ...],
    made: ContextPlan,
    on: OnDevice,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv of this rank's rows, and this rank's part of dsink. saved: q, k, v, out, lse."""
    q, k, v, out, lse = saved
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    sink = options.get("sink")
    dsink = None if sink is None else torch.zeros_like(sink)
    sums: list[tuple[Group, KeyGradients]] = []
    for group, keys in _ahead(q, k, v, made, on):
        gradients = KeyGradients(keys.rows, (k.shape[-1], v.shape[-1]), len(k))
        for index, call in enumerate(on.schedule.calls):
            rows, heads = call.rows, group.queries
            found = attention_backward(
                dout[rows, heads],
                q[rows, heads],
                *keys.of(on.keys[index]),
                out[rows, heads],
                lse[heads, rows],
                dlse=None if dlse is None else dlse[heads, rows],
                **_call(options, on, index, group),
            )
            dq[rows, heads] = found.dq
            gradients.add(on.keys[index], found.dk, found.dv)
            if dsink is not None:
                dsink[heads] += found.dsink
        gradients.send(made, on)
        sums.append((group, gradients))
    for group, gradients in sums:
        dk[:, group.keys], dv[:, group.keys] = gradients.total(on)
    return dq, dk, dv, dsink
