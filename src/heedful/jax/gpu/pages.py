"""Paged keys for a backward that takes dense keys: pages are gathered before it, and gradients
added up in the pages after it. Several sequences may share a page, whose gradient is then the sum
of theirs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jax import Array
from jax import numpy as jnp

from heedful.core.call.operands import Gradients, Operands
from heedful.core.planning.plan import Plan


def backward(
    plan: Plan, x: Operands, saved: list[Any], dense: Callable[..., Gradients]
) -> Gradients:
    """The result of `dense(plan, x, saved)` for x with its keys in pages."""
    longest = plan.problem.seqlen_k
    numbers = page_numbers(x, longest)
    rows = x._replace(k=gathered(x.k, numbers), v=gathered(x.v, numbers), block_table=None)
    grads = dense(replace(plan, problem=plan.problem.gathered()), rows, saved)
    dk, dv = (added_up(g, numbers, p) for g, p in ((grads.dk, x.k), (grads.dv, x.v)))
    return grads._replace(dk=dk, dv=dv)


def page_numbers(x: Operands, longest: int) -> Array:
    """int32 (B, pages), as many as `longest` keys fill: numbers of pages that exist, 0 where a
    sequence has no key."""
    page_size = x.k.shape[1]
    table = x.block_table[:, : -(-longest // page_size)]
    begin = jnp.arange(table.shape[1], dtype=jnp.int32) * page_size
    ends = x.seqused_k if x.leftpad_k is None else x.seqused_k + x.leftpad_k
    table = jnp.where(begin[None] < ends[:, None], table, 0)
    return jnp.clip(table, 0, max(0, x.k.shape[0] - 1))


def gathered(pages: Array, numbers: Array) -> Array:
    """(B, pages * page_size, heads, dim) of (num_pages, page_size, heads, dim)."""
    shape = (numbers.shape[0], numbers.shape[1] * pages.shape[1], *pages.shape[2:])
    if not pages.shape[0]:
        return jnp.zeros(shape, pages.dtype)
    return jnp.take(pages, numbers.reshape(-1), axis=0).reshape(shape)


def added_up(grad: Array, numbers: Array, pages: Array) -> Array:
    """The gradient of the pages from that of the gathered rows, summed in float32."""
    parts = grad.reshape(-1, *pages.shape[1:]).astype(jnp.float32)
    summed = jnp.zeros(pages.shape, jnp.float32).at[numbers.reshape(-1)].add(parts, mode="drop")
    return summed.astype(pages.dtype)
