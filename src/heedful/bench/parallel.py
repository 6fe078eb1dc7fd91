"""Context parallelism over the GPUs of this machine, beside one of them.

    python -m heedful.bench.parallel [WORDS]

E is the time of one GPU over the number of GPUs times the time of the slowest: 1 is what separate
devices would give. One GPU computes the whole batch in its own order, by the faster of
flash_attn_func and flash_attn_varlen_func, while the others are idle. Shards are laid out before. A
row exists only if what ranks computed is near what the one computed. Times are medians, in
milliseconds; bfloat16. First come calls, whose launches the host makes while devices work, then
replays of CUDA graphs of both sides. WORDS: only cases whose names have one of them.
"""

import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import nccl
from torch.multiprocessing.spawn import spawn

from heedful import flash_attn_func, flash_attn_varlen_func
from heedful.bench.harness import script
from heedful.distributed import ContextPlan, attention, plan
from heedful.distributed.plan import STRATEGIES

# Calls of which a median is taken: as many as take so many milliseconds, within these bounds.
MILLISECONDS, FEWEST, MOST = 400.0, 7, 50
HEADS, HEADS_K, DIM = 32, 8, 128


@dataclass(frozen=True)
class Case:
    """A batch of documents. window: keys to the left, -1 for all."""

    name: str
    lengths: tuple[int, ...]
    window: int = -1
    layout: str = "zigzag"


def cases(ranks: int, seeds: int = 5) -> Iterator[Case]:
    for each in (8192, 16384, 32768):
        yield Case(f"causal, {each} a GPU", (each * ranks,))
    for seed in range(seeds):
        lengths = log_normal(64, 32768 * ranks, seed)
        yield Case(f"64 documents of {32 * ranks}k, seed {seed}", lengths, layout="documents")
    yield Case(f"window 1024 of {32 * ranks}k", (32768 * ranks,), 1024, "contiguous")


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


def alone(case: Case, tensors: list[Tensor], dout: Tensor) -> tuple[Work, list[float]]:
    """The whole batch on one GPU, by the faster way, and its times."""
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

    ways = [packed] if len(case.lengths) > 1 else [packed, dense]
    timed = [(work, work.times(False)) for work in (Work(w, tensors, dout) for w in ways)]
    return timed[0][0], [min(same) for same in zip(*(t for _, t in timed), strict=True)]


def spread(case: Case, made: ContextPlan, tensors: list[Tensor], dout: Tensor) -> Work:
    """This rank's part."""

    def call(q, k, v):
        return attention(q, k, v, made, causal=True, window_size=(case.window, 0))

    return Work(call, [made.shard(x) for x in tensors], made.shard(dout))


def _is_near(got: Tensor, want: Tensor) -> bool:
    # The one GPU rounds once; ranks round each of their parts, taken to be at most as large as the
    # largest value, and the sum: by half an eps each.
    roundings = 2 + dist.get_world_size()
    largest = roundings / 2 * torch.finfo(want.dtype).eps * want.abs().max()
    return bool((got - want).abs().max() <= largest)


def rows(case: Case, device: torch.device) -> Iterator[str]:
    """Lines of a case, on rank 0; the other ranks take part."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    total = sum(case.lengths)
    shapes = [(total, heads, DIM) for heads in (HEADS, HEADS_K, HEADS_K, HEADS)]
    q, k, v, dout = (torch.randn(s, device=device, dtype=torch.bfloat16) for s in shapes)
    whole, times = alone(case, [q, k, v], dout) if rank == 0 else (None, [])
    want = (whole.forward(), *whole.both()) if whole else ()
    dist.barrier()
    for strategy in STRATEGIES:
        start = time.perf_counter()
        made = plan(
            lengths=case.lengths,
            heads_q=HEADS,
            heads_k=HEADS_K,
            head_dim=DIM,
            window_size=(case.window, 0),
            layout=case.layout,
            strategy=strategy,
        )
        planned = (time.perf_counter() - start) * 1e3
        work = spread(case, made, [q, k, v], dout)
        got = [made.unshard(x) for x in (work.forward(), *work.both())]
        slowest = torch.tensor(work.times(True), device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if rank == 0:
            words = f"{case.name:34} {strategy:7} {case.layout:10}"
            if not all(_is_near(x, y) for x, y in zip(got, want, strict=True)):
                yield f"{words} wrong"
                continue
            columns = [
                f"{one:9.3f} {float(most):9.3f} {one / (ranks * float(most)):6.3f}"
                for one, most in zip(times, slowest, strict=True)
            ]
            words = f"{words} {' '.join(columns)}"
            yield f"{words} {made.layout.balance(made.mask):8.3f} {planned:8.1f}"


def _rank(rank: int, ranks: int, port: int, words: list[str]) -> None:
    # Multicast over NVLink stays off: a machine may lack what it needs.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=ranks)
    for case in cases(ranks):
        if not words or any(word in case.name for word in words):
            for line in rows(case, device):
                script.say(line)
    dist.destroy_process_group()


def main() -> None:
    script.current_gpu()
    ranks = torch.cuda.device_count()
    version = ".".join(map(str, nccl.version()))
    measured = "fwd", "both", "fwd graph", "both grph"
    columns = " ".join(f"{'one':>9} {name:>9} {'E':>6}" for name in measured)
    script.say(
        f"{ranks} x {torch.cuda.get_device_name()}, NCCL {version}",
        f"{'case':34} {'strategy':7} {'layout':10} {columns} {'balance':>8} {'plan ms':>8}",
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = ranks, port, sys.argv[1:]
    spawn(_rank, given, nprocs=ranks)


if __name__ == "__main__":
    script.run(main, __doc__)
