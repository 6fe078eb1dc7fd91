"""Context parallelism over the GPUs of this machine, beside one of them.

    python -m heedful.bench.parallel [WORDS]

E is the time of one GPU over the number of GPUs times the time of the slowest: 1 is what separate
devices would give. One GPU computes the whole batch in its own order, by the faster of
flash_attn_func and flash_attn_varlen_func, while the others are idle. Shards are laid out before. A
row exists only if what ranks computed is near what the one computed. Times are medians, in
milliseconds; bfloat16. First come calls, whose launches the host makes while devices work, then
replays of CUDA graphs of both sides. "predicted" are the replays as `distributed/cost.py` has them.
Plan, shard of q and unshard of out have columns of their own. MiB are what a step takes at most
beside its inputs, forward and with backward. The ways zigzag and llama3 are others' schedules over
our kernels; "torch" is torch's context parallelism over them, "te" TransformerEngine
(`harness/schedules.py`): a row says so where one is not installed, and "wrong" where its results
are not near. Cases that say most come first, each by the first way before any by another. WORDS:
only cases whose names have one of them; a word with "=" names a way: =ring. Last come decodes, by
calls and by graphs ("decode").
"""

import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import nccl
from torch.multiprocessing.spawn import spawn

from heedful import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from heedful.bench.harness import script
from heedful.bench.harness.schedules import PEERS, Peer
from heedful.distributed import attention, attention_with_kvcache, cost, plan
from heedful.distributed.exchange import swap
from heedful.distributed.peers import peers_of

# Calls of which a median is taken: as many as take so many milliseconds, within these bounds.
MILLISECONDS, FEWEST, MOST = 400.0, 7, 50
HEADS, HEADS_K, DIM = 32, 8, 128
# Arguments of `plan`, by name.
WAYS: dict[str, dict[str, Any]] = {
    "copy": {"strategy": "gather", "transport": "copy"},
    "send": {"strategy": "gather", "transport": "send"},
    "heads": {"strategy": "heads"},
    "ring": {"strategy": "ring"},
    "heads x ring": {"strategy": "heads x ring"},
    **dict.fromkeys(PEERS, {}),
}
# Decodes: sequences, and keys of each on a GPU.
DECODES = (8, 65536), (1, 65536)
# Bytes that one rank sends another where links are measured.
LINK_BYTES = 32 << 20


@dataclass(frozen=True)
class Case:
    """A batch of documents. window: keys to the left, -1 for all."""

    name: str
    lengths: tuple[int, ...]
    window: int = -1
    layout: str = "zigzag"


def cases(ranks: int, seeds: int = 5) -> list[Case]:
    """Those that say most first."""
    first, last = (16384, 8192) if ranks > 2 else (8192, 16384)
    causal = [Case(f"causal, {n} a GPU", (n * ranks,)) for n in (first, 32768, last)]
    documents = [
        Case(
            f"64 documents of {32 * ranks}k, seed {seed}",
            log_normal(64, 32768 * ranks, seed),
            layout="documents",
        )
        for seed in range(seeds)
    ]
    window = Case(f"window 1024 of {32 * ranks}k", (32768 * ranks,), 1024, "contiguous")
    return [causal[0], *documents[:1], window, causal[1], *documents[1:], causal[2]]


def log_normal(count: int, total: int, seed: int, sigma: float = 1.2) -> tuple[int, ...]:
    """Lengths that are distributed so, and together as long as told."""
    drawn = np.random.default_rng(seed).lognormal(0.0, sigma, count)
    lengths = np.maximum(1, np.floor(drawn / drawn.sum() * total)).astype(int)
    lengths[lengths.argmax()] += total - lengths.sum()
    return tuple(int(length) for length in lengths)


class Work:
    """One side's call: forward, and forward with backward."""

    def __init__(self, call: Callable[..., Tensor], tensors: list[Tensor], dout: Tensor):
        self._call, self._dout = call, dout
        self._leaves = [x.detach().requires_grad_() for x in tensors]

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self._call(*self._leaves)

    def both(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self._call(*self._leaves), self._leaves, self._dout)

    def times(self, together: bool) -> list[float]:
        """Medians in milliseconds: forward, with backward; the same two as graphs. together: all
        ranks begin each call at once."""
        found = []
        for make in (lambda call: call, captured):
            for call in map(make, (self.forward, self.both)):
                call()
                once = torch.tensor(_timed(call, together), device=self._dout.device)
                if together:
                    dist.all_reduce(once, dist.ReduceOp.MAX)
                rounds = int(min(MOST, max(FEWEST, MILLISECONDS / float(once))))
                found.append(statistics.median(_timed(call, together) for _ in range(rounds)))
        return found


def captured(call: Callable[[], Any]) -> Callable[[], None]:
    """Captures a call, and returns the replay of its CUDA graph. Meanwhile other threads may use
    the GPU."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        call()
    return graph.replay


def _timed(call: Callable[[], Any], together: bool) -> float:
    torch.cuda.synchronize()
    if together:
        dist.barrier()
        torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def alone(
    case: Case, tensors: list[Tensor], dout: Tensor, times: list[float]
) -> tuple[Work, list[float]]:
    """The whole batch on one GPU, by the faster way, and its times, or those that are known."""
    window = case.window, 0
    ends = np.cumsum((0, *case.lengths), dtype=np.int32)
    cu_seqlens = torch.from_numpy(ends).to(dout.device)
    longest = max(case.lengths)

    def packed(q, k, v):
        lengths = cu_seqlens, cu_seqlens, longest, longest
        return flash_attn_varlen_func(q, k, v, *lengths, causal=True, window_size=window)

    def dense(q, k, v):
        out = flash_attn_func(q[None], k[None], v[None], causal=True, window_size=window)
        return out[0]

    if times:
        return Work(packed, tensors, dout), times
    ways = [packed] if len(case.lengths) > 1 else [packed, dense]
    timed = [(work, work.times(False)) for work in (Work(w, tensors, dout) for w in ways)]
    return timed[0][0], [min(same) for same in zip(*(t for _, t in timed), strict=True)]


def spread(case: Case, made: Any, tensors: list[Tensor], dout: Tensor) -> Work:
    """This rank's part."""

    def call(q, k, v):
        if isinstance(made, Peer):
            return made.call(q, k, v)
        return attention(q, k, v, made, causal=True, window_size=(case.window, 0))

    return Work(call, [made.shard(x) for x in tensors], made.shard(dout))


def _is_near(got: Tensor, want: Tensor) -> bool:
    # The one GPU rounds once; ranks round each of their parts, taken to be at most as large as the
    # largest value, and the sum: by half an eps each.
    roundings = 2 + dist.get_world_size()
    largest = roundings / 2 * torch.finfo(want.dtype).eps * want.abs().max()
    return bool((got - want).abs().max() <= largest)


@dataclass(frozen=True)
class Links:
    """Bytes a second that a GPU gets from others: by the group's backend, and by copies out of
    another's memory, 0 where there are none."""

    send: float
    copy: float

    def __str__(self) -> str:
        return f"{self.send / 1e9:7.0f} {self.copy / 1e9:7.0f}"


def links(device: torch.device) -> Links:
    """Measured by all ranks together."""
    ranks = dist.get_world_size()
    counts = [LINK_BYTES] * ranks
    rows = torch.empty(sum(counts), dtype=torch.uint8, device=device)
    into = torch.empty_like(rows)
    foreign = LINK_BYTES * (ranks - 1)
    send = _median(lambda: swap(None, rows, counts, counts, into).wait())
    found, _ = peers_of(None, LINK_BYTES)
    if found is None:
        return Links(foreign / send * 1e3, 0.0)
    rank = dist.get_rank()
    pairs = [
        (into[:LINK_BYTES], found.view(other % ranks, 0, (LINK_BYTES,), torch.uint8))
        for other in range(rank + 1, rank + ranks)
    ]

    def copies() -> None:
        event = torch.cuda.Event()
        event.record()
        found.pull(pairs, event, True).wait()

    return Links(foreign / send * 1e3, foreign / _median(copies) * 1e3)


def _median(call: Callable[[], Any]) -> float:
    """Milliseconds of the slowest rank."""
    call()
    found = statistics.median(_timed(call, True) for _ in range(11))
    slowest = torch.tensor(found, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def planned(case: Case, way: str) -> tuple[Any, float]:
    """A plan or a peer, and the milliseconds that it took."""
    start = time.perf_counter()
    if way in PEERS:
        return PEERS[way](case.lengths, case.window), 0.0
    made = plan(
        lengths=case.lengths,
        heads_q=HEADS,
        heads_k=HEADS_K,
        head_dim=DIM,
        window_size=(case.window, 0),
        layout=case.layout,
        **WAYS[way],
    )
    return made, (time.perf_counter() - start) * 1e3


def token_times(made: Any, whole: Tensor, out: Tensor) -> tuple[float, float]:
    """Milliseconds of shard, and of unshard. out: of the whole batch."""
    mine = made.shard(out)
    return _median(lambda: made.shard(whole)), _median(lambda: made.unshard(mine))


def more_memory(call: Callable[[], Any], made: Any) -> float:
    """MiB that a call takes at most beside what there was, with what ranks share."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = call()
    torch.cuda.synchronize()
    del found
    peers = getattr(made, "peers", None)
    shared = peers.size if peers else 0
    return (torch.cuda.max_memory_allocated() - before + shared) / 2**20


def predicted(made: Any) -> tuple[float, float]:
    """Milliseconds of a replayed forward, and with its backward; NaN of others' schedules."""
    if isinstance(made, Peer):
        return math.nan, math.nan
    told = made.mask, made.heads, (DIM, DIM), 2
    if made.grid is not None:
        found = cost.in_grid(made.grid.shards, made.grid.row.ranks, *told)
    else:
        found = cost.times(made.layout, *told, made.peers is not None)[made.strategy]
    return found.forward * 1e3, found.both * 1e3


def rows(
    case: Case,
    device: torch.device,
    measured: Links,
    ways: Sequence[str],
    known: dict[str, list[float]],
) -> Iterator[str]:
    """Lines of a case, on rank 0; the other ranks take part. known: times of one GPU by the case's
    name, which are kept there."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    total = sum(case.lengths)
    shapes = [(total, heads, DIM) for heads in (HEADS, HEADS_K, HEADS_K, HEADS)]
    q, k, v, dout = (torch.randn(s, device=device, dtype=torch.bfloat16) for s in shapes)
    whole, times = None, []
    if rank == 0:
        whole, times = alone(case, [q, k, v], dout, known.get(case.name, []))
        known[case.name] = times
    want = (whole.forward(), *whole.both()) if whole else ()
    dist.barrier()
    for way in ways:
        words = f"{case.name:34} {way:12} {case.layout:10}"
        try:
            made, took = planned(case, way)
        except ValueError as error:
            if rank == 0:
                yield f"{words} refused: {error}"
            continue
        work = spread(case, made, [q, k, v], dout)
        got = [made.unshard(x) for x in (work.forward(), *work.both())]
        slowest = torch.tensor(work.times(True), device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        spent = token_times(made, q, got[0])
        memory = [more_memory(call, made) for call in (work.forward, work.both)]
        if rank == 0:
            if not all(_is_near(x, y) for x, y in zip(got, want, strict=True)):
                yield f"{words} wrong"
                continue
            columns = [
                f"{one:9.3f} {float(most):9.3f} {one / (ranks * float(most)):6.3f}"
                for one, most in zip(times, slowest, strict=True)
            ]
            balance = math.nan if way in PEERS else made.layout.balance(made.mask)
            columns += [f"{ms:9.3f}" for ms in predicted(made)]
            columns += [f"{balance:8.3f}"]
            columns += [f"{took:8.1f} {spent[0]:8.3f} {spent[1]:8.3f} {measured}"]
            columns += [f"{mib:8.0f}" for mib in memory]
            yield f"{words} {' '.join(columns)}"


def decode_row(sequences: int, keys: int, device: torch.device) -> str:
    """A line of one token of each sequence over keys that are spread over ranks, without a new key;
    the time of one GPU is that of all keys."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    def caches(count: int) -> list[Tensor]:
        shape = sequences, count, HEADS_K, DIM
        return [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in "kv"]

    q = torch.randn((sequences, 1, HEADS, DIM), device=device, dtype=torch.bfloat16)
    times: list[list[float]] = []
    if rank == 0:
        k, v = caches(keys * ranks)
        times.append(_decoded(lambda: flash_attn_with_kvcache(q, k, v), False))
        want = flash_attn_with_kvcache(q, k, v)
        first, *others = zip(k.split(keys, 1), v.split(keys, 1), strict=True)
        for other, both in enumerate(others, 1):
            for x in both:
                dist.send(x.contiguous(), other)
        k, v = (x.contiguous() for x in first)
    else:
        k, v = caches(keys)
        for x in (k, v):
            dist.recv(x, 0)
    times.append(_decoded(lambda: attention_with_kvcache(q, k, v), True))
    slowest = torch.tensor(times[-1], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    got = attention_with_kvcache(q, k, v)
    words = f"decode, {sequences} x {keys} keys a GPU"
    if rank:
        return ""
    if not _is_near(got, want):
        return f"{words:34} wrong"
    columns = [
        f"{one:9.3f} {float(most):9.3f} {one / (ranks * float(most)):6.3f}"
        for one, most in zip(times[0], slowest, strict=True)
    ]
    return f"{words:34} {' '.join(columns)}"


def _decoded(call: Callable[[], Any], together: bool) -> list[float]:
    """Medians in milliseconds, as a call and as a graph."""
    found = []
    for run in (call, captured(call)):
        run()
        found.append(statistics.median(_timed(run, together) for _ in range(MOST)))
    return found


def _rank(rank: int, ranks: int, port: int, words: list[str]) -> None:
    # Multicast over NVLink stays off: a machine may lack what it needs.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=ranks)
    measured = links(device)
    ways = [word[1:] for word in words if word[:1] == "="] or [*WAYS]
    names = [word for word in words if word[:1] != "="]
    told = [c for c in cases(ranks) if not names or any(name in c.name for name in names)]
    known: dict[str, list[float]] = {}
    # All cases by the first way come before any by another.
    for some in filter(None, (ways[:1], ways[1:])):
        for case in told:
            for line in rows(case, device, measured, some, known):
                script.say(line)
    if not names or "decode" in names:
        for line in (decode_row(*each, device) for each in DECODES):
            script.say(*([line] if line else []))
    dist.destroy_process_group()


def main() -> None:
    script.current_gpu()
    ranks = torch.cuda.device_count()
    for word in sys.argv[1:]:
        if word[:1] == "=" and word[1:] not in WAYS:
            raise script.Refused(f"a way must be one of {[*WAYS]}, got {word[1:]!r}")
    version = ".".join(map(str, nccl.version()))
    timed = "fwd", "both", "fwd graph", "both grph"
    columns = [f"{'one':>9} {name:>9} {'E':>6}" for name in timed]
    columns += [
        f"{'predicted':>9} {'both':>9} {'balance':>8} {'plan':>8} {'shard':>8} {'unshard':>8}"
    ]
    columns += [f"{'GB/s':>7} {'copied':>7} {'MiB':>8} {'both':>8}"]
    script.say(
        f"{ranks} x {torch.cuda.get_device_name()}, NCCL {version}",
        f"{'case':34} {'way':12} {'layout':10} {' '.join(columns)}",
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = ranks, port, sys.argv[1:]
    spawn(_rank, given, nprocs=ranks)


if __name__ == "__main__":
    script.run(main, __doc__)
