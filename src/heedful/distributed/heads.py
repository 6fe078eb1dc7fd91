"""The strategy "heads": ranks exchange tokens for heads, so that each computes whole documents for
some heads (DeepSpeed-Ulysses, arXiv 2309.14509), and back. KV heads of which there are fewer than
ranks are replicated."""

from typing import Any

import torch
from torch import Tensor

from heedful.distributed.exchange import copy, swap, taken
from heedful.distributed.plan import ContextPlan
from heedful.distributed.schedules import spread_heads
from heedful.torch import attention_backward, flash_attn_varlen_func


def _spans(made: ContextPlan, kind: str) -> list[tuple[int, int]]:
    """The heads of every rank: "queries" or "keys"."""
    return [getattr(heads, kind) for heads in spread_heads(*made.heads, made.ranks)]


def to_heads(rows: Tensor, made: ContextPlan, spans: list[tuple[int, int]]) -> Tensor:
    """This rank's rows of all heads -> all rows of the batch, in order, of this rank's heads."""
    counts = [len(rows) * (end - begin) * rows.shape[-1] for begin, end in spans]
    sent = rows.new_empty(sum(counts))
    for (begin, end), part in zip(spans, sent.split(counts), strict=True):
        copy(part.view(len(rows), end - begin, rows.shape[-1]), rows[:, begin:end])
    begin, end = spans[made.rank]
    width = (end - begin) * rows.shape[-1]
    received = [made.layout.tokens(rank) * width for rank in range(made.ranks)]
    got = swap(made.group, sent, counts, received).wait()
    every = got.view(made.total_tokens, end - begin, rows.shape[-1])
    return taken(every, made.order(rows.device))


def from_heads(every: Tensor, made: ContextPlan, spans: list[tuple[int, int]]) -> Tensor:
    """The reverse of `to_heads`. Where several ranks have a head, their rows are added in
    float32."""
    dim, (begin, end) = every.shape[-1], spans[made.rank]
    ordered = taken(every, made.rank_order(every.device))
    counts = [made.layout.tokens(rank) * (end - begin) * dim for rank in range(made.ranks)]
    received = [made.tokens * (b - a) * dim for a, b in spans]
    got = swap(made.group, ordered.reshape(-1), counts, received).wait().split(received)
    parts = [part.view(made.tokens, b - a, dim) for part, (a, b) in zip(got, spans, strict=True)]
    if len(set(spans)) == len(spans):
        found = every.new_empty((made.tokens, spans[-1][1], dim))
        for part, (a, b) in zip(parts, spans, strict=True):
            copy(found[:, a:b], part)
        return found
    sums: dict[tuple[int, int], Tensor] = {}
    for part, span in zip(parts, spans, strict=True):
        sums[span] = sums[span] + part if span in sums else part.float()
    return torch.cat(list(sums.values()), dim=1).to(every.dtype)


def _call(options: dict[str, Any], made: ContextPlan, device: torch.device) -> dict[str, Any]:
    begin, end = _spans(made, "queries")[made.rank]
    cu_seqlens, longest = made.whole(device)
    call = options | {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }
    for name in ("sink", "alibi_slopes"):
        if call.get(name) is not None:
            call[name] = call[name][begin:end]
    if call.get("dropout_p"):
        call["dropout_origin"] = (0, begin, 0, 0)
    return call


def forward(
    q: Tensor, k: Tensor, v: Tensor, made: ContextPlan, options: dict[str, Any]
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """out and lse of this rank's queries, and what `backward` wants: q, k, v, out and lse of this
    rank's heads."""
    queries, keys = _spans(made, "queries"), _spans(made, "keys")
    mine = to_heads(q, made, queries), to_heads(k, made, keys), to_heads(v, made, keys)
    out, lse = flash_attn_varlen_func(*mine, **_call(options, made, q.device), return_lse=True)
    columns = from_heads(lse.T[..., None].contiguous(), made, queries)
    return from_heads(out, made, queries), columns[..., 0].T, (*mine, out, lse)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    saved: tuple[Tensor, ...],
    made: ContextPlan,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv of this rank's rows, and the part of dsink that is this rank's heads'."""
    q, k, v, out, lse = saved
    queries, keys = _spans(made, "queries"), _spans(made, "keys")
    if dlse is not None:
        dlse = to_heads(dlse.T[..., None].contiguous(), made, queries)[..., 0].T
    call = _call(options, made, q.device)
    dout = to_heads(dout, made, queries)
    found = attention_backward(dout, q, k, v, out, lse, dlse=dlse, **call)
    dsink = None
    if options.get("sink") is not None:
        dsink = torch.zeros_like(options["sink"])
        dsink[slice(*queries[made.rank])] = found.dsink
    return (
        from_heads(found.dq, made, queries),
        from_heads(found.dk, made, keys),
        from_heads(found.dv, made, keys),
        dsink,
    )
