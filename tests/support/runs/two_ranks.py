"""Two processes with a mesh between them, whose results are those of a plain call. Writes a line a
rank."""

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.multiprocessing.spawn import start_processes

from heedful.torch import flash_attn_func


def loss(q, k, v, sink):
    out = flash_attn_func(q, k, v, causal=True, sink=sink, dropout_p=0.3, dropout_seed=5)
    return out.square().sum()


def work(rank: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole: list[Any] = [torch.randn(2, 16, heads, 16) for heads in (4, 2, 2)] + [torch.randn(4)]
    whole = [tensor.requires_grad_() for tensor in whole]
    wanted = loss(*whole)
    grads = torch.autograd.grad(wanted, whole)
    spread: Any = ((Shard(0), Replicate()), (Shard(2), Shard(0)))
    for place, of_sink in spread:
        places = [place, place, place, of_sink]
        parts = [
            distribute_tensor(t.detach(), mesh, [p]) for t, p in zip(whole, places, strict=True)
        ]
        leaves: list[Any] = [leaf.requires_grad_() for leaf in parts]
        made = loss(*leaves)
        torch.testing.assert_close(made.full_tensor(), wanted)
        made.backward()
        for leaf, grad in zip(leaves, grads, strict=True):
            torch.testing.assert_close(leaf.grad.full_tensor(), grad)
        of_sink = Partial() if of_sink == Replicate() else of_sink
        assert leaves[3].grad.placements == (of_sink,)
    dist.destroy_process_group()
    sys.stdout.write("agrees\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        # Forked, as to import torch takes longer than all they do.
        start_processes(work, (f"{folder}/store",), nprocs=2, start_method="fork")
