"""Two processes between which torch's context parallelism sends keys, each part of them by
heedful's kernels: results are those of one call. Writes a line a rank."""

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs
from torch.multiprocessing.spawn import start_processes

from heedful.integrations.torch import registry

OPERATORS = {"flash": (), "cudnn": (None, True)}


def call(kernel: str, q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Torch's operator, which torch spreads over the mesh where q, k and v are."""
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
    return operator(q, k, v, *OPERATORS[kernel], 0.0, causal)[0]


def work(rank: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    registry._activate("CPU")
    torch.manual_seed(0)
    whole: list[Any] = [torch.randn(1, 4, 16, 16, requires_grad=True) for _ in "qkv"]
    dout = torch.randn(1, 4, 16, 16)
    torchs._cp_options.enable_load_balance = False
    for kernel in OPERATORS:
        for causal in (False, True):
            out = call(kernel, *whole, causal=causal)
            wanted = out, *torch.autograd.grad(out, whole, dout)
            parts: list[Any] = [
                distribute_tensor(x.detach(), mesh, [Shard(2)]).requires_grad_() for x in whole
            ]
            torchs._enable_context_parallel_dispatcher_impl(2, mesh)
            made = call(kernel, *parts, causal=causal)
            grads = torch.autograd.grad(made, parts, distribute_tensor(dout, mesh, [Shard(2)]))
            torchs._disable_context_parallel_dispatcher_impl()
            results: list[Any] = [made, *grads]
            for got, want in zip(results, wanted, strict=True):
                torch.testing.assert_close(got.full_tensor(), want)
    dist.destroy_process_group()
    assert registry._active is not None
    counts = registry._active.report.ours
    # Each call and its gradient runs once by itself, and in the ring on one part of the keys or
    # two: by rank, as a causal mask hides others.
    assert all(counts[name] >= 2 * 2 for name in counts) and len(counts) == 4, counts
    sys.stdout.write("agrees\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        # Forked, as to import torch takes longer than all they do.
        start_processes(work, (f"{folder}/store",), nprocs=2, start_method="fork")
