"""A step over a KV cache as a primitive: it writes new keys and values, applies rotary positions,
and computes attention. On one GPU it is one program. Elsewhere, and where XLA divides the work
among devices, it is two primitives.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax.interpreters import mlir

from heedful.core.call.arguments import CacheUpdate, Options
from heedful.core.call.operands import Operands
from heedful.core.call.problem import AttentionProblem
from heedful.jax.traced import cache_update, local, primitives, sharding
from heedful.jax.traced.registration import new_primitive, register


class Static(NamedTuple):
    """The static facts of a step, beside its arrays.

    names: of its arrays in order. update, attention: what is known of its two parts; attention has
    a seqused_k, which the update makes.
    """

    names: tuple[str, ...]
    update: cache_update.Static
    attention: primitives.Static

    def named(self, arrays) -> dict[str, Any]:
        return dict(zip(self.names, arrays, strict=True))

    def of_update(self, by_name: dict[str, Any]) -> list[Any]:
        return [by_name[name] for name in self.update.names]

    def of_attention(self, by_name: dict[str, Any], lengths: Any) -> list[Any]:
        """lengths: in place of seqused_k."""
        return [lengths if name == "seqused_k" else by_name[name] for name in self.attention.names]


def stepped(
    x: Operands, options: Options, update: CacheUpdate, start: Array, problem: AttentionProblem
) -> tuple[Operands, tuple]:
    """x with the new tokens in its caches, and what attention over them returns: out, and lse where
    the options ask.

    start: int32 (B,), where they go in each sequence's storage.
    """
    arrays, of_update = cache_update.arrays_of(x, update, start, problem)
    operands = {name: array for name, array in x._asdict().items() if array is not None}
    names = [name for name in Operands._fields if name in operands or name == "seqused_k"]
    by_name = sharding.alike({**operands, **arrays})
    static = Static(tuple(by_name), of_update, primitives.Static(tuple(names), options))
    results = step_p.bind(*map(lax.stop_gradient, by_name.values()), static=static)
    changed = cache_update.changed(arrays)
    x = x._replace(**dict(zip(changed, results, strict=False)))
    return x, tuple(results[len(changed) :])


def _in_turn(static: Static, *arrays) -> list[Any]:
    """The results by the two primitives."""
    by_name = static.named(arrays)
    made = cache_update.named_results(
        cache_update.update_p.bind(*static.of_update(by_name), static=static.update), by_name
    )
    lengths = made.pop("cache_seqlens")
    attention = static.of_attention({**by_name, **made}, lengths)
    results = primitives.forward_p.bind(*attention, static=static.attention)
    return [*(made[name] for name in cache_update.changed(by_name)), *results]


step_p = new_primitive("heedful_cache_step")


def _type(*types, static: Static):
    by_name = static.named(types)
    made, _ = cache_update.update_p.abstract_eval(*static.of_update(by_name), static=static.update)
    named = cache_update.named_results(made, by_name)
    attention = static.of_attention(by_name, by_name["cache_seqlens"])
    results, _ = primitives.forward_p.abstract_eval(*attention, static=static.attention)
    return [*(named[name] for name in cache_update.changed(by_name)), *results]


def _batched(arrays, dims, *, static: Static):
    results = jax.vmap(partial(_in_turn, static), in_axes=dims)(*arrays)
    return results, [0] * len(results)


def _lower(platform: str, context, *values, static: Static):
    context = sharding.unvaried(context)
    if platform == "cpu" or sharding.is_spread(context):
        return mlir.lower_fun(partial(_in_turn, static), multiple_results=True)(context, *values)
    with sharding.on_one_device():
        fun = partial(_on_gpu, platform, static)
        return mlir.lower_fun(fun, multiple_results=True)(context, *values)


def _on_gpu(platform: str, static: Static, *arrays) -> list[Any]:
    from heedful.jax.gpu import programs as gpu

    by_name, update = static.named(arrays), static.update
    problem = primitives.problem(
        static.attention, static.of_attention(by_name, by_name["cache_seqlens"])
    )
    x = Operands(**{name: by_name.get(name) for name in Operands._fields})
    new = {name: by_name[name] for name in by_name if name not in Operands._fields}
    plan = local.planned(platform, problem, static.attention.options.backend)
    changed = cache_update.changed(by_name)
    return gpu.step(plan, x, new, changed, update.interleaved, update.position0)


_NO_DERIVATIVE = partial(NotImplementedError, "heedful's step over a KV cache has no derivative")
register(step_p, _type, _batched, _lower, _NO_DERIVATIVE)
