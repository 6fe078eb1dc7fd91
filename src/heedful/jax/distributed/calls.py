"""Calls of the attention functions on some tokens of a batch, which may begin at a traced place."""

from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax import numpy as jnp

from heedful.core.call.arguments import Quads
from heedful.core.call.mask import MaskSpec
from heedful.core.call.operands import Gradients
from heedful.core.call.spread import Mask
from heedful.jax.api.attention import flash_attn_func, flash_attn_varlen_func
from heedful.jax.api.gradients import attention_backward


class Static(NamedTuple):
    """All that is the same for each token. strategy: one of `attention.STRATEGIES`; axis_name: of
    the mesh; heads_axis: the one over which heads are spread under "heads x ring". heads: of q
    and of k. options: of the attention functions, by name."""

    strategy: str
    axis_name: str
    heads_axis: str | None
    layout: str
    max_seqlen: int | None
    heads: tuple[int, int]
    options: tuple[tuple[str, Any], ...]

    @property
    def is_packed(self) -> bool:
        return self.max_seqlen is not None

    @property
    def tokens(self) -> int:
        """The axis of tokens in q, k and v."""
        return 0 if self.is_packed else 1

    @property
    def mask(self) -> Mask:
        told = dict(self.options)
        spec = MaskSpec.of(told["causal"], told["window_size"])
        bounds = (None if bound < 0 else bound for bound in (spec.left, spec.right))
        return Mask(*bounds, first=spec.first)


class Rest(NamedTuple):
    """Arrays without a gradient. key_ranges: with this device's rows."""

    cu_seqlens: Any = None
    alibi_slopes: Any = None
    key_ranges: Any = None
    seed: Any = None
    origin: Any = None


class Rows(NamedTuple):
    """Tokens that follow one another. first: where they lie in the arrays that a device has; begin:
    in the batch. Both may be traced."""

    first: Any
    begin: Any
    count: int

    def of(self, x: Any, axis: int) -> Any:
        """These rows of an array."""
        return lax.dynamic_slice_in_dim(x, self.first, self.count, axis=axis)

    def put(self, x: Array, part: Array, axis: int) -> Array:
        """The array with other rows here."""
        return lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), self.first, axis=axis)


# How queries see keys. OWN: they are the same tokens. MASKED: they are any.
# FULL: each query sees each key of its document. LEADING: queries see the first keys of their
# documents that lie left of their windows.
OWN, MASKED, FULL, LEADING = "own", "masked", "full", "leading"


def arguments(static: Static, rest: Rest, queries: Rows, keys: Rows, kind: str) -> dict[str, Any]:
    """All arguments of a call but for tensors with rows and the sink."""
    made = dict(static.options) | {"causal": False, "alibi_slopes": rest.alibi_slopes}
    mask = static.mask
    bounds = tuple(-1 if bound is None else bound for bound in (mask.left, mask.right))
    # First keys count from where the keys of a document begin, which may not be among these.
    has_all = type(keys.begin) is int and keys.begin == 0 and kind == MASKED
    if has_all and mask.first:
        bounds = *bounds, mask.first
    made["window_size"] = (-1, -1) if kind in (FULL, LEADING) else bounds
    offset = queries.begin - keys.begin
    if rest.cu_seqlens is not None:
        ends = rest.cu_seqlens.astype(jnp.int32)
        held = min(static.max_seqlen or 0, queries.count), min(static.max_seqlen or 0, keys.count)
        made |= {
            "cu_seqlens_q": jnp.clip(ends - queries.begin, 0, queries.count),
            "cu_seqlens_k": jnp.clip(ends - keys.begin, 0, keys.count),
            "max_seqlen_q": held[0],
            "max_seqlen_k": held[1],
        }
        starts = ends[:-1]
        offset = jnp.maximum(queries.begin - starts, 0) - jnp.maximum(keys.begin - starts, 0)
    # Where queries are the keys, or all are seen, the default diagonal is right.
    if kind == MASKED or (kind != OWN and rest.alibi_slopes is not None):
        made["q_offset"] = offset
    if rest.origin is not None:
        column = keys.begin if static.is_packed else _column(keys)
        origin = rest.origin[0], rest.origin[1], queries.begin, column
        made |= {"dropout_seed": rest.seed, "dropout_origin": origin}
    ranges = _ranges(static, rest, queries, keys, kind)
    return made if ranges is None else made | {"key_ranges": ranges}


def _column(keys: Rows) -> Any:
    """keys.begin, with what kernels may rely on: places of keys are multiples of their number, and
    of 4 where that is."""
    if type(keys.begin) is int or keys.count % 4:
        return keys.begin
    return Quads(keys.begin // 4)


def _ranges(static: Static, rest: Rest, queries: Rows, keys: Rows, kind: str) -> Array | None:
    """`key_ranges` of these queries, counted from the first of these keys."""
    told = rest.key_ranges
    if told is not None:
        told = queries.of(told, told.ndim - 2)
    if kind != LEADING and (told is None or (type(keys.begin) is int and keys.begin == 0)):
        return told
    # By query: its position in its document, and that of the document's first one of these keys.
    places = queries.begin + jnp.arange(queries.count, dtype=jnp.int32)
    start = jnp.int32(0)
    if rest.cu_seqlens is not None:
        ends = rest.cu_seqlens.astype(jnp.int32)
        document = jnp.searchsorted(ends, places, side="right") - 1
        start = ends[jnp.clip(document, 0, len(ends) - 2)]
    before = jnp.maximum(keys.begin - start, 0)
    limit = jnp.full_like(places, keys.count)
    if kind == LEADING:
        left = static.mask.left
        assert left is not None
        limit = jnp.clip(
            jnp.minimum(static.mask.first, places - start - left) - before, 0, keys.count
        )
    if told is None:
        ranges = jnp.stack([jnp.zeros_like(limit), limit], -1)
        return ranges if static.is_packed else ranges[None, None]
    # As wide as the ranges, whose bounds may be any of int32.
    wide = (1,) * (told.ndim - 2) + (queries.count, 1)
    before, limit = jnp.broadcast_to(before, places.shape).reshape(wide), limit.reshape(wide)
    return jnp.clip(jnp.maximum(told, 0) - before, 0, limit)


def attended(static: Static, q, k, v, more: dict[str, Any], sink=None) -> tuple[Array, Array]:
    """out and lse."""
    function: Any = flash_attn_varlen_func if static.is_packed else flash_attn_func
    return function(q, k, v, sink=sink, return_lse=True, **more)


def differentiated(rows: tuple[Array, ...], dlse, more: dict[str, Any], sink=None) -> Gradients:
    """rows: dout, q, k, v, out and lse."""
    return attention_backward(*rows, dlse=dlse, sink=sink, **more)


def over_all_keys(static: Static, q, k, v, sink, rest: Rest, chunks: list[Rows]):
    """out and lse of queries in chunks, with all keys of the batch."""
    axis, every = static.tokens, Rows(0, 0, k.shape[static.tokens])
    made = []
    for chunk in chunks:
        more = arguments(static, rest, chunk, every, MASKED)
        made.append(attended(static, chunk.of(q, axis), k, v, more, sink))
    outs, lses = zip(*made, strict=True)
    return jnp.concatenate(outs, axis), jnp.concatenate(lses, -1)


def all_keys_gradients(static: Static, kept, dout, dlse, chunks: list[Rows]):
    """dq, dk and dv in float32 of all keys, and dsink. kept: q, k, v, sink, rest, out and lse."""
    q, k, v, sink, rest, out, lse = kept
    axis, every = static.tokens, Rows(0, 0, k.shape[static.tokens])
    parts = []
    for chunk in chunks:
        more = arguments(static, rest, chunk, every, MASKED)
        rows = chunk.of(dout, axis), chunk.of(q, axis), k, v
        rows = *rows, chunk.of(out, axis), chunk.of(lse, lse.ndim - 1)
        parts.append(differentiated(rows, chunk.of(dlse, lse.ndim - 1), more, sink))
    dk, dv = (
        sum_of([getattr(grads, name).astype(jnp.float32) for grads in parts])
        for name in ("dk", "dv")
    )
    dsink = None if sink is None else sum_of([grads.dsink for grads in parts])
    return jnp.concatenate([grads.dq for grads in parts], axis), dk, dv, dsink


def sum_of(parts: list[Any]) -> Any:
    """The sum of arrays, in their order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def by_device(table: tuple[int, ...], device: Any) -> Any:
    """An int by device: plain where it is the same for all."""
    if len(set(table)) == 1:
        return table[0]
    return jnp.asarray(table, jnp.int32)[device]


def tree_cast(tree: Any, others: Any) -> Any:
    """Arrays in the dtypes of others."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, others)
