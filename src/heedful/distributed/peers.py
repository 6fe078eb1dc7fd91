"""Memory of each rank that the other ranks of its host read, by torch's symmetric memory. Copies
run on engines of their own: a kernel of NCCL's would wait for SMs that a kernel of attention holds.
"""

import hashlib
import socket
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from heedful.distributed.schedules import Schedule

# By group and device. They live as long as the process: graphs have their addresses.
_KNOWN: dict[tuple[Any, torch.device], list[Any]] = {}
_HAS_SYMMETRIC = find_spec("torch.distributed._symmetric_memory") is not None
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class SharedRows:
    """Gathered rows of k and v, side by side, and after them sums of their gradients, of every
    rank: in each part first all rows of some heads, then those of others."""

    def __init__(self, peers: Any, schedule: Schedule, heads: int, dim: int, dtype: torch.dtype):
        self._peers, self._schedule, self._dim, self._dtype = peers, schedule, dim, dtype
        self._of_head = _room(schedule) * dim
        self._sums = heads * self._of_head * dtype.itemsize
        self.begin, self.ready = peers.begin, peers.ready

    @staticmethod
    def bytes_of(schedule: Schedule, heads: int, dim: int, size: int) -> int:
        """How many a rank has of both. size: of an element of k."""
        return _room(schedule) * heads * dim * (size + 4) if schedule.most_received else 0

    def _rows(self, rank: int, heads: slice, begin: int, dtype: torch.dtype) -> Tensor:
        shape = self._schedule.counts[rank], heads.stop - heads.start, self._dim
        place = begin + heads.start * self._of_head * dtype.itemsize
        return self._peers.view(rank, place, shape, dtype)

    def keys(self, rank: int, heads: slice) -> Tensor:
        """(rows, heads, dim) of a rank."""
        return self._rows(rank, heads, 0, self._dtype)

    def sums(self, rank: int, heads: slice) -> Tensor:
        """float32 (rows, heads, dim) of a rank."""
        return self._rows(rank, heads, self._sums, torch.float32)

    def pull_keys(self, heads: slice, rows: Tensor) -> Any:
        """Begins to copy what this rank gets into its rows."""
        pairs = []
        for rank, received in enumerate(self._schedule.received):
            if received:
                theirs = self.keys(rank, heads)
                of_peer = self._schedule.there[rank][1]
                pairs += [(rows[a], theirs[b]) for a, b in zip(received, of_peer, strict=True)]
        return self._peers.pull(pairs)

    def pull_sums(self, heads: slice, parts: Sequence[Sequence[Tensor]]) -> Any:
        """Begins to copy other ranks' sums of this rank's rows, after they are there."""
        pairs = []
        self.ready()
        for rank, into in enumerate(parts):
            if into:
                theirs = self.sums(rank, heads)
                of_peer = self._schedule.there[rank][0]
                pairs += [(a, theirs[b]) for a, b in zip(into, of_peer, strict=True)]
        return self._peers.pull(pairs)


def _room(schedule: Schedule) -> int:
    """Rows of one head on each rank: so many that the next head's are aligned."""
    return -(-max(schedule.counts) // 128) * 128


def shared_rows(peers: Any, schedule: Schedule, k: Tensor, v: Tensor) -> SharedRows | None:
    """Where the ranks of a plan share rows of k and v; None if they do not, or lack the room: the
    same on each."""
    if peers is None:
        return None
    heads, dim = k.shape[1], k.shape[-1] + v.shape[-1]
    if SharedRows.bytes_of(schedule, heads, dim, k.itemsize) > peers.size:
        return None
    return SharedRows(peers, schedule, heads, dim, k.dtype)


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
        self._stream = torch.cuda.Stream(device)
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
        self.ready()

    def ready(self) -> None:
        """Waits until every rank has come here."""
        self._handle.barrier(0, self._wait_ms)

    def view(self, rank: int, begin: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A rank's bytes from `begin` on, which is a multiple of the dtype's size."""
        return self._handle.get_buffer(rank, list(shape), dtype, begin // dtype.itemsize)

    def pull(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Copies:
        """Begins to copy another rank's contiguous rows, second of a pair, into the first."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for into, rows in pairs:
                into.copy_(rows, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return Copies(event)


def _is_one_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    words = socket.gethostname() + (_BOOT.read_text() if _BOOT.exists() else "")
    mine = int.from_bytes(hashlib.sha256(words.encode()).digest()[:7], "big")
    told = torch.tensor([mine, -mine], device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    most, least = told.tolist()
    return most == -least


def peers_of(group: dist.ProcessGroup | None, size: int) -> Peers | None:
    """Memory of at least so many bytes on each rank, None for none. A collective of ranks that ask
    for the same size. Raises ValueError where ranks cannot read each other's."""
    if not size:
        return None
    where = dist.get_backend(group)
    if where != "nccl" or torch.version.hip or not _HAS_SYMMETRIC:
        raise ValueError(
            "transport must be 'send' where ranks are not GPUs of NVIDIA's under NCCL with torch's"
            f" symmetric memory, got 'copy' under {where}"
        )
    group = dist.group.WORLD if group is None else group
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device())
    known = _KNOWN.setdefault((group, device), [])
    if not known and not _is_one_host(group, device):
        raise ValueError("transport must be 'send' where ranks are on several hosts, got 'copy'")
    if not known or known[-1].size < size:
        # Twice as much each time: those that came before are less than the last.
        least = 2 * known[-1].size if known else 0
        known.append(Peers(group, device, -(-max(size, least) // 2**21) * 2**21))
    return known[-1]
