"""Merges partial attention results over disjoint keys."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array, lax
from jax import numpy as jnp
from jax.typing import ArrayLike

from heedful.core.call.describe import FLOATS, check_dtype, check_shape
from heedful.jax.base.arrays import check_array, dtype_name, is_traced
from heedful.jax.operands.plain import plain_int
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


def merge_into(
    out: Array, lse: Array, part: Array, part_lse: Array, *, begin: ArrayLike = 0
) -> tuple[Array, Array]:
    """`out` and `lse` with the attention over other keys merged into their rows from `begin` on:
    running sums in float32, as a ring has them, whose parts may have fewer rows. Nothing else is
    computed, and under `jax.jit` XLA writes into out and lse where they are donated.
    `merge_attn_states` says what a merge is, and how exact; as each merge rounds lse once more, n
    of them err by up to n times as much. A row that saw no key in a part, with an lse of -inf,
    weighs nothing there, whatever its output holds.

    Args:
        out: float32 (batch, seqlen, heads, head_dim) or (tokens, heads, head_dim).
        lse: float32 (batch, heads, seqlen) or (heads, tokens), natural.
        part: (batch, rows, heads, head_dim) or (rows, heads, head_dim), float16, bfloat16 or
            float32: attention of `rows` consecutive queries.
        part_lse: float32 (batch, heads, rows) or (heads, rows).
        begin: the row of out, and of lse, that is the first of the part's; an int, which is
            checked, or traced: then it is clamped so that the part lies within.

    Returns:
        (out, lse).

    Raises:
        TypeError, ValueError: naming the argument.
    """
    arrays = {"out": out, "lse": lse, "part": part, "part_lse": part_lse}
    for name, array in arrays.items():
        check_array(name, array)
        dtypes = FLOATS if name == "part" else ("float32",)
        check_dtype(name, dtype_name(array.dtype), *dtypes)
    if out.ndim not in (3, 4):
        raise ValueError(
            "out must be (batch, seqlen, heads, head_dim) or (tokens, heads, head_dim), got shape"
            f" {tuple(out.shape)}"
        )
    *lead, rows, heads, dim = out.shape
    words = ("(batch, heads, {})" if lead else "(heads, {})").format
    check_shape("lse", lse.shape, (*lead, heads, rows), words("seqlen"))
    count = part.shape[-3] if part.ndim == out.ndim else 0
    whole = "(batch, rows, heads, head_dim)" if lead else "(rows, heads, head_dim)"
    check_shape("part", part.shape, (*lead, count, heads, dim), f"{whole} of out")
    check_shape("part_lse", part_lse.shape, (*lead, heads, count), words("rows"))
    if not is_traced(begin):
        first, most = plain_int("begin", begin), rows - count
        if not 0 <= first <= most:
            raise ValueError(f"begin must be 0 to {most}, as {count} rows come, got {first}")
    with infinite_lse():
        sums = lax.dynamic_slice_in_dim(out, begin, count, out.ndim - 3)
        lse_sums = lax.dynamic_slice_in_dim(lse, begin, count, lse.ndim - 1)
        lses = jnp.stack([lse_sums, part_lse])
        empty = (lses == -jnp.inf).swapaxes(-1, -2)[..., None]
        outs = jnp.where(empty, 0.0, jnp.stack([sums, jnp.asarray(part).astype(jnp.float32)]))
        made, made_lse = merged(outs, lses)
        return (
            lax.dynamic_update_slice_in_dim(out, made, begin, out.ndim - 3),
            lax.dynamic_update_slice_in_dim(lse, made_lse, begin, lse.ndim - 1),
        )


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
