"""Calls on rows that are one sequence, or packed ones: more than one has cu_seqlens. Streams on
which the calls of a step run in turn. And forwards of "gather" that come again: what a step asks of
the driver, in the order of `gather.Step.parts`, without what decides on it. The host of a step that
ranks begin together is cold, and takes five times as long for the same code.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, are_deterministic_algorithms_enabled, is_grad_enabled

from heedful.core.base import settings
from heedful.core.call.arguments import Options
from heedful.core.call.numerics import is_invariant, margin_of, with_numerics
from heedful.core.call.operands import Gradients, Operands
from heedful.distributed import cost
from heedful.torch import attention_backward, flash_attn_func, flash_attn_varlen_func
from heedful.torch.base.dispatch import any_autocast, is_bare, needs_dispatcher
from heedful.torch.eager.execute import current_device, raw_stream
from heedful.torch.eager.over_ranks import bound, copier
from heedful.torch.operands.plain import plain_window


def placed(part: Any, offset: int) -> dict[str, Any]:
    """The window and `q_offset` of a call of one sequence, so that ALiBi's distances are those of
    the whole. part: a `Call` or `Part`, whose window has the last query on the last key."""
    (queries,), (keys,), (left, right) = part.lengths_q, part.lengths_k, part.window
    extra = keys - queries - offset
    bounds = left if left < 0 else left - extra, right if right < 0 else right + extra
    return {"window_size": bounds, "q_offset": offset}


def from_first(key_ranges: Tensor, first: int | Tensor) -> Tensor:
    """Ranges of keys, counted from a key on: of all rows, or int32 (rows, 1)."""
    return (key_ranges.clamp(min=0) - first).clamp_(min=0)


def attended(given: Sequence[Tensor], more: dict[str, Any], out: Tensor) -> Tensor:
    """Writes the attention of q, k and v, which are packed rows, to `out`; returns lse. Rows of one
    sequence may have a first dim of 1."""
    if "cu_seqlens_q" in more:
        packed: Any = given
        return flash_attn_varlen_func(*packed, **more, out=out, return_lse=True)[1]
    more = _dense_options(more)
    return flash_attn_func(*_dense(given), **more, out=_dense([out])[0], return_lse=True)[1][0]


def _dense_options(more: dict[str, Any]) -> dict[str, Any]:
    """The options of a call of one sequence."""
    ranges = more.get("key_ranges")
    return more if ranges is None else more | {"key_ranges": ranges[None, None]}


def leaves(backend: str | None) -> int:
    """How many SMs a call by this backend may leave to kernels of a step that run beside it."""
    if hasattr(backend, "options") or is_invariant(backend):
        return 0
    return margin_of(backend) or cost.LEFT


def with_margin(backend: str | None, left: int) -> str | None:
    """The backend of a call that leaves SMs to others."""
    return backend if margin_of(backend) else with_numerics(backend, None, left)


class _Epoch:
    """A number that changes with the settings, on which bound calls depend."""

    def __init__(self):
        self.number = 0

    def clear(self) -> None:
        self.number += 1


EPOCH = settings.forgotten(_Epoch())


def lies(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
    """All that bound calls on rows of q, k and v depend on; None where calls are not bound: under
    autocast, a transform or a tracer, with operands beside q, k and v, and in memory of odd
    addresses."""
    places = q.data_ptr() | k.data_ptr() | v.data_ptr()
    more = options["sink"] is options["alibi_slopes"] is options["key_ranges"] is None
    more = more and not options["dropout_p"]
    if not more or places & 15 or any_autocast() or needs_dispatcher(q, k, v):
        return None
    if not (is_bare(q) and is_bare(k) and is_bare(v)):
        return None
    strict = options["deterministic"] or are_deterministic_algorithms_enabled()
    told = options["softmax_scale"], options["softcap"], strict, options["backend"]
    strides = q.stride(), k.stride(), v.stride()
    return EPOCH.number, is_grad_enabled(), q.dtype, q.shape, k.shape, v.shape, strides, told


class Bound:
    """`attended` on rows that lie as others did, from addresses: in a third of the host's time."""

    __slots__ = ("_dense", "_offsets", "_rest", "_run")

    def __init__(self, run: Any, offsets: Sequence[int], rest: Sequence[int], is_dense: bool):
        """offsets: of the call's q, k, v and out from where those of `__call__` begin. rest:
        addresses of operands between v and out. is_dense: of one sequence."""
        self._run, self._offsets, self._rest = run, tuple(offsets), rest
        self._dense = is_dense

    @classmethod
    def of(
        cls, given: Sequence[Tensor], more: dict[str, Any], out: Tensor, bases: Sequence[int]
    ) -> "Bound | None":
        """The arguments are those of `attended`, which ran with them; None if the call cannot be
        bound. bases: where q, k, v and out of all rows begin; 0 for memory that lasts."""
        packed = "cu_seqlens_q" in more
        options = Options(
            kind="varlen" if packed else "dense",
            max_seqlen_q=more.get("max_seqlen_q"),
            max_seqlen_k=more.get("max_seqlen_k"),
            dropout_p=more["dropout_p"],
            softmax_scale=more["softmax_scale"],
            window_size=plain_window(more["window_size"]),
            softcap=more["softcap"],
            deterministic=more["deterministic"] or are_deterministic_algorithms_enabled(),
            return_lse=True,
            backend=more["backend"],
        )
        (q, k, v), into, x = given, out, None
        cumulative = [more[name] for name in ("cu_seqlens_q", "cu_seqlens_k") if packed]
        if packed:
            x = Operands(q, k, v, cu_seqlens_q=cumulative[0], cu_seqlens_k=cumulative[1])
        else:
            q, k, v, into = _dense((q, k, v, out))
        found = bound(q, k, v, x, options, into)
        if found is None:
            return None
        run, pick = found
        addresses = [each.data_ptr() for each in (*given, out)]
        offsets = [a - base for a, base in zip(addresses, bases, strict=True)]
        names = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cumulative, strict=False))
        placed = Operands(*addresses[:3], **{name: x.data_ptr() for name, x in names.items()})
        return cls(run, offsets, [*pick(placed)][3:], not packed)

    def __call__(self, q: int, k: int, v: int, out: int) -> Tensor:
        """lse. q, k, v, out: where those of all rows begin."""
        a, b, c, d = self._offsets
        lse = self._run([q + a, k + b, v + c, *self._rest, out + d])[0]
        return lse[0] if self._dense else lse


def differentiated(
    given: Sequence[Tensor], more: dict[str, Any], into: Sequence[Tensor] | None = None
) -> Gradients:
    """`attention_backward` of dout, q, k, v, out and lse, and of dlse in `more`."""
    if "cu_seqlens_q" in more:
        return attention_backward(*given, **more, into=into)
    more = _dense_options(more)
    if more["dlse"] is not None:
        more["dlse"] = more["dlse"][None]
    places = None if into is None else _dense(into)
    *rows, lse = given
    arguments: Any = (*_dense(rows), lse[None])
    found = attention_backward(*arguments, **more, into=places)
    return found if places else found._replace(dq=found.dq[0], dk=found.dk[0], dv=found.dv[0])


def part_of(x: Tensor, rows: slice, heads: slice) -> Tensor:
    """x[rows, heads], which is x itself if that is all: a view takes the host microseconds."""
    count, every = x.shape[:2]
    if rows.stop - rows.start == count and heads.stop - heads.start == every:
        return x
    return x[rows, heads]


def _dense(given: Sequence[Tensor]) -> Any:
    return [x[None] if x.ndim == 3 else x for x in given]


_STREAMS: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}


class Lanes:
    """Streams of a step. Lane 0 is the current one, and the other lane lies beside it, so that work
    tiles of one call take the SMs that the last tiles of another leave idle. A third stream lies
    aside: kernels there wait for SMs, or for other ranks, and no call waits for them. With one lane
    all is the current stream.

    `begin` says once after what the other streams begin; `join` lets lane 0 wait for them.
    """

    def __init__(self, device: torch.device, count: int):
        self.count, self._device = count, device
        self._begin: Any = None
        self.main: Any = None
        self._streams: tuple[Any, ...] = ()
        self._used: list[Any] = []
        if count > 1:
            self.main = torch.cuda.current_stream(device)
            if device not in _STREAMS:
                _STREAMS[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._streams = _STREAMS[device]

    @property
    def side(self) -> Any:
        """The stream of the other lane."""
        return self._streams[0]

    def begin(self, event: Any) -> None:
        """Other streams begin after this event, the first that is told."""
        self._begin = self._begin or event

    def on(self, index: int) -> AbstractContextManager:
        """Makes a lane the current stream. index: parts of a step take lanes in turn."""
        if not self._streams or index % self.count == 0:
            return nullcontext()
        return torch.cuda.stream(self._begun(self._streams[0]))

    def aside(self, event: Any) -> AbstractContextManager:
        """Makes the stream aside the current one, after an event of `mark`, or None."""
        if not self._streams:
            return nullcontext()
        stream = self._begun(self._streams[1])
        if event is not None:
            stream.wait_event(event)
        return torch.cuda.stream(stream)

    def _begun(self, stream: Any) -> Any:
        if stream not in self._used:
            self._used.append(stream)
            if self._begin is not None:
                stream.wait_event(self._begin)
        return stream

    def mark(self) -> Any:
        """An event of all that the current stream has now; None where there is no other."""
        if not self._streams:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def keep(self, made: Tensor, index: int) -> Tensor:
        """A tensor that was made on a lane, and is used after `join`."""
        if self._streams and index % self.count:
            made.record_stream(self.main)
        return made

    def join(self) -> None:
        """The current stream, lane 0, waits for the others."""
        for stream in self._used:
            self.main.wait_stream(stream)


# Types of options.
_PLAIN = frozenset((bool, float, int, str, type(None)))


def key_of(q: Any, k: Any, v: Any, told: tuple[Any, ...]) -> Any:
    """All that a forward depends on; None where none may come again: under a capture, autocast, a
    transform or a tracer, in memory of odd addresses, and for arguments that are no tensors or
    are compared by identity. told: options of the call."""
    if not (q.__class__ is k.__class__ is v.__class__ is Tensor) or any_autocast():
        return None
    if q.ndim != 3 or not all([each.__class__ in _PLAIN for each in told]):
        return None
    if needs_dispatcher(q, k, v) or not (is_bare(q) and is_bare(k) and is_bare(v)):
        return None
    where = q.device
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 or where != k.device or where != v.device:
        return None
    stream = 0
    if where.type == "cuda":
        if where.index != current_device() or torch.cuda.is_current_stream_capturing():
            return None
        stream = raw_stream(where.index)
    places = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()
    dtypes, strict = (q.dtype, k.dtype, v.dtype), are_deterministic_algorithms_enabled()
    records = is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return places, dtypes, where.index, stream, strict, records, EPOCH.number, told


# Adds to the results of calls, from where q, k, v and out begin.
Ask = Callable[[Sequence[int], list[Tensor]], None]


class Again:
    """A forward on rows that lie as others did, on the stream that those had: the same kernels and
    copies in the same order. Called with q, k, v and whether log-sum-exps are wanted; returns out
    and those of each call, as `gather.forward`."""

    def __init__(self, asks: Sequence[Ask], told: Sequence[Any], lanes: Lanes, like: Tensor):
        """told: of each call of each group of heads its number, its heads or None for all, and its
        lane. like: an out."""
        self._asks, self._told, self._lanes = asks, told, lanes
        self._shape = like.shape
        self._count = 1 + max(index for index, *_ in told)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, wants_lse: bool) -> tuple[Tensor, list]:
        out, found = q.new_empty(self._shape), []
        begins = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        try:
            for ask in self._asks:
                ask(begins, found)
        finally:
            torch.cuda.set_stream(self._lanes.main)
        lses: list[Any] = [None] * self._count
        if not wants_lse:
            return out, lses
        for (index, heads, lane), lse in zip(self._told, found, strict=True):
            self._lanes.keep(lse, lane)
            if heads is None:
                lses[index] = lse
                continue
            if lses[index] is None:
                lses[index] = lse.new_empty((q.shape[1], lse.shape[1]))
            lses[index][heads] = lse
        return out, lses


class _Asked:
    """Collects what a step asks. lanes: streams of a step."""

    def __init__(self, step: Any, lanes: Lanes, bound: Mapping[tuple[int, int], Bound]):
        self.step, self.lanes, self.bound = step, lanes, bound
        self.asks: list[Ask] = []
        self.told: list[Any] = []
        self._peers, self._current, self._begun = step.shared.peers, lanes.main, False
        self._begin: Any = None

    def on(self, index: int) -> Any:
        """Makes a lane the current stream, as `Lanes.on`."""
        lanes = self.lanes
        stream = lanes.side if index % lanes.count else lanes.main
        if stream is lanes.side and not self._begun:
            self._begun = True
            if self._begin is not None:
                self.waits(stream, self._begin)
        if stream is not self._current:
            self.asks.append(lambda begins, found: torch.cuda.set_stream(stream))
            self._current = stream
        return stream

    def marks(self, stream: Any) -> Any:
        """An event of all that a stream has then."""
        event = torch.cuda.Event()
        self.asks.append(lambda begins, found: event.record(stream))
        return event

    def waits(self, stream: Any, event: Any) -> None:
        self.asks.append(lambda begins, found: event.wait(stream))

    def begins(self, event: Any) -> None:
        self._begin = self._begin or event

    def packs(self, index: int, k: Tensor, v: Tensor) -> None:
        """Ranks meet, and own rows are written where others read them."""
        peers, stream = self._peers, self.on(index)
        self.asks.append(lambda begins, found: peers.begin_again(stream))
        for group in self.step.told:
            write = self.step.shared.part(self.step.made.rank, group.keys).writes(k, v)
            if write is not None:
                self.asks.append(_packing(write))

    def ready(self, index: int) -> Any:
        peers, stream = self._peers, self.on(index)
        self.asks.append(lambda begins, found: peers.meet(0))
        return self.marks(stream)

    def copies(self, group: Any, after: Any, index: int) -> None:
        """Rows of other ranks come, and a lane waits for them."""
        stream, part = self._peers.of_keys, self.step.shared.part(self.step.made.rank, group.keys)
        lane = self.on(index)
        self.waits(stream, after)
        for into, rows in part.keys:
            copy = copier(stream, into, rows)
            self.asks.append(lambda begins, found, copy=copy: copy())
        self.waits(lane, self.marks(stream))

    def calls(self, group: Any, indices: Sequence[int], index: int, is_local: bool) -> None:
        self.on(index)
        heads, is_one = group.queries, is_local or len(self.step.told) == 1
        for number in indices:
            self.asks.append(_calling(self.bound[number, heads.start], is_local))
            self.told.append((number, None if is_one else heads, index))

    def join(self) -> None:
        if self._begun:
            self.waits(self.lanes.main, self.marks(self.lanes.side))


def _packing(write: Callable[[int, int], None]) -> Ask:
    return lambda begins, found: write(begins[1], begins[2])


def _calling(run: Bound, is_local: bool) -> Ask:
    if is_local:
        return lambda begins, found: found.append(run(*begins))
    # Gathered rows lie where they lay in the step before.
    return lambda begins, found: found.append(run(begins[0], 0, 0, begins[3]))


def again(
    step: Any,
    rows: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lanes: Lanes,
    bound: Mapping[tuple[int, int], Bound],
    whole: Any,
) -> Again:
    """A step of a forward that copies rows, on two lanes, all of whose calls are bound. bound: by
    the call's number and its first query head; whole: the group of all heads."""
    asked, (_, k, v) = _Asked(step, lanes, bound), rows
    calls, index, after = step.on.schedule.calls, 0, None
    count = sum(call.is_local for call in calls)
    local = [whole][: count > 0]
    is_packed = False
    if step.is_hidden and (step.left > 0 or not step.told):
        if step.left and not step.is_little:
            asked.packs(0, k, v)
            is_packed = True
        asked.begins(asked.marks(lanes.main))
        for group in local:
            asked.calls(group, range(count), index, True)
            index += 1
        local = []
    if step.told:
        if not is_packed:
            asked.packs(index, k, v)
        after = asked.ready(index)
        asked.begins(after)
    parts = [(group, False) for group in step.told]
    place = 0 if step.is_hidden else len(parts)
    parts[place:place] = [(group, True) for group in local]
    for group, is_local in parts:
        if is_local:
            asked.calls(group, range(count), index, True)
        else:
            asked.copies(group, after, index)
            asked.calls(group, range(count, len(calls)), index, False)
        index += 1
    asked.join()
    return Again(asked.asks, asked.told, lanes, out)
