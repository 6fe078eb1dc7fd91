"""The update of a KV cache before attention as a primitive: it writes new keys and values and
applies rotary positions. On a GPU it is one kernel, elsewhere plain JAX."""

from functools import partial
from typing import Any, NamedTuple

from jax import Array, lax
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import mlir

from heedful.core.base.arrays import ArraySpec
from heedful.core.call.arguments import CacheUpdate
from heedful.core.call.operands import Operands
from heedful.core.call.problem import LATENT_ROW_BYTES, AttentionProblem
from heedful.jax.base.arrays import array_spec, dtype_name
from heedful.jax.operands.quant import group_scales, pack_latent, packed_values
from heedful.jax.traced import sharding
from heedful.jax.traced.registration import new_primitive, register

_PLACES = ("block_table", "kv_batch_idx", "leftpad_k")
_TABLES = ("rotary_cos", "rotary_sin")
# In the order in which jit flattens keywords: it gives what is donated to results of the same type
# in order, so each is written where it lies.
_SCALES = ("k_descale", "k_shift", "v_descale", "v_shift")


class Static(NamedTuple):
    """The static facts of an update, beside its arrays.

    names: of its arrays in order. page_size: 0 without pages. interleaved: how rotary pairs lie.
    advance: whether queries have a position each. position0: tokens before the cache.
    """

    names: tuple[str, ...]
    page_size: int
    interleaved: bool
    advance: bool
    position0: int

    def named(self, arrays) -> dict[str, Any]:
        return dict(zip(self.names, arrays, strict=True))


def extended(x: Operands, update: CacheUpdate, start: Array, problem: AttentionProblem) -> Operands:
    """x with the new tokens in its caches, seqused_k counting them, and q at its positions.

    start: int32 (B,), where they go in each sequence's storage.
    """
    by_name, static = arrays_of(x, update, start, problem)
    by_name = sharding.alike(by_name)
    results = update_p.bind(*map(lax.stop_gradient, by_name.values()), static=static)
    made = named_results(results, by_name)
    return x._replace(seqused_k=made.pop("cache_seqlens"), **made)


def arrays_of(
    x: Operands, update: CacheUpdate, start: Array, problem: AttentionProblem
) -> tuple[dict[str, Array], Static]:
    """The arrays of an update by name, and what else is known of it."""
    arrays = {"k_new": update.k, "v_new": update.v, "k": x.k, "v": x.v, "cache_seqlens": start}
    arrays |= {name: getattr(x, name) for name in _PLACES}
    if update.rotary_cos is not None:
        arrays |= {name: getattr(update, name) for name in _TABLES} | {"q": x.q}
    if _quantises(update.k, x.k):
        arrays |= {name: getattr(x, name) for name in _SCALES}
    by_name = {name: jnp.asarray(a) for name, a in arrays.items() if a is not None}
    return by_name, _static(tuple(by_name), update, problem)


def rotated_only(
    x: Operands, update: CacheUpdate, start: Array, problem: AttentionProblem
) -> Array:
    """q at its positions, where there are no new tokens to write."""
    static = _static((), update, problem)
    cos, sin = jnp.asarray(update.rotary_cos), jnp.asarray(update.rotary_sin)
    position = start + static.position0
    return rotate(x.q, cos, sin, position, static.interleaved, static.advance)


def _static(names: tuple[str, ...], update: CacheUpdate, problem: AttentionProblem) -> Static:
    page_size, advance = problem.page_size, problem.mask.bounded
    return Static(names, page_size, update.rotary_interleaved, advance, update.position0)


def _of_groups(scale: Any) -> bool:
    """Whether scales lie beside the keys, one for each group of values; not one for each head."""
    return scale.ndim > 2


def _quantises(new: Any, cache: Any) -> bool:
    """Whether new keys of a checked call come as values, not as the cache stores them."""
    return new.dtype != cache.dtype


def changed(by_name: dict[str, Any]) -> list[str]:
    """The caches, and scales and shifts of groups, that an update of these arrays or types writes,
    in order."""
    if not _quantises(by_name["k_new"], by_name["k"]):
        return ["k", "v"]
    scales = ((name, by_name.get(name)) for name in _SCALES)
    return ["k", "v", *(name for name, x in scales if x is not None and _of_groups(x))]


def _results(by_name: dict[str, Any]) -> list[str]:
    """The arrays that an update of these arrays or types makes anew, in order. Its cache_seqlens
    count the new tokens."""
    return [*changed(by_name), "cache_seqlens", *(["q"] if "rotary_cos" in by_name else [])]


def named_results(results: list[Any], by_name: dict[str, Any]) -> dict[str, Any]:
    """The results of an update of these arrays or types, by name."""
    return dict(zip(_results(by_name), results, strict=True))


update_p = new_primitive("heedful_cache_update")


def _type(*types, static: Static):
    by_name = static.named(types)
    made = [ShapedArray(by_name[name].shape, by_name[name].dtype) for name in _results(by_name)]
    return [sharding.varying_like(kind, types) for kind in made]


def _batched(arrays, dims, *, static: Static):
    mapped = [jnp.moveaxis(a, d, 0) for a, d in zip(arrays, dims, strict=True) if d is not None]

    def one(entry):
        rest = iter(entry)
        whole = [a if d is None else next(rest) for a, d in zip(arrays, dims, strict=True)]
        return update_p.bind(*whole, static=static)

    results = lax.map(one, mapped)
    return results, [0] * len(results)


def _lower(platform: str, context, *values, static: Static):
    context = sharding.unvaried(context)
    if sharding.is_spread(context):
        fun = _spread(static, context)
        return mlir.lower_fun(fun, multiple_results=True)(context, *values)
    fun = partial(_on_cpu if platform == "cpu" else partial(_on_gpu, platform), static)
    return mlir.lower_fun(fun, multiple_results=True)(context, *values)


def _spread(static: Static, context):
    """As XLA may share it among devices: by heads, and by batch where each entry has a cache."""
    by_name = static.named(context.avals_in)
    shapes = {name: kind.shape for name, kind in by_name.items()}
    shared = "block_table" in shapes or "kv_batch_idx" in shapes
    heads = shapes["k"][-2]
    group = shapes["q"][-2] // heads if "q" in shapes else 1
    rule = sharding.Rule(
        static.names,
        tuple(shapes.values()),
        tuple((name, shapes[name]) for name in _results(by_name)),
        sharding.Layout(True, shared, heads, group),
        lambda by_name: update_p.bind(*by_name.values(), static=static),
        # Every device writes to the whole of a cache that batch entries share.
        whole=(sharding.BATCH,) if shared else (),
    )
    return rule.spread()


_NO_DERIVATIVE = partial(NotImplementedError, "heedful's update of a KV cache has no derivative")
register(update_p, _type, _batched, _lower, _NO_DERIVATIVE)


# GPUs


def _on_gpu(platform: str, static: Static, *arrays):
    from heedful.jax.base.device import device_spec
    from heedful.jax.gpu import programs as gpu
    from heedful.launch.bind import portable_cache

    arch, by_name = device_spec(platform).arch, static.named(arrays)
    specs = {name: array_spec(array) for name, array in by_name.items()}
    # Results that are no operands.
    fresh = {"seqused": specs["cache_seqlens"]}
    if "q" in by_name:
        fresh["rotated"] = ArraySpec.contiguous(by_name["q"].shape, specs["q"].dtype)
    heads = specs["k_new"].shape[0], specs["k"].shape[2]
    of_heads = [name for name in _SCALES if name in by_name and not _of_groups(by_name[name])]
    whole = {name: gpu.expanded(specs[name], heads) for name in of_heads}
    made = portable_cache.update(
        specs | whole | fresh,
        static.page_size,
        static.interleaved,
        static.advance,
        static.position0,
    )
    renamed = {"cache_seqlens": "seqused", "q": "rotated"}
    names = [renamed.get(name, name) for name in _results(by_name)]
    results = {name: (specs | fresh)[name] for name in names}
    done = gpu.run(made, arch, by_name, results, "update")
    return [done[name] for name in names]


# Elsewhere


def _on_cpu(static: Static, *arrays):
    by_name = static.named(arrays)
    new, start = {"k": by_name["k_new"], "v": by_name["v_new"]}, by_name["cache_seqlens"]
    count, leftpad = new["k"].shape[1], by_name.get("leftpad_k")
    used = jnp.where(start < 0, start, start + count)
    made = {"cache_seqlens": used if leftpad is None else used - leftpad}
    if "rotary_cos" in by_name:
        tables = by_name["rotary_cos"], by_name["rotary_sin"], start + static.position0
        new["k"] = rotate(new["k"], *tables, static.interleaved)
        if "q" in by_name:
            made["q"] = rotate(by_name["q"], *tables, static.interleaved, static.advance)
    if _quantises(new["k"], by_name["k"]) and by_name["k"].shape[-1] == LATENT_ROW_BYTES:
        values, rest = new["v"], new["k"][..., new["v"].shape[-1] :]
        new = dict.fromkeys("kv", pack_latent(jnp.concatenate([values, rest], -1)))
    where, kept = _places(by_name, static.page_size, count)
    for name, values in new.items():
        for written, rows in _stored(by_name, name, values).items():
            made[written] = _written(by_name[written], rows, where, kept)
    return [made[name] for name in _results(by_name)]


def _stored(by_name: dict[str, Array], name: str, new: Array) -> dict[str, Array]:
    """The numbers that go for new values (B, S, G, dim) into the cache `name`; and, of groups of
    values, into their scales and shifts."""
    cache, scale, shift = (by_name.get(n) for n in (name, f"{name}_descale", f"{name}_shift"))
    assert cache is not None
    if not _quantises(new, cache):
        return {name: new}
    storage = "int4" if cache.dtype == jnp.uint8 else dtype_name(cache.dtype)
    if scale is not None and _of_groups(scale):
        size = new.shape[-1] // scale.shape[-1]
        new_scale, new_shift = group_scales(new, storage, size, shift is not None)
        made = {
            name: packed_values(new, storage, new_scale, new_shift),
            f"{name}_descale": new_scale,
        }
        return made if new_shift is None else made | {f"{name}_shift": new_shift}
    heads = new.shape[0], new.shape[2]
    factor, add = (
        t if t is None else jnp.broadcast_to(t, heads)[:, None, :, None] for t in (scale, shift)
    )
    return {name: packed_values(new, storage, factor, add)}


def _places(by_name: dict[str, Array], page_size: int, new: int) -> tuple[tuple, Array]:
    """(entry, row) of each new token in its cache, and whether it lies there: (B, new)."""
    start, cache = by_name["cache_seqlens"], by_name["k"]
    position = start[:, None] + jnp.arange(new, dtype=jnp.int32)[None]
    table = by_name.get("block_table")
    capacity = cache.shape[1] * (1 if table is None else table.shape[1])
    kept = (start[:, None] >= 0) & (position < capacity)
    position = jnp.clip(position, 0, capacity - 1)
    if table is None:
        row = by_name.get("kv_batch_idx")
        row = jnp.arange(start.shape[0], dtype=jnp.int32) if row is None else row
        entry = jnp.broadcast_to(row[:, None], position.shape)
    else:
        entry = jnp.take_along_axis(table, position // page_size, axis=1)
        position = position % page_size
    return (entry, position), kept & (entry >= 0) & (entry < cache.shape[0])


def _written(cache: Array, tokens: Array, where: tuple, kept: Array) -> Array:
    entry, position = where
    # An entry that the cache lacks is dropped.
    entry = jnp.where(kept, entry, cache.shape[0])
    return cache.at[entry, position].set(tokens, mode="drop")


def rotate(
    x: Array, cos: Array, sin: Array, start: Array, interleaved: bool, advance: bool = True
) -> Array:
    """Rotary position embedding (Su et al. 2021) of the first 2 * cos.shape[1] dims of each head.

    x: (B, S, heads, D). cos, sin: (positions, rotary_dim / 2). start: int (B,), the position of
    each sequence's first token; the next ones follow, or have the same if not advance.
    interleaved: pairs are neighbours (GPT-J), else halves (GPT-NeoX). Computed in float32.
    """
    half = cos.shape[1]
    position = start[:, None]
    if advance:
        position = position + jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    # Sequences of negative length, or beyond the storage, have no position: any will do.
    position = jnp.clip(position, 0, max(0, cos.shape[0] - 1))
    c, s = (table[position].astype(jnp.float32)[:, :, None] for table in (cos, sin))
    turned = x[..., : 2 * half].astype(jnp.float32)
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = (first * c - second * s, first * s + second * c)
    joined = jnp.stack(pair, -1) if interleaved else jnp.concatenate(pair, -1)
    turned = joined.reshape(turned.shape)
    return jnp.concatenate([turned.astype(x.dtype), x[..., 2 * half :]], -1)
