"""The strategy "heads": devices exchange tokens for heads, so that each computes the whole batch
for some heads (DeepSpeed-Ulysses), and back. And "heads x ring": devices of one
axis of the mesh do so, and those of another are a ring for these heads (USP).

KV heads of which there are fewer than devices are replicated. Where heads do not spread evenly,
some devices compute a head twice and drop it: none waits longer than for the one with most heads.
"""

from functools import lru_cache
from typing import Any, NamedTuple

from jax import Array, lax
from jax import numpy as jnp

from heedful.core.call.spread import spread_heads
from heedful.jax.distributed import ring
from heedful.jax.distributed.calls import (
    Rest,
    Rows,
    Static,
    all_keys_gradients,
    over_all_keys,
    tree_cast,
)
from heedful.jax.distributed.layouts import shard, unshard


class Share(NamedTuple):
    """By device the heads that it computes, equally many on each; a last one may come again.
    counts: of each how many query heads are not such. copies: devices that have the same KV
    head."""

    queries: tuple[tuple[int, ...], ...]
    keys: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    copies: int


@lru_cache(maxsize=64)
def shared(heads_q: int, heads_k: int, devices: int) -> Share:
    """ValueError where heads cannot be spread (`core.call.spread.spread_heads`)."""
    spans, group = spread_heads(heads_q, heads_k, devices), heads_q // heads_k
    counts = tuple(heads.queries[1] - heads.queries[0] for heads in spans)
    most = max(heads.keys[1] - heads.keys[0] for heads in spans)
    keys = tuple(
        tuple(min(heads.keys[0] + n, heads.keys[1] - 1) for n in range(most)) for heads in spans
    )
    if heads_k < devices:
        queries = tuple(tuple(range(*heads.queries)) for heads in spans)
        return Share(queries, keys, counts, devices // heads_k)
    queries = tuple(tuple(h * group + n for h in theirs for n in range(group)) for theirs in keys)
    return Share(queries, keys, counts, 1)


class _Exchange:
    """How one call's rows travel."""

    def __init__(self, static: Static):
        self.name = static.heads_axis or static.axis_name
        self.devices, self.device = lax.axis_size(self.name), lax.axis_index(self.name)
        self.share = shared(*static.heads, self.devices)
        self.static = static

    def to_heads(self, x: Array, every: tuple[tuple[int, ...], ...], heads: int, tokens: int):
        """All heads of this device's tokens -> this device's heads of all tokens. every: the heads
        of all devices; heads, tokens: axes of x."""
        places = [head for theirs in every for head in theirs]
        if places != [*range(x.shape[heads])]:
            x = jnp.take(x, jnp.asarray(places), axis=heads)
        x = lax.all_to_all(x, self.name, heads, tokens, tiled=True)
        if self.static.heads_axis is None:
            x = unshard(x, self.devices, self.static.layout, tokens)
        return x

    def from_heads(
        self, x: Array, every: tuple[tuple[int, ...], ...], copies: int, heads: int, tokens: int
    ) -> Array:
        """The reverse. copies: devices that have the same head, whose rows are added in float32."""
        if self.static.heads_axis is None:
            x = shard(x, self.devices, self.static.layout, tokens)
        x = lax.all_to_all(x, self.name, tokens, heads, tiled=True)
        if copies > 1:
            apart = x.reshape(*x.shape[:heads], -1, copies, *x.shape[heads + 1 :])
            return apart.astype(jnp.float32).sum(heads + 1).astype(x.dtype)
        places = [head for theirs in every for head in theirs]
        firsts = [places.index(head) for head in range(max(places) + 1)]
        if firsts == [*range(len(places))]:
            return x
        return jnp.take(x, jnp.asarray(firsts), axis=heads)

    def queries(self, x: Array) -> Array:
        axis = x.ndim - 2
        return self.to_heads(x, self.share.queries, axis, self.static.tokens)

    def keys(self, x: Array) -> Array:
        return self.to_heads(x, self.share.keys, x.ndim - 2, self.static.tokens)

    def lse(self, x: Array) -> Array:
        return self.to_heads(x, self.share.queries, x.ndim - 2, x.ndim - 1)

    @property
    def mine(self) -> Array:
        """This device's query heads."""
        return jnp.asarray(self.share.queries)[self.device]

    def operands(self, sink: Any, rest: Rest) -> tuple[Any, Rest]:
        """The sink and `rest` of this device's heads."""
        mine, slopes, ranges, origin = self.mine, rest.alibi_slopes, rest.key_ranges, rest.origin
        if sink is not None:
            sink = jnp.take(sink, mine)
        if slopes is not None:
            slopes = jnp.take(slopes, mine, axis=-1)
        if ranges is not None:
            ranges = lax.all_gather(ranges, self.name, axis=ranges.ndim - 2, tiled=True)
            if self.static.heads_axis is None:
                ranges = unshard(ranges, self.devices, self.static.layout, ranges.ndim - 2)
            if ranges.ndim == 4 and ranges.shape[1] > 1:
                ranges = jnp.take(ranges, mine, axis=1)
        if origin is not None:
            origin = origin + jnp.stack([jnp.uint32(0), mine[0].astype(jnp.uint32)])
        return sink, rest._replace(alibi_slopes=slopes, key_ranges=ranges, origin=origin)

    def of_all_heads(self, dsink: Array) -> Array:
        """The gradient of a sink from that of this device's heads."""
        counts = jnp.asarray(self.share.counts)[self.device]
        is_own = jnp.arange(len(dsink)) < counts
        whole = jnp.zeros(self.static.heads[:1], dsink.dtype)
        return whole.at[self.mine].add(jnp.where(is_own, dsink, 0))


def _whole(static: Static, q: Array) -> list[Rows]:
    return [Rows(0, 0, q.shape[static.tokens])]


def forward(static: Static, q, k, v, sink, rest: Rest):
    """(out, lse), and what `backward` wants."""
    by = _Exchange(static)
    heads, of_heads = by.operands(sink, rest)
    queries = by.queries(q)
    mine = queries, by.keys(k), by.keys(v)
    if static.heads_axis is not None:
        (out, lse), kept = ring.forward(static, *mine, heads, of_heads)
    else:
        out, lse = over_all_keys(static, *mine, heads, of_heads, _whole(static, queries))
        kept = *mine, heads, of_heads, out, lse
    outs = by.from_heads(out, by.share.queries, 1, out.ndim - 2, static.tokens)
    lses = by.from_heads(lse, by.share.queries, 1, lse.ndim - 2, lse.ndim - 1)
    return (outs, lses), kept


def backward(static: Static, kept, dout, dlse):
    """dq, dk, dv and dsink."""
    by = _Exchange(static)
    dout, dlse = by.queries(dout), by.lse(dlse)
    if static.heads_axis is not None:
        dq, *of_keys, dsink = ring.backward(static, kept, dout, dlse)
    else:
        dq, *sums, dsink = all_keys_gradients(static, kept, dout, dlse, _whole(static, dout))
        of_keys = tree_cast(sums, [*kept[1:3]])
    axis, tokens = dq.ndim - 2, static.tokens
    dq = by.from_heads(dq, by.share.queries, 1, axis, tokens)
    dk, dv = (by.from_heads(x, by.share.keys, by.share.copies, axis, tokens) for x in of_keys)
    return dq, dk, dv, None if dsink is None else by.of_all_heads(dsink)
