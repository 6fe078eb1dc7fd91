"""Attention as `jax.nn.dot_product_attention` is called."""

from typing import Any

from jax import Array, lax
from jax import numpy as jnp

from heedful.core.base.numbers import wrong_type
from heedful.core.call.arguments import WHOLE, Options
from heedful.core.call.describe import check_dtype, check_shape
from heedful.core.call.operands import Operands
from heedful.jax.base.arrays import check_array, dtype_name
from heedful.jax.operands.plain import plain_flag, plain_int
from heedful.jax.traced.call import run
from heedful.jax.traced.registration import infinite_lse


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """jax.nn.dot_product_attention by heedful's kernels: the same arguments, aligned top left.

    Args:
        query: (batch, seqlen_q, heads_q, head_dim) or (seqlen_q, heads_q, head_dim).
        key, value: (batch, seqlen_k, heads_k, head_dim), or without batch as query; heads_k divides
            heads_q.
        bias: float, broadcastable to (batch, heads_q, seqlen_q, seqlen_k); differentiable.
        mask: bool, as bias: True where a query sees a key. It becomes part of the bias, in memory
            of its own shape.
        scale: default 1 / sqrt(head_dim).
        is_causal: query i sees keys up to i, whatever the lengths.
        query_seq_lengths, key_value_seq_lengths: int32 or int64 (batch,): how many tokens a
            sequence has; rows after them are 0.
        local_window_size: (left, right) keys around key i that query i sees, or one int for both.
        implementation: a backend of heedful's by name, or None.
        return_residual: also return the log-sum-exp (batch, seqlen_q, heads_q) as jax.nn does: in
            key's dtype, and no gradient flows through it. `flash_attn_func(return_lse=True)` has it
            in float32, with its gradient.

    Returns:
        The output in query's shape with value's head_dim, or (output, log-sum-exp). A query that
        sees no key gives 0, where jax.nn gives an average or NaN.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    for name, array in (("query", query), ("key", key), ("value", value)):
        check_array(name, array)
    if query.ndim not in (3, 4) or not query.ndim == key.ndim == value.ndim:
        shapes = ", ".join(str(tuple(a.shape)) for a in (query, key, value))
        raise ValueError(f"query, key and value must all have 3 dims or 4, got {shapes}")
    lead = (1,) * (4 - query.ndim)
    q, k, v = (jnp.asarray(a).reshape(lead + a.shape) for a in (query, key, value))
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    is_packed = query_seq_lengths is not None or key_value_seq_lengths is not None
    options = Options(
        kind="varlen" if is_packed else "dense",
        max_seqlen_q=seqlen_q if is_packed else None,
        max_seqlen_k=seqlen_k if is_packed else None,
        softmax_scale=scale,
        causal=is_causal,
        window_size=_window(local_window_size),
        return_lse=plain_flag("return_residual", return_residual),
        q_offset=0,
        backend=implementation,
        dropout_origin=WHOLE,
    )
    x = Operands(q, k, v, bias=_biased(bias, mask))
    if is_packed:
        x = _packed(x, query_seq_lengths, key_value_seq_lengths)
    results = run(x, options)
    out = results[0].reshape(*query.shape[:-1], value.shape[-1])
    if not return_residual:
        return out
    lse = results[1]
    if is_packed:
        with infinite_lse():
            lse = lse.reshape(q.shape[2], batch, seqlen_q).transpose(1, 0, 2)
    with infinite_lse():
        lse = lax.stop_gradient(lse).transpose(0, 2, 1).reshape(query.shape[:-1])
        return out, lse.astype(k.dtype)


def _window(size: Any) -> tuple[int, int]:
    if size is None:
        return (-1, -1)
    if isinstance(size, (tuple, list)):
        if len(size) != 2:
            raise ValueError(f"local_window_size must be an int or two, got {size!r:.60}")
        return tuple(plain_int("local_window_size", side) for side in size)
    side = plain_int("local_window_size", size, "an int or (left, right)")
    return (side, side)


def _biased(bias: Array | None, mask: Array | None) -> Array | None:
    """The bias, -inf where the mask hides; the mask itself without one."""
    if mask is None:
        return bias
    check_array("mask", mask)
    if dtype_name(mask.dtype) != "bool":
        wrong_type("mask", "a bool array", mask)
    if bias is None:
        return mask
    seen = jnp.asarray(bias)
    with infinite_lse():
        # Dims of 1 in front of the one that has fewer.
        rank = max(mask.ndim, seen.ndim)
        mask, seen = (jnp.reshape(t, (1,) * (rank - t.ndim) + t.shape) for t in (mask, seen))
        return jnp.where(mask, seen, jnp.array(-jnp.inf, seen.dtype))


def _packed(x: Operands, lengths_q: Array | None, lengths_k: Array | None) -> Operands:
    """Rows of a batch as packed sequences that use a part of their room."""
    used = {}
    for side, array, lengths in (("q", x.q, lengths_q), ("k", x.k, lengths_k)):
        batch, room = array.shape[:2]
        name = "query_seq_lengths" if side == "q" else "key_value_seq_lengths"
        if lengths is not None:
            check_array(name, lengths)
            check_dtype(name, dtype_name(lengths.dtype), "int32", "int64")
            check_shape(name, lengths.shape, (batch,), "(batch,)")
        used[f"cu_seqlens_{side}"] = jnp.arange(batch + 1, dtype=jnp.int32) * room
        used[f"seqused_{side}"] = lengths
    rows = [a.reshape(-1, *a.shape[2:]) for a in x[:3]]
    return Operands(*rows, bias=x.bias, **used)
