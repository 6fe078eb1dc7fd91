"""The strategy "ring": a device holds the keys of one other at a time, and those of the next are on
their way beside the kernels (Ring Attention, arXiv 2310.01889).

Parts of a query's attention are rounded to the dtype of q and merged in float32; gradients of keys
are summed in float32 and travel so. A sink enters the part with a row's own keys.
"""

from collections.abc import Iterator
from typing import Any

import jax
from jax import Array, lax
from jax import numpy as jnp

from heedful.jax.distributed.calls import (
    OWN,
    Rest,
    Rows,
    Static,
    arguments,
    attended,
    by_device,
    differentiated,
    sum_of,
)
from heedful.jax.distributed.layouts import chunks_of
from heedful.jax.distributed.rings import Step, Turn, steps


def merge(out: Array, lse: Array, part: Array, part_lse: Array) -> tuple[Array, Array]:
    """Merges the attention over other keys into float32 out (..., rows, heads, dim) and lse (...,
    heads, rows). A row that sees none of them has -inf."""
    weight = jnp.where(part_lse == -jnp.inf, 0.0, jax.nn.sigmoid(part_lse - lse))
    weight = jnp.swapaxes(weight, -1, -2)[..., None]
    return out * (1 - weight) + part * weight, jnp.logaddexp(lse, part_lse)


class _Ring:
    """The steps of one call, as a device has them."""

    def __init__(self, static: Static, q: Array):
        self.static, self.name = static, static.axis_name
        self.devices, self.device = lax.axis_size(self.name), lax.axis_index(self.name)
        self.chunks = chunks_of(static.layout, self.devices)
        self.each = q.shape[static.tokens] // len(self.chunks[0])
        self.steps = steps(self.chunks, self.each, static.mask, static.is_packed)

    def sent(self, x: Array, step: Step) -> Array:
        """The rows that a device gets in a step, of each chunk of the source."""
        places = [(d, (d + step.distance) % self.devices) for d in range(self.devices)]
        return lax.ppermute(self._cut(x, step), self.name, places)

    def returned(self, x: Array, step: Step) -> Array:
        """Rows of this device, back from where `sent` brought them."""
        places = [((d + step.distance) % self.devices, d) for d in range(self.devices)]
        return lax.ppermute(x, self.name, places)

    def _cut(self, x: Array, step: Step) -> Array:
        """Rows of each chunk, one after the other."""
        begin, end = step.rows
        if (begin, end) == (0, self.each):
            return x
        axis, count = self.static.tokens, len(self.chunks[0])
        starts = (chunk * self.each for chunk in range(count))
        parts = [lax.slice_in_dim(x, s + begin, s + end, axis=axis) for s in starts]
        return jnp.concatenate(parts, axis)

    def add(self, total: Array, x: Array, step: Step) -> Array:
        """total with rows of each chunk added."""
        begin, end = step.rows
        if (begin, end) == (0, self.each):
            return total + x
        axis = self.static.tokens
        for chunk in range(len(self.chunks[0])):
            part = lax.slice_in_dim(
                x, chunk * (end - begin), (chunk + 1) * (end - begin), axis=axis
            )
            rows = Rows(chunk * self.each + begin, 0, end - begin)
            total = rows.put(total, rows.of(total, axis) + part, axis)
        return total

    def rows(self, step: Step, turn: Turn) -> tuple[Rows, Rows]:
        """The queries of a turn among this device's rows, and the keys among the step's."""
        numbers = zip(*self._numbers(step, turn), strict=True)
        (low, high), (begin, end) = turn.rows, step.rows
        mine, theirs = (by_device(tuple(table), self.device) for table in numbers)
        i, j = by_device(turn.queries, self.device), by_device(turn.keys, self.device)
        queries = Rows(i * self.each + low, mine * self.each + low, high - low)
        return queries, Rows(j * (end - begin), theirs * self.each + begin, end - begin)

    def _numbers(self, step: Step, turn: Turn) -> Iterator[tuple[int, int]]:
        """By device the chunk of the batch that its queries are, and the one that its keys are."""
        for device, (i, j) in enumerate(zip(turn.queries, turn.keys, strict=True)):
            yield self.chunks[device][i], self.chunks[(device - step.distance) % self.devices][j]

    def walk(self, k: Array, v: Array, carried: list[Any]) -> Iterator[tuple[Step, Array, Array]]:
        """Each step with its keys and values. carried: arrays that a step makes anew: no transfer
        begins before the step before the last has them, so that few keys are held at a time."""
        here: Any = k, v
        for index, step in enumerate(self.steps):
            after = None
            if index + 1 < len(self.steps):
                after = [self.sent(x, self.steps[index + 1]) for x in (k, v)]
            yield step, here[0], here[1]
            if after is not None:
                (k, v), after, carried[:] = lax.optimization_barrier(((k, v), after, [*carried]))
                here = after


def forward(static: Static, q, k, v, sink, rest: Rest):
    """(out, lse), and what `backward` wants."""
    ring, axis = _Ring(static, q), static.tokens
    # Written by the first turns, of each row with its own keys.
    out = jnp.zeros((*q.shape[:-1], v.shape[-1]), jnp.float32)
    lse = jnp.zeros((*q.shape[:axis], q.shape[axis + 1], q.shape[axis]), jnp.float32)
    carried: list[Any] = [out, lse]
    for step, keys, values in ring.walk(k, v, carried):
        for turn in step.turns:
            mine, theirs = ring.rows(step, turn)
            more = arguments(static, rest, mine, theirs, turn.kind)
            its_sink = sink if turn.kind == OWN else None
            rows = mine.of(q, axis), theirs.of(keys, axis), theirs.of(values, axis)
            part = attended(static, *rows, more, its_sink)
            out, lse = carried
            if turn.kind != OWN:
                part = merge(mine.of(out, axis), mine.of(lse, lse.ndim - 1), *part)
            carried[:] = mine.put(out, part[0], axis), mine.put(lse, part[1], lse.ndim - 1)
    out, lse = carried
    out = out.astype(q.dtype)
    return (out, lse), (q, k, v, sink, rest, out, lse)


def backward(static: Static, kept, dout, dlse):
    """dq, dk, dv and dsink."""
    q, k, v, sink, rest, out, lse = kept
    ring, axis, last = _Ring(static, q), static.tokens, lse.ndim - 1
    dsinks = []
    carried: list[Any] = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
    for step, keys, values in ring.walk(k, v, carried):
        sums = [jnp.zeros(x.shape, jnp.float32) for x in (keys, values)]
        for turn in step.turns:
            mine, theirs = ring.rows(step, turn)
            more = arguments(static, rest, mine, theirs, turn.kind)
            rows = mine.of(dout, axis), mine.of(q, axis)
            rows = *rows, theirs.of(keys, axis), theirs.of(values, axis)
            rows = *rows, mine.of(out, axis), mine.of(lse, last)
            its_sink = sink if turn.kind == OWN else None
            grads = differentiated(rows, mine.of(dlse, last), more, its_sink)
            dq = carried[0]
            carried[0] = mine.put(dq, mine.of(dq, axis) + grads.dq, axis)
            for n, grad in enumerate((grads.dk, grads.dv)):
                sums[n] = theirs.put(sums[n], theirs.of(sums[n], axis) + grad, axis)
            dsinks += [] if its_sink is None else [grads.dsink]
        if step.distance:
            sums = [ring.returned(x, step) for x in sums]
        carried[1:] = [ring.add(x, y, step) for x, y in zip(carried[1:], sums, strict=True)]
    dq, dk, dv = (x.astype(y.dtype) for x, y in zip(carried, (q, k, v), strict=True))
    return dq, dk, dv, sum_of(dsinks) if dsinks else None
