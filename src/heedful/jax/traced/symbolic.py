"""Calls of a batch that is not known when they are traced, as `jax.export` has it: one entry of the
batch after the other."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from heedful.core.call.arguments import Options, argument_name
from heedful.core.call.operands import Operands
from heedful.jax.base.arrays import is_traced

# Operands of which each batch entry has its own where they have so many dims.
_OF_BATCH = {"q": 4, "k": 4, "v": 4, "bias": 4, "alibi_slopes": 2}
_OF_BATCH |= {"seqused_q": 1, "seqused_k": 1, "leftpad_k": 1, "q_offsets": 1}
_OF_BATCH |= {"origins": 2}
_OF_BATCH |= {"q_descale": 2, "k_descale": 2, "v_descale": 2}


def is_symbolic(x: Operands) -> bool:
    """Whether a size of q, k or v is a symbol."""
    return any(size.__class__ is not int for array in x[:3] for size in jnp.shape(array))


def check_known(x: Operands, kind: str) -> None:
    """ValueError for a symbol among the sizes of operands, but for the batch of a dense call."""
    for name, array in x._asdict().items():
        if array is None:
            continue
        shape, of_batch = jnp.shape(array), kind == "dense" and name in _OF_BATCH
        known = shape[1:] if of_batch and len(shape) == _OF_BATCH[name] else shape
        if any(size.__class__ is not int for size in known):
            raise ValueError(
                f"{argument_name(name, kind)} must have sizes that are known when it is traced, but"
                f" for the batch of dense attention, got {tuple(shape)} (export once for each size)"
            )


def one_by_one(run: Callable[..., tuple], x: Operands, options: Options, seed: Any) -> tuple:
    """The results of `run(x, options, seed)`, each stacked, of each entry of a batch.

    Raises ValueError naming the argument.
    """
    check_known(x, options.kind)
    batch, of_entry = x.q.shape[0], {}
    for name, rank in _OF_BATCH.items():
        array = getattr(x, name)
        if array is None or array.ndim != rank:
            continue
        if array.shape[0] == batch:
            of_entry[name] = jnp.asarray(array)
        elif name in ("k", "v") or array.shape[0] != 1:
            raise ValueError(f"{name} must have q's batch {batch}, got {array.shape[0]}")

    def entry(parts):
        index, arrays = parts
        whole = x._replace(**{name: array[None] for name, array in arrays.items()})
        return run(whole, options if "origins" in arrays else _at(options, index), seed)

    results = lax.map(entry, (jnp.arange(batch, dtype=jnp.uint32), of_entry))
    return tuple(r[:, 0] if r.ndim > 2 else jnp.zeros((0,), r.dtype) for r in results)


def _at(options: Options, index: jax.Array) -> Options:
    """The options of a batch entry, which has its own part of the dropout mask."""
    origin = options.dropout_origin
    if not options.dropout_p or (not is_traced(origin) and len(origin) != 4):
        return options
    if is_traced(origin):
        return options._replace(dropout_origin=origin + jnp.stack([index, *[index * 0] * 3]))
    first = jnp.asarray(origin[0], jnp.uint32) + index
    return options._replace(dropout_origin=(first, *origin[1:]))
