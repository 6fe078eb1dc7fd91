"""The strategy "gather": a rank gets the keys and values that its queries see, by groups of KV
heads, so that one group's kernel runs while the next group's rows arrive. Queries that see only
keys of this rank go first.

Every query meets all its keys in one call: nothing is merged, and a sink enters once. Gradients of
keys and values travel back as kernels write them, each call's by itself, and are summed in float32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from heedful.distributed import cost, peers
from heedful.distributed.calls import (
    EPOCH,
    Bound,
    Lanes,
    again,
    attended,
    differentiated,
    from_first,
    leaves,
    lies,
    part_of,
    placed,
    with_margin,
)
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
    if q.device.type != "cuda":
        return _groups([heads[1]], heads), True
    # All ranks capture a step, or none does.
    replayed = is_shared or torch.cuda.is_current_stream_capturing()
    return kept_groups(on, heads, (k.shape[-1], v.shape[-1]), k.itemsize, backward, replayed)


def kept_groups(
    on: OnDevice,
    heads: tuple[int, int],
    dims: tuple[int, int],
    size: int,
    backward: bool,
    replayed: bool,
) -> tuple[list[Group], bool]:
    """`head_groups` of a schedule, made once."""
    key = heads, dims, size, backward, replayed
    kept = on.kept.get(key)
    if kept is None:
        sizes, is_hidden = cost.head_groups(on.schedule, heads, dims, size, backward, replayed)
        kept = on.kept[key] = _groups(sizes, heads), is_hidden
    return kept


def _groups(sizes: Sequence[int], heads: tuple[int, int]) -> list[Group]:
    each, begin, found = heads[0] // heads[1], 0, []
    for size in sizes:
        end = begin + size
        found.append(Group(slice(begin, end), slice(begin * each, end * each)))
        begin = end
    return found


Rows = tuple[Tensor, Tensor, Tensor]


class Keys:
    """k and v of one group of heads, on their way: a head's k and v lie side by side. shared: where
    other ranks read them, None if they are sent; channel: of its ranks' meetings, a number from
    1."""

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        group: Group,
        made: ContextPlan,
        on: OnDevice,
        shared: Any,
        channel: int,
    ):
        self.group, self._made, self._on, self._channel = group, made, on, channel
        self._dims, self._peers = (k.shape[-1], v.shape[-1]), shared and shared.peers
        self._part = part = shared and shared.part(made.rank, group.keys)
        self._shape = group.keys.stop - group.keys.start, sum(self._dims)
        self.rows = k.new_empty((on.schedule.count, *self._shape)) if part is None else part.rows
        if part is None:
            for rows, place in on.schedule.own:
                side_by_side([x[rows, group.keys] for x in (k, v)], self.rows[place])
        else:
            part.pack(k, v)
        self._exchange: Any = None

    def begin(self, after: Any) -> None:
        """Begins to get rows of the other ranks. after: the event of all having written theirs,
        which are then copied."""
        if self._exchange is not None:
            return
        if self._part is not None:
            self._exchange = self._peers.pull(self._part.keys, after, True)
            return
        schedule = self._on.schedule
        sent, received = (
            [[self.rows[run] for run in theirs] for theirs in parts]
            for parts in (schedule.sent, schedule.received)
        )
        self._exchange = Exchange(self._made.group, sent, received, schedule.rounds, self.rows)

    def wait(self) -> None:
        """The current stream waits for the rows."""
        self._exchange.wait()

    def of(self, call: Call) -> tuple[Tensor, Tensor]:
        """k and v of a call, views."""
        if self._part is not None:
            return self._part.of(call.keys, self._dims)
        k, v = self.rows[call.keys].split(self._dims, -1)
        return k, v

    # Gradients

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Where each call writes its gradients of k and v."""
        back, part = self._on.schedule.back, self._part
        if part is None:
            self._found = self.rows.new_empty((back.counts[self._made.rank], *self._shape))
        else:
            self._found = part.gradients
        split = (self._found[place].split(self._dims, -1) for place in back.places)
        return [(dk, dv) for dk, dv in split]

    def send(self) -> None:
        """Begins to send gradients that belong to others."""
        back, found = self._on.schedule.back, self._found
        self._parts = parts = found.new_empty((back.parts, *self._shape))
        if self._part is not None:
            after = self._peers.ready(self._channel)
            pairs = [(parts[run], theirs) for run, theirs in self._part.taken]
            self._exchange = self._peers.pull(pairs, after, False)
            return
        sent = [[found[run] for run in theirs] for theirs in back.sent]
        into = [[parts[run] for run in theirs] for theirs in back.received]
        self._exchange = Exchange(self._made.group, sent, into, back.rounds, found)

    def finish(self, dk: Tensor, dv: Tensor) -> None:
        """Adds all that calls and other ranks found, in float32 and in one order, to what local
        calls wrote to dk and dv."""
        self._exchange.wait()
        for rows in self._on.schedule.back.sums:
            parts = [self._found[run] for run in rows.own]
            parts += [self._parts[run] for run in rows.received]
            totals = dk[rows.rows, self.group.keys], dv[rows.rows, self.group.keys]
            if len(parts) + rows.is_local > 2:
                first = parts[0].float()
                for part in parts[1 : None if rows.is_local else -1]:
                    first += part
                parts = [first, *([] if rows.is_local else parts[-1:])]
            _add(totals, [part.split(self._dims, -1) for part in parts], rows.is_local)


def _add(totals: tuple[Tensor, Tensor], parts: list[Any], is_local: bool) -> None:
    """Writes the sum of at most two terms to each total, rounded once. is_local: whether the total
    is one of them."""
    for total, *terms in zip(totals, *parts, strict=True):
        terms += [total] * is_local
        if len(terms) == 2:
            torch.add(*terms, out=total)
        elif not terms:
            total.zero_()
        elif not is_local:
            copy(total, terms[0])


def _arguments(
    options: dict[str, Any], on: OnDevice, index: int, group: Group, left: int = 0
) -> dict[str, Any]:
    """The arguments of one call on one group of heads, but for tensors with rows. left: SMs that it
    leaves to others."""
    slopes, drops = options.get("alibi_slopes") is not None, bool(options.get("dropout_p"))
    key = index, group.queries.start, slopes, drops
    fixed = on.kept.get(key)
    if fixed is None:
        fixed = on.kept[key] = _fixed(on, index, group, slopes and on.one_by_one, drops)
    made = options | fixed
    if left:
        made["backend"] = with_margin(made["backend"], left)
    for name in ("sink", "alibi_slopes"):
        if made.get(name) is not None:
            made[name] = made[name][group.queries]
    if made.get("key_ranges") is not None:
        made["key_ranges"] = made["key_ranges"][index]
    return made


def _by_call(options: dict[str, Any], on: OnDevice) -> dict[str, Any]:
    """The options of a step: each call has key_ranges of its own, counted from the first key of
    each of its sequences."""
    ranges = options.get("key_ranges")
    if ranges is None:
        return options
    if "firsts" not in on.kept:
        on.kept["firsts"] = [_firsts(call, ranges.device) for call in on.schedule.calls]
    each = zip(on.schedule.calls, on.kept["firsts"], strict=True)
    made = [from_first(ranges[call.rows], firsts) for call, firsts in each]
    return options | {"key_ranges": made}


def _firsts(call: Call, device: torch.device) -> Tensor:
    """int32 (rows, 1): where the keys of each row's sequence begin in its document."""
    counts = torch.tensor([len(piece) for piece in call.pieces], device="cpu")
    firsts = torch.tensor(call.firsts, dtype=torch.int32, device="cpu")
    return firsts.repeat_interleave(counts)[:, None].to(device)


def _fixed(on: OnDevice, index: int, group: Group, is_placed: bool, drops: bool) -> dict[str, Any]:
    """Those that are the same in each step."""
    call = on.schedule.calls[index]
    made: dict[str, Any] = {"window_size": call.window}
    if len(call.lengths_q) > 1:
        made["cu_seqlens_q"], made["cu_seqlens_k"] = on.cu_q[index], on.cu_k[index]
        made["max_seqlen_q"], made["max_seqlen_k"] = max(call.lengths_q), max(call.lengths_k)
    if drops:
        (piece,), (first,) = call.pieces, call.firsts
        made["dropout_origin"] = (piece.document, group.queries.start, piece.begin, first)
    if is_placed:
        (piece,), (first,) = call.pieces, call.firsts
        made |= placed(call, piece.begin - first)
    return made


@dataclass(frozen=True)
class Part:
    """Calls of a step. group, keys: their heads, and their keys, None if these are this rank's;
    calls: there may be none, but others wait for gradients all the same; index: by which it has a
    lane, on which its keys have arrived; left: SMs that its calls leave to others."""

    group: Group
    keys: Keys | None
    calls: list[int]
    index: int
    left: int = 0


def _is_captured(q: Tensor) -> bool:
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class Step:
    """A forward or a backward. shared: where other ranks read k and v, None if they are sent; told,
    is_hidden: of `groups`. left: SMs that local calls may leave to kernels with which ranks meet;
    is_little: whether own rows can be packed on these."""

    made: ContextPlan
    on: OnDevice
    shared: Any
    told: list[Group]
    is_hidden: bool
    left: int
    is_little: bool

    @classmethod
    def of(
        cls, rows: Rows, made: ContextPlan, on: OnDevice, backward: bool, backend: str | None
    ) -> "Step":
        q, k, v = rows
        is_captured = _is_captured(q)
        facts = q.shape, k.shape, v.shape, q.dtype, backward, is_captured, backend, EPOCH.number
        found = on.kept.get(facts)
        if found is None:
            shared, told, is_little = None, ([], True), True
            if on.schedule.most_received:
                shared = peers.shared_rows(made.peers, on, k, v)
                told = groups(q, k, v, on, backward, shared is not None)
                heads, dims = (q.shape[1], k.shape[1]), (k.shape[-1], v.shape[-1])
                is_little = cost.packs_little(on.schedule, heads, dims, k.itemsize)
            # The host's time of a captured step costs nothing: ranks meet first, so that calls
            # of two streams end together.
            waits = backward or shared is None or is_captured
            left = 0 if waits else leaves(backend)
            found = on.kept[facts] = cls(made, on, shared, *told, left, is_little)
        return found

    def lanes(self, like: Tensor) -> Lanes:
        """Streams for its calls, which begin after what the current one has now. Tensors that both
        use must have been made before: later memory of one may be what its last kernels still
        use."""
        has_two = self.shared is not None and like.device.type == "cuda"
        return Lanes(like.device, cost.LANES if has_two else 1)

    def parts(self, rows: Rows, lanes: Lanes, backward: bool = False) -> Iterator[Part]:
        """One after the other."""
        q, k, v = rows
        calls, index = self.on.schedule.calls, 0
        count = sum(call.is_local for call in calls)
        local = [(Group(slice(0, k.shape[1]), slice(0, q.shape[1])), None, [*range(count)])]
        local = local[: count > 0]
        keys, after = [], None
        # Local calls that hide the copies begin before ranks have met, if ranks can meet beside
        # them: other kernels of a backward leave SMs idle, and a forward is told to. Where rows are
        # sent, transfers need SMs before a kernel has all.
        left = self.left if lanes.count > 1 else 0
        comes_first = lanes.count > 1 and (backward or left > 0)
        if self.is_hidden and (comes_first or not self.told):
            if left and not self.is_little:
                # On so few SMs this would take too long.
                keys = self._packed(k, v)
            lanes.begin(lanes.mark())
            for part in local:
                yield Part(*part, index, left)
                index += 1
            local = []
        if self.told:
            with lanes.on(index):
                keys = keys or self._packed(k, v)
                after = None if self.shared is None else self.shared.peers.ready(0)
                lanes.begin(after)
                if self.shared is None or backward:
                    for found in keys:
                        found.begin(after)
        remote = [*range(count, len(calls))]
        parts: list[Any] = [(found.group, found, remote) for found in keys]
        # On two lanes the short tiles of local calls go on where the long ones of others end.
        place = 0 if self.is_hidden else len(parts) if lanes.count > 1 else 1
        parts[place:place] = local
        for number, (group, found, indices) in enumerate(parts, 1):
            with lanes.on(index):
                if found is not None:
                    # Copies of a group are asked for after the kernel before it.
                    found.begin(after)
                    found.wait()
                if keys and self.shared is None and number < len(parts):
                    # A kernel of this part and a transfer that is next may begin now.
                    head_start(q.device)
            yield Part(group, found, indices, index)
            index += 1

    def _packed(self, k: Tensor, v: Tensor) -> list[Keys]:
        """Keys of all groups, where others get them once ranks have met."""
        if self.shared is not None:
            self.shared.peers.begin()
        told = self.made, self.on, self.shared
        return [Keys(k, v, group, *told, i) for i, group in enumerate(self.told, 1)]


def forward(
    q: Tensor, k: Tensor, v: Tensor, made: ContextPlan, on: OnDevice, options: dict[str, Any]
) -> tuple[Tensor, list[Tensor], Any]:
    """out of this rank's queries, and by call their lse, (heads, rows). Last what makes an
    `Again` of the step, if all its calls are bound, else None."""
    step = Step.of((q, k, v), made, on, False, options["backend"])
    options = _by_call(options, on)
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    facts, kept = lies(q, k, v, options), on.kept
    bases = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
    lses: list[Any] = [None] * len(on.schedule.calls)
    for index, call in enumerate(on.schedule.calls):
        if len(step.told) > 1 and not call.is_local:
            shape = q.shape[1], call.rows.stop - call.rows.start
            lses[index] = q.new_empty(shape, dtype=torch.float32)
    lanes, are_bound = step.lanes(q), {}
    for part in step.parts((q, k, v), lanes):
        heads = part.group.queries
        # Gathered rows lie where they lay in the step before.
        begin = bases if part.keys is None else (bases[0], 0, 0, bases[3])
        lasts = part.keys is None or step.shared is not None
        for index in part.calls:
            call, key = on.schedule.calls[index], (facts, index, heads.start, part.left)
            known = kept.get(key) if facts is not None and lasts else None
            with lanes.on(part.index):
                if isinstance(known, Bound):
                    found = known(*begin)
                    are_bound[index, heads.start] = known
                else:
                    given = part_of(q, call.rows, heads), *_keys_of(call, part, k, v)
                    more = _arguments(options, on, index, part.group, part.left)
                    into = part_of(out, call.rows, heads)
                    found = attended(given, more, into)
                    if facts is not None and lasts:
                        # Most plans' calls come again: they are bound the second time.
                        new = Bound.of(given, more, into, begin) if key in kept else None
                        kept[key] = new
                if (lse := lses[index]) is None:
                    lses[index] = lanes.keep(found, part.index)
                else:
                    lse[heads] = found
    lanes.join()
    count = sum(len(step.told) ** (not call.is_local) for call in on.schedule.calls)
    if lanes.count == 1 or not step.told or len(are_bound) < count:
        return out, lses, None
    whole = Group(slice(0, k.shape[1]), slice(0, q.shape[1]))
    return out, lses, partial(again, step, (q, k, v), out, lanes, are_bound, whole)


def put_together(lses: Sequence[Tensor], on: OnDevice, like: Tensor) -> Tensor:
    """lse of all rows, as (heads, rows). like: q."""
    lse = torch.empty((like.shape[1], len(like)), dtype=torch.float32, device=like.device)
    for call, found in zip(on.schedule.calls, lses, strict=True):
        lse[:, call.rows] = found
    return lse


def _keys_of(call: Call, part: Part, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if part.keys is not None:
        return part.keys.of(call)
    return part_of(k, call.keys, part.group.keys), part_of(v, call.keys, part.group.keys)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    saved: tuple[Tensor, ...],
    made: ContextPlan,
    on: OnDevice,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv of this rank's rows, and this rank's part of dsink. saved: q, k, v, out, and what
    `forward` returned of lse."""
    q, k, v, out, *lses = saved
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    step = Step.of((q, k, v), made, on, True, options["backend"])
    options = _by_call(options, on)
    lanes = step.lanes(q)
    dsinks: list[tuple[slice, Tensor]] = []
    sent: list[Part] = []
    count = sum(call.is_local for call in on.schedule.calls)
    locally: Any = None

    def finish(parts: list[Part]) -> None:
        for part in parts:
            assert part.keys is not None
            with lanes.aside(locally):
                part.keys.finish(dk, dv)

    for part in step.parts((q, k, v), lanes, backward=True):
        keys, heads = part.keys, part.group.queries
        with lanes.on(part.index):
            places = [] if keys is None else keys.gradients()
            for index in part.calls:
                call = on.schedule.calls[index]
                more = _arguments(options, on, index, part.group)
                more["dlse"] = None if dlse is None else dlse[heads, call.rows].contiguous()
                given = [part_of(x, call.rows, heads) for x in (dout, q)]
                given += [*_keys_of(call, part, k, v), part_of(out, call.rows, heads)]
                given.append(lses[index][heads])
                into = (dk[call.keys], dv[call.keys]) if keys is None else places[index - count]
                found = differentiated(given, more, (dq[call.rows, heads], *into))
                if found.dsink is not None:
                    dsinks.append((heads, lanes.keep(found.dsink, part.index)))
            done = lanes.mark()
        if keys is None:
            locally = done
            continue
        with lanes.aside(done):
            keys.send()
        # The one before has arrived meanwhile. It is added to what local calls find.
        if locally is not None or not count or lanes.count == 1:
            finish(sent)
            sent = []
        sent.append(part)
    finish(sent)
    lanes.join()
    return dq, dk, dv, _summed(dsinks, options.get("sink"))


def _summed(parts: list[tuple[slice, Tensor]], sink: Tensor | None) -> Tensor | None:
    if sink is None:
        return None
    total = torch.zeros_like(sink)
    for heads, part in parts:
        total[heads] += part
    return total
