"""The strategy "gather": a rank gets the keys and values that its queries see, by groups of KV
heads, so that one group's kernel runs while the next group's rows arrive. Queries that see only
keys of this rank go first.

Every query meets all its keys in one call: nothing is merged, and a sink enters once. Gradients of
keys and values travel back, and are summed, in float32.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from heedful.core.call.operands import Gradients
from heedful.distributed.cost import head_groups
from heedful.distributed.exchange import Exchange
from heedful.distributed.plan import ContextPlan, OnDevice
from heedful.distributed.schedules import Call
from heedful.torch import attention_backward, flash_attn_func, flash_attn_varlen_func


@dataclass(frozen=True)
class Group:
    """KV heads, and the query heads that use them."""

    keys: slice
    queries: slice


def groups(q: Tensor, k: Tensor, v: Tensor, on: OnDevice, backward: bool = False) -> list[Group]:
    """KV heads in groups; one where nothing runs beside a transfer."""
    heads = q.shape[1], k.shape[1]
    sizes = [heads[1]]
    if q.device.type == "cuda":
        dims = k.shape[-1], v.shape[-1]
        sizes = head_groups(on.schedule, heads, dims, k.itemsize, backward)
    each, begin, found = heads[0] // heads[1], 0, []
    for size in sizes:
        end = begin + size
        found.append(Group(slice(begin, end), slice(begin * each, end * each)))
        begin = end
    return found


class Lanes:
    """Two streams on which parts of a step take turns: the next part's work tiles fill the SMs that
    the last work tiles of a part leave idle. On a CPU there are none."""

    def __init__(self, device: torch.device):
        self._streams: list[torch.cuda.Stream] = []
        self._mark: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._streams = [torch.cuda.current_stream(device), _second_stream(device)]
            self._streams[1].wait_stream(self._streams[0])

    def turn(self, index: int) -> AbstractContextManager:
        """In it, work goes to the stream of this turn; turn 0 is that of the caller's stream."""
        return torch.cuda.stream(self._streams[index % 2]) if self._streams else nullcontext()

    def mark(self) -> None:
        """What the current stream has been given is what `after_mark` waits for."""
        self._mark = torch.cuda.current_stream().record_event() if self._streams else None

    def after_mark(self) -> None:
        """The current stream waits for what was marked."""
        if self._mark is not None:
            torch.cuda.current_stream().wait_event(self._mark)

    def join(self) -> None:
        """The caller's stream waits for the other, which waits for it: what either allocated may
        be freed."""
        if self._streams:
            self._streams[0].wait_stream(self._streams[1])
            self._streams[1].wait_stream(self._streams[0])


@lru_cache(maxsize=None)
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Keys:
    """k and v of one group of heads, on their way: a head's k and v lie side by side."""

    def __init__(self, k: Tensor, v: Tensor, group: Group, made: ContextPlan, on: OnDevice):
        schedule = on.schedule
        own = k[:, group.keys], v[:, group.keys]
        self.group, self._dims = group, (k.shape[-1], v.shape[-1])
        self.rows = k.new_empty((schedule.count, own[0].shape[1], sum(self._dims)))
        for rows, place in schedule.own:
            torch.cat([x[rows] for x in own], dim=-1, out=self.rows[place])
        sent, received = (
            [[self.rows[run] for run in theirs] for theirs in parts]
            for parts in (schedule.sent, schedule.received)
        )
        self._exchange = Exchange(made.group, sent, received, schedule.rounds, self.rows)

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
        self._is_empty = True
        self.sums = torch.empty_like(keys.rows, dtype=torch.float32)

    def add(self, rows: slice, dk: Tensor, dv: Tensor) -> None:
        """Adds what a call found. The first call's are often all rows'."""
        sums = self.sums[rows].split((dk.shape[-1], dv.shape[-1]), -1)
        if self._is_empty and len(dk) < len(self.sums):
            self.sums.zero_()
            self._is_empty = False
        for total, part in zip(sums, (dk, dv), strict=True):
            total.copy_(part) if self._is_empty else total.add_(part)
        self._is_empty = False

    def send(self) -> None:
        """Begins to send what belongs to others."""
        if self._is_empty:
            self.sums.zero_()
        schedule = self._on.schedule
        shape = self.sums.shape[1:]
        self._parts = [
            [self.sums.new_empty((run.stop - run.start, *shape)) for run in theirs]
            for theirs in schedule.sent
        ]
        sent = [[self.sums[run] for run in theirs] for theirs in schedule.received]
        self._exchange = Exchange(self._made.group, sent, self._parts, schedule.rounds, self.sums)

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
    return made


def _parts(
    q: Tensor, k: Tensor, v: Tensor, made: ContextPlan, on: OnDevice, backward: bool = False
) -> list[tuple[Group, Keys | None, list[int]]]:
    """What a step does one after the other: heads, their keys, which are on their way if they are
    not this rank's, and the calls."""
    calls = on.schedule.calls
    local = [index for index, call in enumerate(calls) if call.is_local]
    remote = list(range(len(local), len(calls)))
    keys = []
    if on.schedule.most_received:
        # All are asked for before the first kernel, whose work tiles take all SMs.
        keys = [Keys(k, v, group, made, on) for group in groups(q, k, v, on, backward)]
    whole = Group(slice(0, k.shape[1]), slice(0, q.shape[1]))
    first = [(whole, None, local)] if local else []
    return [*first, *((found.group, found, remote) for found in keys)]


def forward(
    q: Tensor, k: Tensor, v: Tensor, made: ContextPlan, on: OnDevice, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's queries."""
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    lse = torch.empty((q.shape[1], len(q)), dtype=torch.float32, device=q.device)
    parts = _parts(q, k, v, made, on)
    lanes = Lanes(q.device)
    for turn, (group, keys, indices) in enumerate(parts):
        with lanes.turn(turn):
            if keys is not None:
                keys.wait()
            for index in indices:
                call, heads = on.schedule.calls[index], group.queries
                given = q[call.rows, heads], *_keys_of(call, keys, k, v)
                more = _arguments(options, on, index, group) | {"return_lse": True}
                place = out[call.rows, heads]
                if len(call.lengths_q) > 1:
                    found = flash_attn_varlen_func(*given, **more, out=place)[1]
                else:
                    found = flash_attn_func(*(x[None] for x in given), **more, out=place[None])[1]
                lse[heads, call.rows] = found
    lanes.join()
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
    sums: dict[int, KeyGradients] = {}
    parts = _parts(q, k, v, made, on, backward=True)
    lanes = Lanes(q.device)

    def finish(turn: int) -> None:
        if turn in sums:
            lanes.after_mark()
            sums.pop(turn).finish(dk, dv)

    for turn, (group, keys, indices) in enumerate(parts):
        with lanes.turn(turn):
            finish(turn - 2)
            if keys is not None:
                keys.wait()
                sums[turn] = KeyGradients(keys, made, on)
            for index in indices:
                call, heads = on.schedule.calls[index], group.queries
                more = _arguments(options, on, index, group)
                more["dlse"] = None if dlse is None else dlse[heads, call.rows]
                given = [x[call.rows, heads] for x in (dout, q)]
                given += [*_keys_of(call, keys, k, v), out[call.rows, heads], lse[heads, call.rows]]
                found = _differentiated(given, more)
                dq[call.rows, heads] = found.dq
                if keys is None:
                    dk[call.keys], dv[call.keys] = found.dk, found.dv
                else:
                    sums[turn].add(call.keys, found.dk, found.dv)
                if found.dsink is not None:
                    dsinks.append((heads, found.dsink))
            if keys is None:
                lanes.mark()
            else:
                sums[turn].send()
    held = list(sums.values())
    for turn in range(len(parts)):
        with lanes.turn(turn):
            finish(turn)
    lanes.join()
    del held
    return dq, dk, dv, _summed(dsinks, options.get("sink"))


def _differentiated(given: list[Tensor], more: dict[str, Any]) -> Gradients:
    """`attention_backward` of rows that are one sequence, or packed ones."""
    if "cu_seqlens_q" in more:
        return attention_backward(*given, **more)
    if more["dlse"] is not None:
        more["dlse"] = more["dlse"][None]
    found = attention_backward(*(x[None] for x in given), **more)
    return found._replace(dq=found.dq[0], dk=found.dk[0], dv=found.dv[0])


def _summed(parts: list[tuple[slice, Tensor]], sink: Tensor | None) -> Tensor | None:
    if sink is None:
        return None
    total = torch.zeros_like(sink)
    for heads, part in parts:
        total[heads] += part
    return total
