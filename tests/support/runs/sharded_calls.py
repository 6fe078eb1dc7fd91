"""A built case as DTensors, rank after rank."""

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from heedful.reference.convert import as_numpy
from support.problems.budget import Results
from support.problems.cases import Built
from support.runs import api
from support.runs.mesh import joined, on_each_rank, shard

BATCH, HEADS, SAME = Shard(0), Shard(2), Replicate()


def lies(name: str, tensor: Any, places, packed: bool) -> list:
    """Where an array lies if q has these places: what it has no dim for is whole."""
    dims = {"q": "bmhd", "k": "bnhd", "v": "bnhd", "out": "bmhd", "lse": "bhm", "probs": "bhmn"}
    dims |= {"bias": "bhmn", "alibi_slopes": "bh", "sink": "h", "rel_bias": "h-"}
    dims |= {"origins": "b-"}
    letters = dims[name]
    if packed and name in ("q", "k", "v", "out"):
        letters = letters[1:]
    elif packed and name == "lse":
        letters = "hm"
    letters = letters[-tensor.dim() :]
    wanted = {BATCH: "b", HEADS: "h", Shard(1): "h" if packed else "?"}
    return [
        Shard(letters.index(wanted[place]))
        if place != SAME
        and wanted[place] in letters
        and (name != "bias" or tensor.shape[letters.index(wanted[place])] > 1)
        else SAME
        for place in places
    ]


def results(built: Built, shape: tuple[int, ...], places: list) -> Results:
    """What the ranks of a mesh of this shape make together of a case whose q has these places.
    AssertionError where a result or a gradient has others than it should."""
    packed, slopes = bool(built.case.varlen), api._slopes(built)
    leaves = api._leaves(built)
    found: list[dict[str, Any]] = []

    def work(ranks):
        own = {
            name: shard(leaf, ranks, lies(name, leaf, places, packed), True)
            for name, leaf in leaves.items()
        }
        alibi = shard(slopes, ranks, lies("alibi_slopes", slopes, places, packed))
        origins = built.x.origins
        if origins is not None and not packed:
            origins = shard(origins, ranks, lies("origins", origins, places, packed))
        place = api.origin_of(built, origins)
        returned = api.call(built, own, alibi_slopes=alibi, dropout_origin=place)
        made: dict[str, Any] = dict(zip(("out", "lse", "probs"), returned, strict=False))
        cotangents = {"out": built.dout, "lse": built.dlse}
        grads = torch.autograd.grad(
            [made[name] for name in cotangents],
            list(own.values()),
            [shard(t, ranks, lies(n, t, places, packed)) for n, t in cotangents.items()],
        )
        for name, result in made.items():
            assert list(result.placements) == lies(name, result, places, packed), name
        given: Any = zip(own.items(), grads, strict=True)
        for (name, leaf), grad in given:
            sums = [
                Partial() if p == SAME and q != SAME else p
                for p, q in zip(leaf.placements, places, strict=True)
            ]
            assert list(grad.placements) == sums, name
            made[f"d{name}"] = grad
        found.append(made)

    on_each_rank(shape, work, built.x.q.device.type)
    whole = {
        name: joined([made[name].to_local() for made in found], first.placements, shape)
        for name, first in found[0].items()
    }
    for name, value in whole.items():
        # A DTensor says sizes and strides of the whole.
        like = torch.empty(value.shape, device="meta")
        for said in (made[name] for made in found):
            assert (said.shape, said.stride()) == (like.shape, like.stride()), name
    return Results(**{name: as_numpy(value) for name, value in whole.items()})
