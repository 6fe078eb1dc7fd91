"""Attention in the argument order of AMD's JAX port of aiter (https://github.com/ROCm/jax-aiter):
results are tuples, whatever their number.

That port draws dropout from a clock. Here `dropout_seed` says what is drawn, and must be given.
"""

from typing import Any

from jax import Array
from jax import numpy as jnp
from jax.typing import ArrayLike

from heedful.core.call.describe import check_dtype, check_pair, check_shape
from heedful.jax.api import attention as api
from heedful.jax.base.arrays import check_array, dtype_name


def flash_attn_func(
    q: Array,
    k: Array,
    v: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    bias: Array | None = None,
    alibi_slopes: Array | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_kv: Array | None = None,
    *,
    dropout_seed: ArrayLike | None = None,
) -> tuple:
    """Attention of (batch, seqlen, heads, head_dim) arrays; arguments as heedful.jax's function of
    this name has them.

    Args:
        bias: float (seqlen_q, seqlen_k), or anything that heedful broadcasts.
        cu_seqlens_q, cu_seqlens_kv: int32 (batch + 1,), both or none: of the rows of each batch
            entry, sequence b uses the first cu_seqlens[b + 1] - cu_seqlens[b]. Not with
            return_attn_probs.

    Returns:
        (out,), and after it lse float32 (batch, heads, seqlen_q) with return_lse, then the
        sign-coded probabilities with return_attn_probs (empty at dropout_p = 0). Gradients flow
        through lse too.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    keywords: dict[str, Any] = {
        "dropout_p": dropout_p,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "alibi_slopes": alibi_slopes,
        "deterministic": deterministic,
        "bias": bias,
        "return_lse": True,
        "dropout_seed": dropout_seed,
    }
    check_pair("cu_seqlens_q", cu_seqlens_q, "cu_seqlens_kv", cu_seqlens_kv)
    if cu_seqlens_q is not None:
        if return_attn_probs:
            raise ValueError("cu_seqlens_q must be None with return_attn_probs, got an array")
        out, lse = _padded(q, k, v, cu_seqlens_q, cu_seqlens_kv, keywords)
        return (out, lse) if return_lse else (out,)
    results = api.flash_attn_func(q, k, v, return_attn_probs=return_attn_probs, **keywords)
    out, lse, *probs = results
    return (out, *([lse] if return_lse else []), *probs)


def flash_attn_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
    return_lse: bool = False,
    *,
    dropout_seed: ArrayLike | None = None,
) -> tuple:
    """Attention of packed (tokens, heads, head_dim) arrays; arguments as heedful.jax's
    flash_attn_varlen_func has them.

    Args:
        max_seqlen_q, max_seqlen_k: the longest sequence; 0 stands for all tokens.

    Returns:
        (out,) or (out, lse), lse float32 (heads, total_q). Gradients flow through lse too.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    check_array("q", q)
    check_array("k", k)
    results = api.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q or q.shape[0],
        max_seqlen_k or k.shape[0],
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        deterministic=deterministic,
        return_lse=return_lse,
        dropout_seed=dropout_seed,
    )
    return results if return_lse else (results,)


def _padded(q, k, v, cu_q: Array, cu_k: Any, keywords: dict[str, Any]) -> tuple[Array, Array]:
    """out and lse of batch entries that use a part of their rows."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_array(name, array)
        if array.ndim != 4:
            raise ValueError(
                f"{name} must be (batch, seqlen, heads, head_dim), got shape {tuple(array.shape)}"
            )
    batch, seqlen_q, heads, _ = q.shape
    used, rooms = {}, []
    for side, bounds, seqlen in (("q", cu_q, seqlen_q), ("kv", cu_k, k.shape[1])):
        name = f"cu_seqlens_{side}"
        check_array(name, bounds)
        check_dtype(name, dtype_name(bounds.dtype), "int32")
        check_shape(name, bounds.shape, (batch + 1,), "(batch + 1,)")
        used[f"seqused_{side[0]}"] = jnp.asarray(bounds[1:] - bounds[:-1])
        rooms.append(jnp.arange(batch + 1, dtype=jnp.int32) * seqlen)
    rows_q, rows_k, rows_v = (jnp.asarray(a).reshape(-1, *a.shape[2:]) for a in (q, k, v))
    room_q, room_k = rooms
    longest = seqlen_q, k.shape[1]
    out, lse = api.flash_attn_varlen_func(
        rows_q, rows_k, rows_v, room_q, room_k, *longest, **used, **keywords
    )
    lse = lse.reshape(heads, batch, seqlen_q).transpose(1, 0, 2)
    return out.reshape(*q.shape[:-1], v.shape[-1]), lse
