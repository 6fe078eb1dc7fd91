"""Ranks of a device mesh, one after the other in this process: torch's fake process group, which
moves nothing. What each rank has is cut here, and put together again, without DTensor's own code.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore


def on_each_rank(
    shape: tuple[int, ...], work: Callable[[DeviceMesh], Any], device: str = "cpu"
) -> list:
    """What `work` returns on each rank of a mesh of this shape, in their order."""
    count = torch.Size(shape).numel()
    found = []
    for rank in range(count):
        dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
        try:
            found.append(work(init_device_mesh(device, shape)))
        finally:
            dist.destroy_process_group()
    return found


def shard(whole: Any, mesh: DeviceMesh, places: Sequence, grad: bool = False) -> Any:
    """A leaf of which this rank has its part."""
    own = whole.detach()
    for index, place in enumerate(places):
        if isinstance(place, Shard):
            own = own.chunk(mesh.size(index), place.dim)[mesh.get_local_rank(index)]
    # No operation makes it: torch keeps what it found for those on the mesh of another rank.
    size, stride = whole.shape, whole.contiguous().stride()
    made = DTensor.from_local(
        own.contiguous(), mesh, list(places), run_check=False, shape=size, stride=stride
    )
    return made.requires_grad_(grad)


def joined(parts: Sequence[Tensor], places: Sequence, shape: Sequence[int]) -> Tensor:
    """The whole of what the ranks of a mesh have, in their order."""
    if not places:
        (whole,) = parts
        return whole
    (place, *rest), (count, *sizes) = places, shape
    step = len(parts) // count
    along = [joined(parts[i * step : (i + 1) * step], rest, sizes) for i in range(count)]
    if isinstance(place, Shard):
        return torch.cat(along, place.dim)
    if isinstance(place, Partial):
        return torch.stack(along).sum(0)
    assert isinstance(place, Replicate)
    assert all(torch.equal(along[0], other) for other in along), "copies that differ"
    return along[0]
