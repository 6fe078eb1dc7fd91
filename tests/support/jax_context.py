"""A built case by `heedful.jax.distributed` over the CPU devices of this process."""

from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from heedful.jax.distributed import attention, shard, unshard
from heedful.reference.convert import as_numpy
from support.problems.budget import Results
from support.problems.cases import Built
from support.runs.jax_api import LEAVES, as_jax
from support.runs.jax_backend import as_tensor

DEVICES = 4
AXIS = "tokens"
# The axes of the ring and of heads, where these are two.
AXES = ("rings", "heads")
# Arrays whose dim of tokens is not the first that follows the batch.
_AXES = {"lse": -1, "dlse": -1, "key_ranges": -2}


def mesh_of(strategy: str) -> tuple[Mesh, Any, int]:
    """The mesh, the axes of tokens and how many devices a layout is for."""
    devices = np.array(jax.devices()[:DEVICES])
    if strategy == "heads x ring":
        return Mesh(devices.reshape(2, -1), AXES), AXES, 2
    return Mesh(devices, (AXIS,)), AXIS, DEVICES


def results(
    built: Built, layout: str, check_vma: bool = True, strategy: str = "gather", **more: Any
) -> Results:
    """Results and gradients of a case whose queries have the lengths of its keys. Tokens of no
    document fill up what devices have. more: further arguments."""
    mesh, axes, devices = mesh_of(strategy)
    packed = bool(built.case.varlen)
    axis = 0 if packed else 1
    given = {n: as_jax(t) for n, t in built.x._asdict().items() if t is not None}
    given |= {
        n: as_jax(t) for n, t in (("dout", built.dout), ("dlse", built.dlse)) if t is not None
    }
    bounds = given.pop("cu_seqlens_q", None)
    given.pop("cu_seqlens_k", None)
    tokens = given["q"].shape[axis]
    missing = -tokens % (2 * DEVICES)
    assert packed or not missing

    def spread(name: str, array: jax.Array) -> jax.Array:
        at = _AXES.get(name, axis) % array.ndim
        widths = [(0, missing if dim == at else 0) for dim in range(array.ndim)]
        return shard(jnp.pad(array, widths), devices, layout, at)

    def spec(name: str, rank: int) -> PartitionSpec:
        if name in ("sink", "alibi_slopes", "seed", "dsink"):
            return PartitionSpec()
        at = _AXES.get(name, axis) % rank
        return PartitionSpec(*[axes if dim == at else None for dim in range(rank)])

    arrays = {
        name: array if spec(name, array.ndim) == PartitionSpec() else spread(name, array)
        for name, array in given.items()
    }

    def run(arrays):
        cotangents = tuple(arrays.pop(name, None) for name in ("dout", "dlse"))
        leaves = {name: arrays.pop(name) for name in LEAVES if name in arrays}

        def call(leaves):
            given = {"strategy": strategy, **more}
            return _call(built, leaves, arrays, bounds, layout, axes, **given)

        (out, lse), pull = jax.vjp(call, leaves)
        dout, dlse = cotangents
        (grads,) = pull((dout, jnp.zeros_like(lse) if dlse is None else dlse))
        if "sink" in grads and not check_vma:
            # Nobody knows there that devices share it: each has its part.
            grads["sink"] = jax.lax.psum(grads["sink"], axes)
        return {"out": out, "lse": lse} | {f"d{name}": grad for name, grad in grads.items()}

    inputs = {name: spec(name, array.ndim) for name, array in arrays.items()}
    ranks = {f"d{n}": arrays[n].ndim for n in LEAVES if n in arrays}
    ranks |= {"out": arrays["q"].ndim, "lse": arrays["q"].ndim - 1}
    outputs = {name: spec(name, rank) for name, rank in ranks.items()}
    wrapped = jax.shard_map(
        run, mesh=mesh, in_specs=(inputs,), out_specs=outputs, check_vma=check_vma
    )
    found = {}
    for name, array in jax.jit(wrapped)(arrays).items():
        if outputs[name] != PartitionSpec():
            at = _AXES.get(name, axis) % array.ndim
            array = jax.lax.slice_in_dim(unshard(array, devices, layout, at), 0, tokens, axis=at)
        found[name] = as_numpy(as_tensor(array))
    return Results(**found)


def _call(
    built: Built, leaves: dict, rest: dict, bounds: Any, layout: str, axes: Any, **more: Any
) -> Any:
    case, problem = built.case, built.problem
    slopes = rest.get("alibi_slopes")
    if slopes is not None and "b" not in case.alibi:
        slopes = slopes[0]
    documents = {"cu_seqlens": bounds, "max_seqlen": problem.seqlen_q} if case.varlen else {}
    return attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        axes,
        layout=layout,
        causal=case.causal,
        window_size=case.window,
        softcap=case.softcap,
        softmax_scale=case.scale or None,
        alibi_slopes=slopes,
        key_ranges=rest.get("key_ranges"),
        sink=leaves.get("sink"),
        dropout_p=case.dropout_p,
        dropout_seed=rest.get("seed"),
        return_lse=True,
        **documents,
        **more,
    )
