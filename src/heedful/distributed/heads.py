"""The strategy "heads": ranks exchange tokens for heads, so that each computes whole documents for
some heads (DeepSpeed-Ulysses, arXiv 2309.14509), and back. KV heads of which there are fewer than
ranks are replicated. And "heads x ring", in which ranks of a grid's row do so, and a ring computes
these heads."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from heedful.core.call.spread import spread_heads
from heedful.distributed import ring
from heedful.distributed.exchange import Exchange, copy, side_by_side
from heedful.distributed.grids import Grid
from heedful.distributed.plan import ContextPlan, StepsOnDevice
from heedful.torch import attention_backward, flash_attn_varlen_func

# [begin, end) of the heads of every rank.
Spans = list[tuple[int, int]]


def _spans(made: ring.Ranks, kind: str) -> Spans:
    """The heads of one kind, "queries" or "keys"."""
    return [getattr(heads, kind) for heads in spread_heads(*made.heads, made.ranks)]


def to_heads(parts: Sequence[tuple[Tensor, Spans]], made: ring.Ranks) -> list[Tensor]:
    """This rank's rows of all heads -> all rows of the batch, in order, of this rank's heads: views
    of one buffer, in which a row has the heads of one part after those of another."""

    def columns(rank: int) -> list[Tensor]:
        return [x[:, slice(*spans[rank])].flatten(1) for x, spans in parts]

    mine, places = columns(made.rank), made.places
    widths = [part.shape[1] for part in mine]
    every = mine[0].new_empty((made.total_tokens, sum(widths)))
    for rows, place in places[made.rank]:
        side_by_side([part[rows] for part in mine], every[place])
    sent: list[list[Tensor]] = [[] for _ in places]
    into: list[list[Tensor]] = [[] for _ in places]
    for rank, theirs in enumerate(places):
        if rank != made.rank:
            leaving = columns(rank)
            width = sum(part.shape[1] for part in leaving)
            packed = every.new_empty((made.tokens, width))
            side_by_side(leaving, packed)
            sent[rank] = [packed[rows].view(-1) for rows, _ in places[made.rank]]
            into[rank] = [every[place].view(-1) for _, place in theirs]
    Exchange(made.group, sent, into, made.rounds, every.view(-1)).wait()
    arrived = zip(every.split(widths, 1), parts, strict=True)
    return [part.unflatten(1, (-1, x.shape[-1])) for part, (x, _) in arrived]


# Some of this rank's rows, and of every rank what it has of these.
Run = tuple[slice, list[Tensor]]


def from_heads(every: Tensor, widths: Sequence[int], made: ring.Ranks) -> list[Run]:
    """All rows of the batch, of what this rank has for each -> this rank's rows, of which its own
    columns are views. every: contiguous (total_tokens, width); widths: of every rank."""
    places = made.places
    rows_of = [made.tokens * (rank != made.rank) for rank in range(made.ranks)]
    sizes = zip(rows_of, widths, strict=True)
    found = [every.new_empty((rows, width)) for rows, width in sizes]
    sent: list[list[Tensor]] = [[] for _ in places]
    into: list[list[Tensor]] = [[] for _ in places]
    for rank, theirs in enumerate(places):
        if rank != made.rank:
            sent[rank] = [every[place].view(-1) for _, place in theirs]
            into[rank] = [found[rank][rows].view(-1) for rows, _ in places[made.rank]]
    Exchange(made.group, sent, into, made.rounds, every.view(-1)).wait()
    return [
        (rows, [every[place] if r == made.rank else part[rows] for r, part in enumerate(found)])
        for rows, place in places[made.rank]
    ]


def _put_together(runs: Sequence[Run], spans: Spans, dim: int, like: Tensor, count: int) -> Tensor:
    """(count, heads, dim) in the dtype of `like`. Where several ranks have a head, their rows are
    added in float32."""
    whole = like.new_empty((count, spans[-1][1] * dim))
    for rows, parts in runs:
        if len(set(spans)) == len(spans):
            side_by_side(parts, whole[rows])
            continue
        sums: dict[tuple[int, int], Tensor] = {}
        for part, span in zip(parts, spans, strict=True):
            sums[span] = sums[span] + part if span in sums else part.float()
        whole[rows] = torch.cat(list(sums.values()), dim=1)
    return whole.unflatten(1, (-1, dim))


def _aligned(count: int, size: int) -> int:
    """So many elements, or more, that what follows lies at a multiple of 16 bytes."""
    return -(-count * size // 16) * 16 // size


class _Results:
    """out beside lse, as one buffer of rows: results travel together."""

    def __init__(self, like: Tensor, rows: int, heads: int, dim: int):
        size = like.itemsize
        begin = _aligned(heads * dim, size)
        self.width = begin + _aligned(heads * 4 // size, size)
        self._out, self._lse = slice(heads * dim), slice(begin, begin + heads * 4 // size)
        self.rows, self._dim = like.new_empty((rows, self.width)), dim

    def views(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """out (rows, heads, dim), and lse (rows, heads) in float32, of such rows."""
        out = rows[:, self._out].unflatten(1, (-1, self._dim))
        return out, rows[:, self._lse].view(torch.float32)


def _call(options: dict[str, Any], made: ContextPlan, device: torch.device) -> dict[str, Any]:
    cu_seqlens, longest = made.whole(device)
    call = _of_heads(options, made) | {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }
    begin = call.pop("first_head")
    if call.get("dropout_p"):
        call["dropout_origin"] = (0, begin, 0, 0)
    return call


# out and lse of this rank's heads: attend(q, k, v, out), which writes out and returns lse.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# dout, dlse, q, k, v, out, lse, where gradients of q, k and v are written -> that of this rank's
# heads of the sink.
Differentiate = Callable[..., Tensor | None]


def forward(
    q: Tensor, k: Tensor, v: Tensor, made: ContextPlan, options: dict[str, Any]
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """out and lse of this rank's queries, and what `backward` wants: q, k, v, out and lse of this
    rank's heads."""
    call = _call(options, made, q.device)

    def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, **call, out=out, return_lse=True)[1]

    return _exchanged(q, k, v, made, attend)


def _exchanged(
    q: Tensor, k: Tensor, v: Tensor, made: ring.Ranks, attend: Attend
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    queries, keys = _spans(made, "queries"), _spans(made, "keys")
    mine = q_mine, k_mine, v_mine = to_heads([(q, queries), (k, keys), (v, keys)], made)
    dim = v.shape[-1]
    results = [
        _Results(q, made.total_tokens * (r == made.rank), end - begin, dim)
        for r, (begin, end) in enumerate(queries)
    ]
    here = results[made.rank]
    out, columns = here.views(here.rows)
    lse = attend(q_mine, k_mine, v_mine, out)
    columns.copy_(lse.T)
    widths = [result.width for result in results]
    outs, every_lse = [], lse.new_empty((queries[-1][1], made.tokens))
    for rows, parts in from_heads(here.rows, widths, made):
        views = [result.views(part) for result, part in zip(results, parts, strict=True)]
        outs.append((rows, [part.flatten(1) for part, _ in views]))
        torch.cat([part.T for _, part in views], dim=0, out=every_lse[:, rows])
    whole = _put_together(outs, queries, dim, q, made.tokens)
    return whole, every_lse, (*mine, out, lse)


def kept(rows: tuple[Tensor, ...], made: ring.Ranks) -> tuple[Tensor, ...]:
    """The tensors that `backward` wants, from q, k, v, out and lse of this rank's rows, which are
    sent again."""
    q, k, v, out, lse = rows
    queries, keys = _spans(made, "queries"), _spans(made, "keys")
    mine = to_heads([(q, queries), (k, keys), (v, keys), (out, queries)], made)
    (columns,) = to_heads([(lse.T[..., None].contiguous(), queries)], made)
    return *mine, columns[..., 0].T.contiguous()


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    saved: tuple[Tensor, ...],
    made: ContextPlan,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv of this rank's rows, and the part of dsink that is this rank's heads'."""
    call = _call(options, made, dout.device)

    def differentiate(dout: Tensor, dlse: Tensor | None, rows: Any, into: Any) -> Any:
        return attention_backward(dout, *rows, dlse=dlse, **call, into=into).dsink

    return _returned(dout, dlse, saved, made, options, differentiate)


def _returned(
    dout: Tensor,
    dlse: Tensor | None,
    saved: tuple[Tensor, ...],
    made: ring.Ranks,
    options: dict[str, Any],
    differentiate: Differentiate,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    queries, keys = _spans(made, "queries"), _spans(made, "keys")
    if dlse is not None:
        (columns,) = to_heads([(dlse.T[..., None].contiguous(), queries)], made)
        dlse = columns[..., 0].T
    (dout,) = to_heads([(dout, queries)], made)
    kinds = [*zip(saved[:3], (queries, keys, keys), strict=True)]
    # By rank the columns of each gradient, which travel together.
    sizes = [
        [(b - a) * x.shape[-1] for (x, _), (a, b) in zip(kinds, spans, strict=True)]
        for spans in zip(queries, keys, keys, strict=True)
    ]
    packed = dout.new_empty((made.total_tokens, sum(sizes[made.rank])))
    columns = zip(packed.split(sizes[made.rank], 1), kinds, strict=True)
    into = [part.unflatten(1, (-1, x.shape[-1])) for part, (x, _) in columns]
    of_sink = differentiate(dout, dlse, saved, into)
    del dout
    dsink = None
    if options.get("sink") is not None:
        dsink = torch.zeros_like(options["sink"])
        assert of_sink is not None
        dsink[slice(*queries[made.rank])] = of_sink
    split: list[list[Run]] = [[], [], []]
    for rows, parts in from_heads(packed, [*map(sum, sizes)], made):
        each = [part.split(size, 1) for part, size in zip(parts, sizes, strict=True)]
        for kind, runs in enumerate(split):
            runs.append((rows, [part[kind] for part in each]))
    dq, dk, dv = (
        _put_together(runs, spans, x.shape[-1], x, made.tokens)
        for runs, (x, spans) in zip(split, kinds, strict=True)
    )
    return dq, dk, dv, dsink


class InGrid:
    """The strategy "heads x ring", as `heads` and `ring` are modules."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, made: Grid, on: StepsOnDevice, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """As of this module."""
        own = _of_heads(options, made.row)

        def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
            found, lse = ring.forward(q, k, v, made.column, on, own)
            out.copy_(found)
            return lse

        return _exchanged(q, k, v, made.row, attend)

    @staticmethod
    def backward(
        dout: Tensor,
        dlse: Tensor | None,
        saved: tuple[Tensor, ...],
        made: Grid,
        on: StepsOnDevice,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """As of this module."""
        own = _of_heads(options, made.row)

        def differentiate(dout, dlse, rows, into):
            *grads, dsink = ring.backward(dout, dlse, rows, made.column, on, own)
            for place, grad in zip(into, grads, strict=True):
                copy(place, grad)
            return dsink

        return _returned(dout, dlse, saved, made.row, options, differentiate)


def _of_heads(options: dict[str, Any], made: ring.Ranks) -> dict[str, Any]:
    """The options of calls of this rank's heads. A collective with key_ranges, which are then those
    of all rows."""
    begin, end = _spans(made, "queries")[made.rank]
    found: dict[str, Any] = options | {"first_head": begin}
    if found.get("key_ranges") is not None:
        (ranges,) = to_heads([(found["key_ranges"][:, None], [(0, 1)] * made.ranks)], made)
        found["key_ranges"] = ranges[:, 0].contiguous()
    for name in ("sink", "alibi_slopes"):
        if found.get(name) is not None:
            found[name] = found[name][begin:end]
    return found
