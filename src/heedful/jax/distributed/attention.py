"""Attention of a batch whose tokens are spread over a mesh axis, by gathering keys and values.

Each chunk of queries meets all its keys in one call, so nothing is merged and a sink enters once.
Gradients of keys and values are summed over devices in float32, where the derivative of a gather
would sum in their dtype.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax import numpy as jnp
from jax.typing import ArrayLike

from heedful.core.call.arguments import one_sink
from heedful.core.call.numerics import with_numerics
from heedful.jax.api.attention import flash_attn_func, flash_attn_varlen_func
from heedful.jax.api.gradients import attention_backward
from heedful.jax.base.arrays import check_array
from heedful.jax.distributed.layouts import chunk_begins, chunk_size, gathered, scattered
from heedful.jax.operands.plain import seed_words
from heedful.jax.traced.sharding import alike


class _Static(NamedTuple):
    """All that is the same for each token. options: of the attention functions, by name."""

    axis_name: str
    layout: str
    max_seqlen: int | None
    options: tuple[tuple[str, Any], ...]

    @property
    def tokens(self) -> int:
        """The axis of tokens in q, k and v."""
        return 1 if self.max_seqlen is None else 0


class _Rest(NamedTuple):
    """Arrays without a gradient. key_ranges: with this device's rows."""

    cu_seqlens: Any = None
    alibi_slopes: Any = None
    key_ranges: Any = None
    seed: Any = None
    origin: Any = None


def attention(
    q: Array,
    k: Array,
    v: Array,
    axis_name: str,
    *,
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
    key_ranges: Array | None = None,
    sink: Array | None = None,
    s_aux: Array | None = None,
    learnable_sink: Array | None = None,
    return_lse: bool = False,
    dropout_seed: ArrayLike | None = None,
    dropout_origin: Sequence[ArrayLike] = (0, 0),
    backend: str | None = None,
    numerics: str | None = None,
) -> Any:
    """The attention of a whole batch, of which each device of a mesh axis has some tokens, as
    `flash_attn_func` computes it; it runs under `shard_map` over that axis. Arguments that are not
    listed are that function's.

    Every device gathers all keys and values; it returns the rows of its own queries, and in the
    backward the gradients of its own tokens. A gradient of a sink is summed over devices where
    `shard_map` knows that they share it.

    Args:
        q, k, v: (batch, tokens, heads, head_dim), this device's tokens, in the order of `layout`
            (`heedful.jax.distributed.shard`); or with cu_seqlens (tokens, heads, head_dim). All
            devices have equally many, of queries as of keys.
        axis_name: the mesh axis.
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
    devices, tokens = lax.axis_size(axis_name), q.shape[0 if max_seqlen is not None else 1]
    chunk_size(layout, devices, tokens * devices, "q")
    options: dict[str, Any] = {
        "dropout_p": dropout_p,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": tuple(window_size),
        "softcap": softcap,
        "deterministic": deterministic,
        "backend": with_numerics(backend, numerics),
    }
    static = _Static(axis_name, layout, max_seqlen, tuple(options.items()))
    origin = None
    if dropout_p:
        batch, head = dropout_origin
        origin = jnp.stack([jnp.asarray(batch, jnp.uint32), jnp.asarray(head, jnp.uint32)])
    seed = None if dropout_seed is None else seed_words(dropout_seed)
    rest = _Rest(cu_seqlens, alibi_slopes, key_ranges, seed, origin)
    # A cast to varying has a derivative that sums over devices.
    marked = lax.pcast(jnp.zeros((), q.dtype), axis_name, to="varying")
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


class _Chunk(NamedTuple):
    """Some consecutive queries of this device. first, count: its rows. more: their arguments."""

    first: int
    count: int
    more: dict[str, Any]

    def of(self, x: Any, axis: int) -> Any:
        """The rows of an array."""
        return lax.slice_in_dim(x, self.first, self.first + self.count, axis=axis)


def _chunks(static: _Static, q: Array, rest: _Rest) -> list[_Chunk]:
    tokens = q.shape[static.tokens]
    begins = chunk_begins(tokens, static.axis_name, static.layout)
    each, chunks = tokens // len(begins), []
    for index, begin in enumerate(begins):
        more: dict[str, Any] = {"alibi_slopes": rest.alibi_slopes, "q_offset": begin}
        if rest.cu_seqlens is not None:
            assert static.max_seqlen is not None
            bounds = rest.cu_seqlens.astype(jnp.int32)
            more |= {
                "cu_seqlens_q": jnp.clip(bounds - begin, 0, each),
                "cu_seqlens_k": bounds,
                "max_seqlen_q": min(static.max_seqlen, each),
                "max_seqlen_k": static.max_seqlen,
                "q_offset": jnp.maximum(begin - bounds[:-1], 0),
            }
        if rest.origin is not None:
            more |= {
                "dropout_seed": rest.seed,
                "dropout_origin": (rest.origin[0], rest.origin[1], begin, 0),
            }
        chunk = _Chunk(index * each, each, more)
        if rest.key_ranges is not None:
            more["key_ranges"] = chunk.of(rest.key_ranges, rest.key_ranges.ndim - 2)
        chunks.append(chunk)
    return chunks


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: _Static, q, k, v, sink, rest: _Rest) -> tuple[Array, Array]:
    (out, lse), _ = _forward(static, q, k, v, sink, rest)
    return out, lse


def _forward(static: _Static, q, k, v, sink, rest: _Rest):
    axis, packed = static.tokens, static.max_seqlen is not None
    all_k, all_v = (gathered(x, static.axis_name, static.layout, axis) for x in (k, v))
    function: Any = flash_attn_varlen_func if packed else flash_attn_func
    made = [
        function(
            chunk.of(q, axis),
            all_k,
            all_v,
            sink=sink,
            return_lse=True,
            **dict(static.options),
            **chunk.more,
        )
        for chunk in _chunks(static, q, rest)
    ]
    outs, lses = zip(*made, strict=True)
    out, lse = jnp.concatenate(outs, axis), jnp.concatenate(lses, -1)
    return (out, lse), (q, k, v, sink, rest, out, lse)


def _backward(static: _Static, kept, cotangents):
    q, k, v, sink, rest, out, lse = kept
    dout, dlse = cotangents
    axis = static.tokens
    all_k, all_v = (gathered(x, static.axis_name, static.layout, axis) for x in (k, v))
    dq, dsink, sums = [], None, None
    for chunk in _chunks(static, q, rest):
        grads = attention_backward(
            chunk.of(dout, axis),
            chunk.of(q, axis),
            all_k,
            all_v,
            chunk.of(out, axis),
            chunk.of(lse, lse.ndim - 1),
            dlse=chunk.of(dlse, lse.ndim - 1),
            sink=sink,
            **dict(static.options),
            **chunk.more,
        )
        dq.append(grads.dq)
        parts = [grad.astype(jnp.float32) for grad in (grads.dk, grads.dv)]
        sums = parts if sums is None else [a + b for a, b in zip(sums, parts, strict=True)]
        if sink is not None:
            dsink = grads.dsink if dsink is None else dsink + grads.dsink
    assert sums is not None
    dk, dv = (
        scattered(total, static.axis_name, static.layout, axis).astype(x.dtype)
        for total, x in zip(sums, (k, v), strict=True)
    )
    return jnp.concatenate(dq, axis), dk, dv, dsink, None


_attention.defvjp(_forward, _backward)
