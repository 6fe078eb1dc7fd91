"""Attention of a batch whose tokens are spread over a mesh axis."""

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import jax
from jax import Array, lax
from jax import numpy as jnp
from jax.typing import ArrayLike

from heedful.core.call.arguments import one_sink
from heedful.core.call.numerics import Documents, is_invariant, with_documents, with_numerics
from heedful.jax.base.arrays import check_array
from heedful.jax.distributed import gather, heads, ring
from heedful.jax.distributed.calls import Rest, Static
from heedful.jax.distributed.layouts import axes_of, chunk_size
from heedful.jax.operands.plain import seed_words
from heedful.jax.traced.sharding import alike

STRATEGIES: dict[str, ModuleType] = {
    "gather": gather,
    "heads": heads,
    "ring": ring,
    "heads x ring": heads,
}


def attention(
    q: Array,
    k: Array,
    v: Array,
    axis_name: str | tuple[str, str],
    *,
    strategy: str = "gather",
    layout: str = "zigzag",
    cu_seqlens: Array | None = None,
    max_seqlen: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    key_ranges: Array | Documents | None = None,
    sink: Array | None = None,
    s_aux: Array | None = None,
    learnable_sink: Array | None = None,
    return_lse: bool = False,
    dropout_seed: ArrayLike | None = None,
    dropout_origin: Sequence[ArrayLike] = (0, 0),
    backend: str | None = None,
    numerics: str | None = None,
    sm_margin: int | None = None,
) -> Any:
    """The attention of a whole batch, of which each device of a mesh axis has some tokens, as
    `flash_attn_func` computes it; it runs under `shard_map` over that axis. Arguments that are not
    listed are that function's.

    A device returns the rows of its own queries, and in the backward the gradients of its own
    tokens. A gradient of a sink is summed over devices where `shard_map` knows that they share it.

    Args:
        q, k, v: (batch, tokens, heads, head_dim), this device's tokens, in the order of `layout`
            (`heedful.jax.distributed.shard`); or with cu_seqlens (tokens, heads, head_dim). All
            devices have equally many, of queries as of keys.
        axis_name: the mesh axis; under "heads x ring" two, the ring's and that of heads, over which
            tokens are spread in this order.
        strategy: "gather": every device gathers all keys and values. "heads": devices exchange
            tokens for heads. "ring": a device has the keys of one other at a time, and merges
            parts in float32. "heads x ring": both, each over an axis.
        layout: "zigzag", which balances causal masks, or "contiguous".
        cu_seqlens: int32 (documents + 1,), the same on all devices, which may be traced: where in
            the whole packed batch documents begin and end. Tokens past the last give 0.
        max_seqlen: int, at least the longest document; with cu_seqlens alone.
        key_ranges: with rows of this device's queries, and positions of the whole sequence's keys.
        dropout_origin: (batch, head) of this device's first score, where these are spread, too.
            Documents take no dropout.

    Returns:
        out of this device's rows, as q with v's head_dim; with return_lse also the log-sum-exp,
        float32 (batch, heads_q, tokens), or (heads_q, tokens) of packed documents.

    Raises:
        TypeError, ValueError: naming the argument, where the call is traced.
    """
    sink = one_sink(sink, s_aux, learnable_sink)
    _check(q, k, v, cu_seqlens, max_seqlen, dropout_p)
    names = axes_of(axis_name, strategy, STRATEGIES)
    devices, each = lax.axis_size(names[0]), lax.axis_size(names[1]) if names[1] else 1
    tokens = q.shape[0 if max_seqlen is not None else 1] * each
    chunk_size(layout, devices, tokens * devices, "q")
    option = with_numerics(backend, numerics, sm_margin)
    option, key_ranges = with_documents(option, key_ranges)
    if "ring" in strategy and is_invariant(option):
        raise ValueError(f"numerics must be 'fast' under strategy {strategy!r}: it merges parts")
    options: dict[str, Any] = {
        "dropout_p": dropout_p,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": tuple(window_size),
        "softcap": softcap,
        "deterministic": deterministic,
        "backend": option,
    }
    counts = q.shape[-2], k.shape[-2]
    static = Static(strategy, *names, layout, max_seqlen, counts, tuple(options.items()))
    origin = None
    if dropout_p:
        batch, head = dropout_origin
        origin = jnp.stack([jnp.asarray(batch, jnp.uint32), jnp.asarray(head, jnp.uint32)])
    seed = None if dropout_seed is None else seed_words(dropout_seed)
    rest = Rest(cu_seqlens, alibi_slopes, key_ranges, seed, origin)
    # A cast to varying has a derivative that sums over devices.
    told = tuple(name for name in names if name)
    marked = lax.pcast(jnp.zeros((), q.dtype), told, to="varying")
    q, k, v, sink, rest, _ = alike((q, k, v, sink, rest, marked))
    results: Any = _attention(static, q, k, v, sink, rest)
    return results if return_lse else results[0]


def _check(q, k, v, cu_seqlens, max_seqlen, dropout_p) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_array(name, array)
        rank = 4 if cu_seqlens is None else 3
        if array.ndim != rank:
            dims = "(batch, tokens, heads, head_dim)" if rank == 4 else "(tokens, heads, head_dim)"
            raise ValueError(f"{name} must be {dims}, got shape {array.shape}")
    if (cu_seqlens is None) != (max_seqlen is None):
        raise ValueError("max_seqlen must be given with cu_seqlens, and not without it")
    if k.shape[:-2] != q.shape[:-2]:
        raise ValueError(f"k must have q's tokens {q.shape[:-2]}, got {k.shape[:-2]}")
    if cu_seqlens is not None and dropout_p:
        raise ValueError(f"dropout_p must be 0 with cu_seqlens, got {dropout_p}")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: Static, q, k, v, sink, rest: Rest) -> tuple[Array, Array]:
    return _forward(static, q, k, v, sink, rest)[0]


def _forward(static: Static, q, k, v, sink, rest: Rest):
    return STRATEGIES[static.strategy].forward(static, q, k, v, sink, rest)


def _backward(static: Static, kept, cotangents):
    return *STRATEGIES[static.strategy].backward(static, kept, *cotangents), None


_attention.defvjp(_forward, _backward)
