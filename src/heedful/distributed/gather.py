"""The strategy "gather": a rank gets the keys and values that its queries see, by groups of KV
heads, so that one group's kernel runs while the next group's rows arrive. Queries that see only
keys of this rank go first.

Every query meets all its keys in one call: nothing is merged, and a sink enters once. Gradients of
keys and values travel back, and are summed, in float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heedful.distributed import peers
from heedful.distributed.calls import attended, differentiated, placed
from heedful.distributed.cost import head_groups
from heedful.distributed.exchange import Exchange, copy, head_start, side_by_side
from heedful.distributed.plan import ContextPlan, OnDevice
from heedful.distributed.schedules import Call


@dataclass(frozen=True)
class Group:
    """KV heads, and the query heads that use them."""

    keys: slice
    queries: slice


def groups(
    q: Tensor, k: Tensor, v: Tensor, on: OnDevice, backward: bool, is_shared: bool
) -> tuple[list[Group], bool]:
    """KV heads in groups, one where nothing runs beside a transfer; and whether local calls hide
    the first one's. is_shared: to ask for a transfer takes the host little time."""
    heads = q.shape[1], k.shape[1]
    sizes, is_hidden = [heads[1]], True
    if q.device.type == "cuda":
        dims = k.shape[-1], v.shape[-1]
        # All ranks capture a step, or none does.
        replayed = is_shared or torch.cuda.is_current_stream_capturing()
        sizes, is_hidden = head_groups(on.schedule, heads, dims, k.itemsize, backward, replayed)
    each, begin, found = heads[0] // heads[1], 0, []
    for size in sizes:
        end = begin + size
        found.append(Group(slice(begin, end), slice(begin * each, end * each)))
        begin = end
    return found, is_hidden


class Keys:
    """k and v of one group of heads, on their way: a head's k and v lie side by side. shared: where
    other ranks read them, None if they are sent."""

    def __init__(
        self, k: Tensor, v: Tensor, group: Group, made: ContextPlan, on: OnDevice, shared: Any
    ):
        schedule = on.schedule
        self.group, self.shared, self._dims = group, shared, (k.shape[-1], v.shape[-1])
        count = group.keys.stop - group.keys.start
        shape = schedule.count, count, sum(self._dims)
        self.rows = k.new_empty(shape) if shared is None else shared.keys(made.rank, group.keys)
        for rows, place in schedule.own:
            own = [x[rows, group.keys] for x in (k, v)]
            side_by_side(own, self.rows[place])
        if shared is None:
            sent, received = (
                [[self.rows[run] for run in theirs] for theirs in parts]
                for parts in (schedule.sent, schedule.received)
            )
            self._exchange = Exchange(made.group, sent, received, schedule.rounds, self.rows)

    def pull(self) -> None:
        """Begins to copy rows of the other ranks, who have all written theirs."""
        self._exchange = self.shared.pull_keys(self.group.keys, self.rows)

    def wait(self) -> None:
        """The current stream waits for the rows."""
        self._exchange.wait()

    def of(self, call: Call) -> tuple[Tensor, Tensor]:
        """k and v of a call, views."""
        k, v = self.rows[call.keys].split(self._dims, -1)
        return k, v


class KeyGradients:
    """The gradients of the rows of a `Keys`, in float32."""

    def __init__(self, keys: Keys, made: ContextPlan, on: OnDevice):
        self._keys, self._made, self._on = keys, made, on
        self._sums: Tensor | None = None

    @property
    def sums(self) -> Tensor:
        if self._sums is None:
            self._sums = self._empty().zero_()
        return self._sums

    def _empty(self) -> Tensor:
        keys = self._keys
        if keys.shared is None:
            return torch.empty_like(keys.rows, dtype=torch.float32)
        return keys.shared.sums(self._made.rank, keys.group.keys)

    def add(self, rows: slice, dk: Tensor, dv: Tensor) -> None:
        """Adds what a call found. The first call's rows are often all."""
        part = dk.new_empty((*dk.shape[:-1], dk.shape[-1] + dv.shape[-1]))
        side_by_side([dk, dv], part)
        if self._sums is None and len(part) == len(self._keys.rows):
            self._sums = self._empty().copy_(part)
        else:
            self.sums[rows] += part

    def send(self) -> None:
        """Begins to send what belongs to others."""
        sums, schedule = self.sums, self._on.schedule
        self._parts = [
            [sums.new_empty((run.stop - run.start, *sums.shape[1:])) for run in theirs]
            for theirs in schedule.sent
        ]
        if self._keys.shared is not None:
            self._exchange = self._keys.shared.pull_sums(self._keys.group.keys, self._parts)
            return
        sent = [[sums[run] for run in theirs] for theirs in schedule.received]
        self._exchange = Exchange(self._made.group, sent, self._parts, schedule.rounds, sums)

    def finish(self, dk: Tensor, dv: Tensor) -> None:
        """Adds what others send, one rank after the other, to this rank's rows of dk and dv, which
        hold what local calls found."""
        self._exchange.wait()
        schedule, heads = self._on.schedule, self._keys.group.keys
        for runs, parts in zip(schedule.sent, self._parts, strict=True):
            for run, part in zip(runs, parts, strict=True):
                self.sums[run] += part
        local = [call.keys for call in schedule.calls if call.is_local]
        for rows, place in schedule.own:
            found = self.sums[place].split((dk.shape[-1], dv.shape[-1]), -1)
            for total, part in zip((dk[rows, heads], dv[rows, heads]), found, strict=True):
                for keys in local:
                    begin, end = max(keys.start, rows.start), min(keys.stop, rows.stop)
                    if begin < end:
                        both = slice(begin - rows.start, end - rows.start)
                        part[both] += total[both]
                total.copy_(part)


def _arguments(options: dict[str, Any], on: OnDevice, index: int, group: Group) -> dict[str, Any]:
    """The arguments of one call on one group of heads, but for tensors with rows."""
    call = on.schedule.calls[index]
    made = options | {"window_size": call.window}
    if len(call.lengths_q) > 1:
        made["cu_seqlens_q"], made["cu_seqlens_k"] = on.cu_q[index], on.cu_k[index]
        made["max_seqlen_q"], made["max_seqlen_k"] = max(call.lengths_q), max(call.lengths_k)
    for name in ("sink", "alibi_slopes"):
        if made.get(name) is not None:
            made[name] = made[name][group.queries]
    if made.get("dropout_p"):
        (piece,), (first,) = call.pieces, call.firsts
        made["dropout_origin"] = (piece.document, group.queries.start, piece.begin, first)
    if made.get("alibi_slopes") is not None and on.one_by_one:
        (piece,), (first,) = call.pieces, call.firsts
        made |= placed(call, piece.begin - first)
    return made


def _parts(
    q: Tensor, k: Tensor, v: Tensor, made: ContextPlan, on: OnDevice, backward: bool = False
) -> Iterator[tuple[Group, Keys | None, list[int]]]:
    """The parts of a step, one after the other: heads, their keys, which have arrived, or None if
    they are this rank's, and the calls, which may be none: others wait for gradients all the
    same."""
    calls = on.schedule.calls
    count = sum(call.is_local for call in calls)
    local = Group(slice(0, k.shape[1]), slice(0, q.shape[1])), None, list(range(count))
    keys, is_hidden = [], True
    if on.schedule.most_received:
        # All are asked for before the first kernel, whose work tiles take all SMs.
        shared = peers.shared_rows(made.peers, on.schedule, k, v)
        told, is_hidden = groups(q, k, v, on, backward, shared is not None)
        if shared is not None:
            shared.begin()
        keys = [Keys(k, v, group, made, on, shared) for group in told]
        if shared is not None:
            shared.ready()
            for found in keys:
                found.pull()
    remote = list(range(count, len(calls)))
    parts: list[tuple[Group, Keys | None, list[int]]]
    parts = [(found.group, found, remote) for found in keys]
    if count:
        parts.insert(0 if is_hidden else 1, local)
    for index, part in enumerate(parts):
        if part[1] is not None:
            part[1].wait()
        if keys and keys[0].shared is None and index < len(parts) - 1:
            # A kernel of this part and a transfer that is next may begin now.
            head_start(q.device)
        yield part


def forward(
    q: Tensor, k: Tensor, v: Tensor, made: ContextPlan, on: OnDevice, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's queries."""
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    lse = torch.empty((q.shape[1], len(q)), dtype=torch.float32, device=q.device)
    for group, keys, indices in _parts(q, k, v, made, on):
        for index in indices:
            call, heads = on.schedule.calls[index], group.queries
            given = q[call.rows, heads], *_keys_of(call, keys, k, v)
            more: dict[str, Any] = _arguments(options, on, index, group)
            found = attended(given, more, out[call.rows, heads])
            lse[heads, call.rows] = found
    return out, lse


def _keys_of(call: Call, keys: Keys | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return (k[call.keys], v[call.keys]) if keys is None else keys.of(call)


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
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dsinks: list[tuple[slice, Tensor]] = []
    sent: list[KeyGradients] = []
    for group, keys, indices in _parts(q, k, v, made, on, backward=True):
        sums = None if keys is None else KeyGradients(keys, made, on)
        queries = []
        for index in indices:
            call, heads = on.schedule.calls[index], group.queries
            more = _arguments(options, on, index, group)
            more["dlse"] = None if dlse is None else dlse[heads, call.rows]
            given = [x[call.rows, heads] for x in (dout, q)]
            given += [*_keys_of(call, keys, k, v), out[call.rows, heads], lse[heads, call.rows]]
            found = differentiated(given, more)
            queries.append((dq[call.rows, heads], found.dq))
            if sums is None:
                dk[call.keys], dv[call.keys] = found.dk, found.dv
            else:
                sums.add(call.keys, found.dk, found.dv)
            if found.dsink is not None:
                dsinks.append((heads, found.dsink))
        if sums is not None:
            sums.send()
        for into, rows in queries:
            copy(into, rows)
        if sums is not None:
            # The one before has arrived meanwhile.
            for earlier in sent:
                earlier.finish(dk, dv)
            sent = [sums]
    for last in sent:
        last.finish(dk, dv)
    return dq, dk, dv, _summed(dsinks, options.get("sink"))


def _summed(parts: list[tuple[slice, Tensor]], sink: Tensor | None) -> Tensor | None:
    if sink is None:
        return None
    total = torch.zeros_like(sink)
    for heads, part in parts:
        total[heads] += part
    return total
