"""DTensors as q, k and v of calls over ranks: what lies otherwise than in the plan is refused."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from heedful.distributed.shards import local_rows
from support.runs.mesh import on_each_rank, shard

ROWS, HEADS, DIM = 6, 2, 4


def drawn() -> dict[str, Tensor]:
    return {name: torch.randn(ROWS, HEADS, DIM) for name in "qkv"}


def of_ranks(*shape: int, ranks: int = 2, rank: int | None = None, **places: Any) -> list[str]:
    """What `local_rows` says on each rank of a mesh whose tensors lie so; plain where None."""

    def call(mesh) -> str:
        rows: dict[str, Any] = drawn()
        for name, place in places.items():
            rows[name] = rows[name] if place is None else shard(rows[name], mesh, place)
        own = mesh.get_rank() if rank is None else rank
        with pytest.raises(ValueError) as caught:
            local_rows(rows, SimpleNamespace(ranks=ranks, rank=own))
        return str(caught.value)

    return on_each_rank(shape, call)


SPREAD = {"q": [Shard(0)], "k": [Shard(0)], "v": [Shard(0)]}


@pytest.mark.parametrize(
    ("name", "place", "said"),
    [
        ("q", None, "must be a DTensor, as another of q, k and v is"),
        ("v", None, "must be a DTensor, as another of q, k and v is"),
        ("k", [Shard(1)], r"must be placed as \(Shard\(dim=0\),\), got \(Shard\(dim=1\),\)"),
        ("q", [Replicate()], r"must be placed as \(Shard\(dim=0\),\), got \(Replicate\(\),\)"),
    ],
)
def test_what_is_not_sharded_along_its_rows_alone_is_refused(name, place, said):
    for found in of_ranks(2, **{**SPREAD, name: place}):
        assert re.match(f"{name} {said}", found)


@pytest.mark.parametrize("more", [{"ranks": 3}, {"ranks": 1}, {"rank": 5}], ids=str)
def test_ranks_that_are_not_the_plans_are_refused(more):
    for found in of_ranks(2, **SPREAD, **more):
        assert found.startswith(f"q must lie on the plan's {more.get('ranks', 2)} ranks, got ")


def test_a_ranks_part_goes_in_and_a_result_comes_out_as_the_whole():
    whole = drawn()

    def call(mesh):
        spread = {name: shard(x, mesh, [Shard(0)]) for name, x in whole.items()}
        plan = SimpleNamespace(ranks=2, rank=mesh.get_rank())
        own, made = local_rows(spread, plan)
        rows = slice(3 * plan.rank, 3 * plan.rank + 3)
        assert all(torch.equal(x, y[rows]) for x, y in zip(own, whole.values(), strict=True))
        out, lse = made(own[0], 0), made(own[0].sum(-1).T, 1)
        assert out.shape == (ROWS, HEADS, DIM) and lse.shape == (HEADS, ROWS)
        assert out.placements == (Shard(0),) and lse.placements == (Shard(1),)
        assert out.stride() == (HEADS * DIM, DIM, 1) and lse.stride() == (ROWS, 1)
        assert lse.to_local().is_contiguous()

    on_each_rank((2,), call)
