"""Memory of each rank that the other ranks of its host read, by torch's symmetric memory. Copies
run on engines of their own: a kernel of NCCL's would wait for SMs that a kernel of attention holds.
"""

import hashlib
import socket
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from heedful.distributed.exchange import side_by_side, words_of
from heedful.distributed.schedules import Schedule
from heedful.torch.eager.over_ranks import copy_on
from heedful.torch.eager.slots import slot_writer

# By group and device. They live as long as the process: graphs have their addresses.
_KNOWN: dict[tuple[Any, torch.device], list[Any]] = {}
_REFUSED: dict[tuple[Any, torch.device], str] = {}
_HAS_SYMMETRIC = find_spec("torch.distributed._symmetric_memory") is not None
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class SharedPart:
    """Some heads of `SharedRows`. rows, gradients: of this rank; own: (its rows, where they belong,
    in wide words); keys: (rows of this rank, those of another that are copied there); taken: (rows
    of `Returned.parts`, gradients of another rank)."""

    def __init__(self, shared: "SharedRows", rank: int, heads: slice):
        schedule, back = shared.schedule, shared.schedule.back
        self._heads, self._shared = heads, shared
        self._views: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self._writers: dict[tuple[Any, ...], Any] = {}
        self.rows, self.gradients = shared.keys(rank, heads), shared.gradients(rank, heads)
        self.own = [(rows, words_of(self.rows[place])) for rows, place in schedule.own]
        self.keys, self.taken = [], []
        every = [*zip(schedule.received, schedule.there, back.received, back.there, strict=True)]
        # Each begins with the next rank, so that no rank's link serves all others at once.
        for other in (*range(rank + 1, len(every)), *range(rank)):
            runs, there, parts, of_peer = every[other]
            if runs:
                theirs = shared.keys(other, heads)
                pairs = zip(runs, there[1], strict=True)
                self.keys += [(self.rows[run], theirs[place]) for run, place in pairs]
            if parts:
                theirs = shared.gradients(other, heads)
                pairs = zip(parts, of_peer, strict=True)
                self.taken += [(part, theirs[place]) for part, place in pairs]

    def of(self, keys: slice, dims: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """k and v of a call, views that are made once."""
        place = keys.start, keys.stop, dims[0]
        views = self._views.get(place)
        if views is None:
            k, v = self.rows[keys].split(dims, -1)
            views = self._views[place] = k, v
        return views

    def _writer(self, like: Sequence[Tensor]) -> Callable[[int, int], None] | None:
        if any(x.stride(-1) != 1 for x in like):
            return None
        caches = (x[None] for x in self.rows.split([x.shape[-1] for x in like], -1))
        return slot_writer(*like, *caches, self._shared.slots(like[0].device))

    def writes(self, k: Tensor, v: Tensor) -> Callable[[int, int], None] | None:
        """A function that writes own rows of such k and v where others read them, from where those
        of all heads begin. None where there are none, and on CPUs."""
        if not self.own:
            return None
        heads = self._heads
        lies = k.shape, k.stride(), v.stride(), (k.data_ptr() | v.data_ptr()) % 16
        if lies not in self._writers:
            first = min(rows.start for rows, _ in self.own)
            parts = [x[first:, heads] for x in (k, v)]
            write = self._writer(parts)
            a, b = (part.data_ptr() - x.data_ptr() for part, x in zip(parts, (k, v), strict=True))
            if write is not None and (a or b):
                of_part, write = write, lambda k, v: of_part(k + a, v + b)
            self._writers[lies] = write
        return self._writers[lies]

    def pack(self, k: Tensor, v: Tensor) -> None:
        """Writes this rank's k and v where others read them. On a GPU one launch writes all."""
        if not self.own:
            return
        heads, write = self._heads, self.writes(k, v)
        if write is not None:
            write(k.data_ptr(), v.data_ptr())
            return
        words = words_of(k), words_of(v)
        k, v = words if words[0].dtype == words[1].dtype else (k, v)
        for rows, place in self.own:
            parts = [k[rows, heads], v[rows, heads]]
            if place.dtype == k.dtype:
                torch.cat(parts, -1, out=place)
            else:
                side_by_side(parts, place)


class SharedRows:
    """Gathered rows of k and v, side by side, and after them gradients that calls found, of every
    rank: in each part first all rows of some heads, then those of others."""

    def __init__(self, peers: Any, schedule: Schedule, heads: int, dim: int, dtype: torch.dtype):
        self.peers, self.schedule, self._dim, self._dtype = peers, schedule, dim, dtype
        self._begin = heads * _room(schedule.counts) * dim * dtype.itemsize
        self._parts: dict[tuple[int, int, int], SharedPart] = {}
        self._slots: Tensor | None = None

    @staticmethod
    def bytes_of(schedule: Schedule, heads: int, dim: int, size: int) -> int:
        """How many a rank has of both. size: of an element of k."""
        rows = _room(schedule.counts) + _room(schedule.back.counts)
        return rows * heads * dim * size if schedule.most_received else 0

    def _rows(self, rank: int, heads: slice, counts: Sequence[int], begin: int) -> Tensor:
        shape = counts[rank], heads.stop - heads.start, self._dim
        place = begin + heads.start * _room(counts) * self._dim * self._dtype.itemsize
        return self.peers.view(rank, place, shape, self._dtype)

    def keys(self, rank: int, heads: slice) -> Tensor:
        """(rows, heads, dim) of a rank."""
        return self._rows(rank, heads, self.schedule.counts, 0)

    def gradients(self, rank: int, heads: slice) -> Tensor:
        """(rows, heads, dim) of a rank."""
        return self._rows(rank, heads, self.schedule.back.counts, self._begin)

    def slots(self, device: torch.device) -> Tensor:
        """int32: where each row of this rank lies among the gathered ones, from the first to the
        last that others need; -1 for those between that nobody needs."""
        if self._slots is None:
            own = self.schedule.own
            first, last = min(rows.start for rows, _ in own), max(rows.stop for rows, _ in own)
            slots = np.full(last - first, -1, np.int32)
            for rows, place in own:
                slots[rows.start - first : rows.stop - first] = np.arange(place.start, place.stop)
            self._slots = torch.from_numpy(slots).to(device)
        return self._slots

    def part(self, rank: int, heads: slice) -> SharedPart:
        """The views of these heads, made once: the memory lasts."""
        key = rank, heads.start, heads.stop
        if key not in self._parts:
            self._parts[key] = SharedPart(self, rank, heads)
        return self._parts[key]


def _room(counts: Sequence[int]) -> int:
    """Rows of one head on each rank: so many that the next head's are aligned."""
    return -(-max(counts) // 128) * 128


def shared_rows(peers: Any, on: Any, k: Tensor, v: Tensor) -> SharedRows | None:
    """Where the ranks of a plan share rows of k and v; None if they do not, or lack the room: the
    same on each. on: an OnDevice, which keeps it."""
    if peers is None:
        return None
    facts = k.shape[1], k.shape[-1] + v.shape[-1], k.dtype
    if facts not in on.kept:
        needed = SharedRows.bytes_of(on.schedule, *facts[:2], k.itemsize)
        on.kept[facts] = SharedRows(peers, on.schedule, *facts) if needed <= peers.size else None
    return on.kept[facts]


class Copies:
    """Copies that were begun; `wait` makes the current stream wait for them."""

    def __init__(self, event: torch.cuda.Event):
        self._event = event

    def wait(self) -> None:
        self._event.wait()


class Peers:
    """So many bytes on every rank. A step calls `begin`, writes its own bytes, calls `ready`, then
    `pull`s; all ranks in the same order. A rank that does not come ends the others' kernels after
    the group's time-out."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, size: int):
        from torch.distributed import _symmetric_memory as symmetric

        self.size, self._device = size, device
        self._mine = symmetric.empty(size, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self._mine, group)
        # One for keys, one for gradients, which come later.
        self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._latest: torch.cuda.Stream | None = None
        timeout = group._get_backend(device).options._timeout
        self._wait_ms = int(timeout.total_seconds() * 1e3)

    def begin(self) -> None:
        """Waits until every rank has read what it wanted of the step before."""
        stream = torch.cuda.current_stream(self._device)
        if not torch.cuda.is_current_stream_capturing():
            if self._latest is not None and self._latest != stream:
                stream.wait_stream(self._latest)
            self._latest = stream
        self.meet(0)

    def begin_again(self, stream: torch.cuda.Stream) -> None:
        """`begin` on the current stream, which is not captured."""
        if self._latest is not stream:
            if self._latest is not None and self._latest != stream:
                stream.wait_stream(self._latest)
            self._latest = stream
        self.meet(0)

    def meet(self, channel: int) -> None:
        """The current stream waits until every rank has come here. channel: another where ranks may
        wait on another stream at the same time; `begin` has 0."""
        self._handle.barrier(channel, self._wait_ms)

    @property
    def of_keys(self) -> torch.cuda.Stream:
        """The stream on which keys are copied."""
        return self._streams[0]

    def ready(self, channel: int) -> torch.cuda.Event:
        """`meet`: the event of that."""
        self.meet(channel)
        event = torch.cuda.Event()
        event.record()
        return event

    def view(self, rank: int, begin: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A rank's bytes from `begin` on, which is a multiple of the dtype's size."""
        return self._handle.get_buffer(rank, list(shape), dtype, begin // dtype.itemsize)

    def pull(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Any, of_keys: bool) -> Copies:
        """Begins to copy another rank's contiguous rows, second of a pair, into the first, after an
        event."""
        stream = self._streams[not of_keys]
        stream.wait_event(after)
        for into, rows in pairs:
            copy_on(stream, into, rows)
        event = torch.cuda.Event()
        event.record(stream)
        return Copies(event)


def _is_one_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    words = socket.gethostname() + (_BOOT.read_text() if _BOOT.exists() else "")
    mine = int.from_bytes(hashlib.sha256(words.encode()).digest()[:7], "big")
    told = torch.tensor([mine, -mine], device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    most, least = told.tolist()
    return most == -least


def _why_not(group: dist.ProcessGroup, device: torch.device) -> str:
    """Why ranks cannot read each other's memory, the same on each; empty if they can. A
    collective."""
    if not _is_one_host(group, device):
        return "ranks are on several hosts"
    ranks = dist.get_world_size(group)
    told = torch.tensor([device.index, torch.cuda.device_count()], device=device)
    every = [torch.empty_like(told) for _ in range(ranks)]
    dist.all_gather(every, told, group=group)
    indices, counts = zip(*torch.stack(every).tolist(), strict=True)
    if len(set(indices)) < ranks or min(counts) <= max(indices):
        return "ranks do not see all GPUs of the group"
    others = (index for index in indices if index != device.index)
    reaches = all(torch.cuda.can_device_access_peer(device.index, index) for index in others)
    told = torch.tensor(int(reaches), device=device)
    dist.all_reduce(told, dist.ReduceOp.MIN, group=group)
    return "" if told.item() else "a GPU cannot read the memory of another"


def peers_of(group: dist.ProcessGroup | None, size: int) -> tuple[Peers | None, str]:
    """Memory of at least so many bytes on each rank, None for none; and why ranks cannot read each
    other's, empty if they can. A collective of ranks that ask for the same size."""
    where = dist.get_backend(group)
    if where != "nccl" or torch.version.hip or not _HAS_SYMMETRIC:
        what = "ranks are not GPUs of NVIDIA's under NCCL with torch's symmetric memory"
        return None, f"{what} but under {where}"
    if not size:
        return None, ""
    group = dist.group.WORLD if group is None else group
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device())
    key = group, device
    if key not in _REFUSED:
        _REFUSED[key] = _why_not(group, device)
    if _REFUSED[key]:
        return None, _REFUSED[key]
    known = _KNOWN.setdefault(key, [])
    if not known or known[-1].size < size:
        # Twice as much each time: those that came before are less than the last.
        least = 2 * known[-1].size if known else 0
        known.append(Peers(group, device, -(-max(size, least) // 2**21) * 2**21))
    return known[-1], ""
