"""The strategy "gather": each device gathers all keys and values. A chunk of queries meets all its
keys in one call, so nothing is merged and a sink enters once. Gradients of keys and values are
summed over devices in float32, where the derivative of a gather would sum in their dtype.
"""

from jax import Array

from heedful.jax.distributed.calls import (
    Rest,
    Rows,
    Static,
    all_keys_gradients,
    over_all_keys,
    tree_cast,
)
from heedful.jax.distributed.layouts import chunk_begins, gathered, scattered


def _chunks(static: Static, q: Array) -> list[Rows]:
    tokens = q.shape[static.tokens]
    begins = chunk_begins(tokens, static.axis_name, static.layout)
    each = tokens // len(begins)
    return [Rows(n * each, begin, each) for n, begin in enumerate(begins)]


def _all(static: Static, x: Array) -> Array:
    return gathered(x, static.axis_name, static.layout, static.tokens)


def forward(static: Static, q, k, v, sink, rest: Rest):
    """(out, lse), and what `backward` wants."""
    every = _all(static, k), _all(static, v)
    out, lse = over_all_keys(static, q, *every, sink, rest, _chunks(static, q))
    return (out, lse), (q, k, v, sink, rest, out, lse)


def backward(static: Static, kept, dout, dlse):
    """dq, dk, dv and dsink."""
    q, k, v, *others = kept
    whole = q, _all(static, k), _all(static, v), *others
    dq, *sums, dsink = all_keys_gradients(static, whole, dout, dlse, _chunks(static, q))
    sums = [scattered(x, static.axis_name, static.layout, static.tokens) for x in sums]
    return dq, *tree_cast(sums, [k, v]), dsink
