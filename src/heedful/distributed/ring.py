"""The strategy "ring": a rank holds the keys of one other rank at a time, and those of the next are
on their way beside the kernels (Ring Attention, arXiv 2310.01889).

Parts of a query's attention are float32, and are merged into float32 sums, which are rounded once.
Gradients of parts, from out and lse of all keys, are summed in float32, in the order of steps. A
sink enters the part with a row's own keys.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from heedful.distributed.calls import attended, differentiated, from_first, placed
from heedful.distributed.exchange import Exchange, head_start, side_by_side
from heedful.distributed.grids import Side
from heedful.distributed.plan import ContextPlan, StepsOnDevice
from heedful.distributed.rings import Part, Step
from heedful.torch import merge_into

# A plan, or the ranks of a grid's column.
Ranks = ContextPlan | Side


def _exchange(
    made: Ranks, step: Step, sent: list[Tensor], into: list[Tensor], like: Tensor
) -> Exchange:
    """sent goes to the step's target, into comes from its source."""
    leaving: list[list[Tensor]] = [[] for _ in range(made.ranks)]
    coming = list(leaving)
    leaving[step.target], coming[step.source] = sent, into
    return Exchange(made.group, leaving, coming, step.rounds, like)


def _steps(
    k: Tensor, v: Tensor, made: Ranks, on: StepsOnDevice
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The index of each step, with its keys and values, which have arrived; those of the next are
    on their way."""
    dims, steps = (k.shape[-1], v.shape[-1]), on.steps
    mine = k.new_empty((len(k), k.shape[1], sum(dims)))
    if any(step.sent for step in steps):
        side_by_side([k, v], mine)
    coming = None
    for index in range(len(steps)):
        if coming is not None:
            coming[0].wait()
            (k, v), coming = coming[1].split(dims, -1), None
        if index + 1 < len(steps):
            after = steps[index + 1]
            rows = mine.new_empty((after.count, *mine.shape[1:]))
            runs = [mine[run] for run in after.sent], [rows[run] for run in after.received]
            coming = _exchange(made, after, *runs, mine), rows
            del rows, runs
            head_start(k.device)
        else:
            # All that others get of it is theirs.
            del mine
        yield index, k, v


def _calls(
    on: StepsOnDevice, index: int, options: dict[str, Any], most: int = 0
) -> Iterator[tuple[Part, dict[str, Any]]]:
    """The parts of a step, with the arguments of their calls but for tensors with rows. most: how
    many rows a merged part may have, if that is any number."""
    parts = (
        (run, cumulative)
        for part, cumulative in zip(on.steps[index].parts, on.cumulative[index], strict=True)
        for run in _in_runs(part, most)
    )
    for part, cumulative in parts:
        made: dict[str, Any] = options | {"window_size": part.window}
        head = made.pop("first_head", 0)
        if not part.is_own:
            made["sink"] = None
        if len(part.lengths_q) > 1:
            made["cu_seqlens_q"], made["cu_seqlens_k"] = cumulative
            made["max_seqlen_q"], made["max_seqlen_k"] = max(part.lengths_q), max(part.lengths_k)
        if made.get("dropout_p"):
            ((document, row, key),) = part.begins
            made["dropout_origin"] = document, head, row, key
        if made.get("alibi_slopes") is not None:
            ((_, row, key),) = part.begins
            made |= placed(part, row - key)
        if made.get("key_ranges") is not None:
            ((_, _, key),) = part.begins
            made["key_ranges"] = from_first(made["key_ranges"][part.rows], key)
        yield part, made


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    made: Ranks,
    on: StepsOnDevice,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's queries."""
    shape = *q.shape[:2], v.shape[-1]
    out = torch.empty(shape, dtype=torch.float32, device=q.device)
    lse = torch.empty((q.shape[1], len(q)), dtype=torch.float32, device=q.device)
    for index, keys, values in _steps(k, v, made, on):
        # Results beside the sums take no more memory than 16 bits of all rows.
        for part, more in _calls(on, index, options, most=-(-len(q) // 2)):
            given = q[part.rows], keys[part.keys], values[part.keys]
            if part.is_own:
                lse[:, part.rows] = attended(given, more, out[part.rows])
                continue
            found = torch.empty_like(out[part.rows])
            found_lse = attended(given, more, found)
            merge_into(out, lse, found, found_lse, begin=part.rows.start)
            # The next part's results take its memory.
            del found
    return out.to(q.dtype), lse


def _in_runs(part: Part, most: int) -> list[Part]:
    """A part as parts of at most `most` rows, if that is any number and all rows see the same
    keys."""
    if not most or part.is_own or part.window != (-1, -1) or len(part.lengths_q) > 1:
        return [part]
    ((document, row, key),), rows = part.begins, part.rows
    runs = [slice(a, min(a + most, rows.stop)) for a in range(rows.start, rows.stop, most)]
    return [
        replace(
            part,
            rows=run,
            lengths_q=(run.stop - run.start,),
            begins=((document, row + run.start - rows.start, key),),
        )
        for run in runs
    ]


class _Sums:
    """Gradients of rows, several side by side, in float32. Memory is taken when the first is added:
    beside kernels, which have sums of their own, there is less."""

    def __init__(self, like: Tensor, rows: int, dims: tuple[int, ...]):
        self._like, self._shape, self._dims = like, (rows, like.shape[1], sum(dims)), dims
        self._rows: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        if self._rows is None:
            self._rows = torch.zeros(self._shape, dtype=torch.float32, device=self._like.device)
        return self._rows

    def add(self, rows: slice, *grads: Tensor) -> None:
        for place, grad in zip(self.rows.split(self._dims, -1), grads, strict=True):
            place[rows] += grad

    def rounded(self) -> tuple[Tensor, ...]:
        return tuple(part.to(self._like.dtype) for part in self.rows.split(self._dims, -1))


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    saved: tuple[Tensor, ...],
    made: Ranks,
    on: StepsOnDevice,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv of this rank's rows, and this rank's part of dsink. saved: q, k, v, out, lse."""
    q, k, v, out, lse = saved
    dims, sink = (k.shape[-1], v.shape[-1]), options.get("sink")
    dsink = None if sink is None else torch.zeros_like(sink)
    queries, own = _Sums(q, len(q), q.shape[-1:]), _Sums(k, len(k), dims)
    sent: list[tuple[Exchange, Step, list[Tensor]]] = []
    for index, keys, values in _steps(k, v, made, on):
        step = on.steps[index]
        sums = _Sums(k, step.count, dims) if step.rounds else own
        for part, more in _calls(on, index, options, most=-(-len(q) // 2)):
            rows = part.rows
            more["dlse"] = None if dlse is None else dlse[:, rows]
            given = dout[rows], q[rows], keys[part.keys], values[part.keys]
            found = differentiated((*given, out[rows], lse[:, rows]), more)
            queries.add(rows, found.dq)
            sums.add(part.keys, found.dk, found.dv)
            if dsink is not None and found.dsink is not None:
                dsink += found.dsink
            # The next part's gradients take its memory.
            del found, given
        del keys, values
        while sent:
            _finish(own, *sent.pop())
        if step.rounds:
            sent.append(_returned(sums, made, step))
        del sums
    while sent:
        _finish(own, *sent.pop())
    (dq,), (dk, dv) = queries.rounded(), own.rounded()
    return dq, dk, dv, dsink


def _returned(sums: _Sums, made: Ranks, step: Step) -> tuple[Exchange, Step, list[Tensor]]:
    """Begins to send gradients to the rank whose rows they are of."""
    rows = sums.rows
    parts = [rows.new_empty((run.stop - run.start, *rows.shape[1:])) for run in step.sent]
    back = Step(step.target, step.source, 0, (), (), step.rounds, ())
    return _exchange(made, back, [rows[run] for run in step.received], parts, rows), step, parts


def _finish(own: _Sums, exchange: Exchange, step: Step, parts: list[Tensor]) -> None:
    """Adds what another rank found of this rank's rows."""
    exchange.wait()
    for run, part in zip(step.sent, parts, strict=True):
        own.rows[run] += part
