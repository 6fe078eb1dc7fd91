"""DTensors as q, k and v of `attention`: each rank's part is what `plan.shard` gives it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def local_rows(
    rows: dict[str, Any], plan: Any
) -> tuple[list[Tensor], Callable[[Tensor, int], DTensor]]:
    """This rank's parts of q, k and v, and a function that makes a DTensor of a result whose rows
    are in a dim. Differentiable.

    Raises ValueError unless each is sharded along its rows alone, over the plan's ranks.
    """
    for name, x in rows.items():
        if not isinstance(x, DTensor):
            raise ValueError(f"{name} must be a DTensor, as another of q, k and v is")
        placement = (Shard(x.ndim - 3),)
        if x.placements != placement:
            raise ValueError(f"{name} must be placed as {placement}, got {x.placements}")
        mesh = x.device_mesh
        if mesh.size() != plan.ranks or mesh.get_local_rank() != plan.rank:
            raise ValueError(f"{name} must lie on the plan's {plan.ranks} ranks, got {mesh}")
    q = rows["q"]
    mesh, count = q.device_mesh, q.shape[-3]

    def made(x: Tensor, dim: int) -> DTensor:
        shape = torch.Size([*x.shape[:dim], count, *x.shape[dim + 1 :]])
        whole = torch.empty(shape, device="meta")
        return DTensor.from_local(
            x.contiguous(), mesh, [Shard(dim)], shape=shape, stride=whole.stride()
        )

    return [x.to_local() for x in rows.values()], made
