"""Merges partial attention results over disjoint keys."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array
from jax import numpy as jnp

from heedful.core.call.describe import FLOATS, check_dtype, check_shape
from heedful.jax.base.arrays import check_array, dtype_name
from heedful.jax.traced.registration import infinite_lse


def merge_attn_states(
    outs: Array | Sequence[Array], lses: Array | Sequence[Array], sink: Array | None = None
) -> tuple[Array, Array]:
    """The attention over all keys from attentions over parts of them (split keys, shared prefixes,
    ring attention): a part's weight is exp(lse of the part - lse of the whole). Twice
    differentiable. Parts must be computed without the sink; it enters here, once.

    The rounding of an lse to float32 changes it by up to 2^-24 |lse|. So out is off by up to
    tanh(2^-25 |lse|) of the distance between two parts' outputs, for the largest |lse| of a query:
    3e-6 at 100, 3e-4 at 1e4, 3 % at 1e6; from 1e8 on the weights of the parts are arbitrary. lse is
    off by up to 2^-23 |lse|. One call over all keys, with any num_splits, does not have this error.

    Args:
        outs: (parts, batch, seqlen, heads, head_dim) or (parts, tokens, heads, head_dim): float16,
            bfloat16 or float32; or a list of such parts.
        lses: float32 (parts, batch, heads, seqlen) or (parts, heads, tokens): natural log-sum-exp,
            -inf where a part has no key for a query; or a list of such parts.
        sink: float (heads,), or None.

    Returns:
        out, one part's shape and dtype, and lse, float32. A query without any key gives 0 and -inf.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: FlashAttention's split combine; the state merge of FlashInfer's cascade.
    """
    outs = _stacked("outs", outs)
    with infinite_lse():
        lses = _stacked("lses", lses)
    check_dtype("outs", dtype_name(outs.dtype), *FLOATS)
    check_dtype("lses", dtype_name(lses.dtype), "float32")
    if outs.ndim not in (4, 5):
        raise ValueError(
            "outs must be (parts, batch, seqlen, heads, head_dim) or (parts, tokens, heads,"
            f" head_dim), got shape {tuple(outs.shape)}"
        )
    if outs.shape[0] < 1:
        raise ValueError("outs must hold at least one part, got 0")
    *lead, rows, heads, _ = outs.shape
    words = "(parts, batch, heads, seqlen)" if outs.ndim == 5 else "(parts, heads, tokens)"
    check_shape("lses", lses.shape, (*lead, heads, rows), words)
    if sink is not None:
        check_array("sink", sink)
        check_dtype("sink", dtype_name(sink.dtype), *FLOATS)
        check_shape("sink", sink.shape, (heads,), "(heads,)")
        sink = jnp.asarray(sink).astype(jnp.float32)
    with infinite_lse():
        return merged(outs, lses, sink)


def merged(
    outs: Array, lses: Array, sink: Array | None = None, rests: Array | None = None
) -> tuple[Array, Array]:
    """As merge_attn_states, on checked stacks. rests: with the shape of lses; a part's log-sum-exp
    is its lse plus its rest, of which one float32 may not be exact enough."""
    # The maximum cancels: no gradient flows through it.
    top = jax.lax.stop_gradient(lses).max(0)
    if sink is not None:
        # (heads, 1) with a dim of 1 for a batch.
        sink = sink.reshape((1,) * (top.ndim - 2) + (-1, 1))
        top = jnp.maximum(top, jax.lax.stop_gradient(sink))
    top = jnp.where(top == -jnp.inf, 0.0, top)
    left = jnp.zeros_like(top)
    exponents = lses - top[None]
    if rests is not None:
        exponents += jnp.where(lses == -jnp.inf, 0.0, rests)
        # If two lses are rounded to one number, the first may have the smaller rest.
        left = exponents.max(0)
        if sink is not None:
            left = jnp.maximum(left, sink - top)
        left = jax.lax.stop_gradient(jnp.where(left == -jnp.inf, 0.0, left))
        exponents -= left[None]
    weights = jnp.exp(exponents)
    total = weights.sum(0)
    if sink is not None:
        total = total + jnp.exp((sink - top) - left)
    is_empty = total == 0
    # log and division get 1 where there is no key, so that no NaN enters the gradients.
    total = jnp.where(is_empty, 1.0, total)
    lse = jnp.where(is_empty, -jnp.inf, top + (left + jnp.log(total)))
    share = jnp.swapaxes(weights / total[None], -1, -2)[..., None]
    out = (share * outs.astype(lses.dtype)).sum(0)
    return out.astype(outs.dtype), lse


def _stacked(name: str, parts: Any) -> Array:
    if isinstance(parts, (list, tuple)):
        for index, part in enumerate(parts):
            check_array(f"{name}[{index}]", part)
            if part.shape != parts[0].shape or part.dtype != parts[0].dtype:
                raise ValueError(
                    f"{name} must hold parts of one shape and dtype, {tuple(parts[0].shape)}"
                    f" {parts[0].dtype}, got {tuple(part.shape)} {part.dtype}"
                )
        if not parts:
            raise ValueError(f"{name} must hold at least one part, got none")
        return jnp.stack(parts)
    check_array(name, parts)
    return jnp.asarray(parts)
