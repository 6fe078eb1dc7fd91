"""The two primitives of attention, forward and backward: their arrays, how they batch, and how they
are lowered on each platform. Operands are arrays as in `heedful.core.call.operands`, but broadcast
dims have size 1, and a seed is uint32 (2,).
"""

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

from jax import Array, lax
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import mlir

from heedful.core.base.arrays import ArraySpec
from heedful.core.call.arguments import AttentionCall, Options
from heedful.core.call.batching import joins
from heedful.core.call.describe import describe
from heedful.core.call.operands import Gradients, Operands
from heedful.core.call.problem import AttentionProblem
from heedful.jax.base.arrays import array_spec
from heedful.jax.traced import local, sharding
from heedful.jax.traced.registration import new_primitive, register

# The arrays after the operands of a backward.
SAVED = ("out", "lse", "dout", "dlse")


class Static(NamedTuple):
    """The static facts of a primitive's call, beside its arrays.

    names: of its arrays in order: operands, "origin" if that is an array, and of a backward those
    of SAVED. needs_grad, bias_grad, rel_bias_grad: as AttentionCall's. keeps_rest: as
    AttentionProblem's, whatever the platform.
    """

    names: tuple[str, ...]
    options: Options
    needs_grad: bool = False
    bias_grad: bool = False
    rel_bias_grad: bool = False
    keeps_rest: bool = False

    def named(self, arrays) -> dict[str, Any]:
        return dict(zip(self.names, arrays, strict=True))

    def operands(self, arrays) -> Operands:
        """The operands alone."""
        by_name = self.named(arrays)
        return Operands(**{n: by_name.get(n) for n in Operands._fields})


@lru_cache(4096)
def _problem_of(specs: Operands, static: Static) -> AttentionProblem:
    """The problem of operands with these ArraySpecs."""
    asked = static.needs_grad, static.bias_grad, static.rel_bias_grad
    problem_ = describe(AttentionCall(specs, static.options, *asked))
    return replace(problem_, keeps_rest=static.keeps_rest)


def problem(static: Static, arrays) -> AttentionProblem:
    """The problem of a primitive's call."""
    x = static.operands(arrays)
    specs = Operands._make([None if array is None else array_spec(array) for array in x])
    if x.seed is not None:
        specs = specs._replace(seed=ArraySpec.contiguous((1,), "int64"))
    return _problem_of(specs, static._replace(names=()))


def forward(x: Operands, origin: Array | None, asked: Static) -> tuple:
    """out; lse if the caller or the backward needs it, with its rest if it is kept; probabilities
    or largest scores if the options ask. asked: without names."""
    by_name = _given(x, origin)
    static = asked._replace(names=tuple(by_name))
    return tuple(forward_p.bind(*by_name.values(), static=static))


def backward(x: Operands, origin: Array | None, out, lse, dout, dlse, asked: Static) -> Gradients:
    """Gradients of the operands from those of out and lse; dlse may be None. asked: as in
    `forward`."""
    by_name = _given(x, origin)
    saved = zip(SAVED, (out, lse, dout, dlse), strict=True)
    by_name |= {name: array for name, array in saved if array is not None}
    static = asked._replace(names=tuple(by_name))
    grads = list(backward_p.bind(*by_name.values(), static=static))
    dq, dk, dv = grads[:3]
    drel_bias = grads.pop() if asked.rel_bias_grad else None
    dsink = grads.pop() if x.sink is not None else None
    return Gradients(dq, dk, dv, grads[3] if asked.bias_grad else None, dsink, drel_bias)


def _given(x: Operands, origin: Array | None) -> dict[str, Array]:
    by_name = {name: array for name, array in x._asdict().items() if array is not None}
    return by_name if origin is None else {**by_name, "origin": origin}


forward_p = new_primitive("heedful_attention")
backward_p = new_primitive("heedful_attention_backward")


def _result(shape: tuple[int, ...], dtype: Any, operand) -> Any:
    """The type of a result: it varies over the mesh as what it is made from does."""
    made = ShapedArray(shape, jnp.dtype(dtype))
    return sharding.varying_like(made, operand)


def _forward_type(*types, static: Static):
    facts = problem(static, types)
    results = [_result(facts.out_shape, facts.out_dtype, types)]
    vectors = facts.makes_lse + facts.keeps_rest
    results += [_result(facts.lse_shape, "float32", types) for _ in range(vectors)]
    if facts.max_scores:
        results.append(_result(facts.lse_shape, "float32", types))
    if facts.return_probs:
        results.append(_result(facts.probs_shape, facts.out_dtype, types))
    return results


def _backward_type(*types, static: Static):
    by_name = static.named(types)
    wanted = ["q", "k", "v"] + ["bias"] * static.bias_grad
    wanted += ["sink"] * ("sink" in by_name) + ["rel_bias"] * static.rel_bias_grad
    return [_result(by_name[name].shape, by_name[name].dtype, types) for name in wanted]


# vmap


def _batched(primitive, arrays, dims, *, static: Static):
    """A mapped dim joins the batch, or its elements are computed one after the other."""
    size = next(a.shape[d] for a, d in zip(arrays, dims, strict=True) if d is not None)
    mapped = dict(zip(static.names, (d is not None for d in dims), strict=True))
    shapes = {
        name: _without(array.shape, dim)
        for name, array, dim in zip(static.names, arrays, dims, strict=True)
    }
    of_entry = Operands(*(shapes.get(name) for name in Operands._fields))
    # Gradients of a sink or a bias sum over the batch, which must not join another's.
    summed = "sink" in shapes or static.rel_bias_grad or static.bias_grad
    alone = primitive is backward_p and summed
    flags = [mapped.get(name, False) for name in Operands._fields]
    if alone or "origin" in shapes or not joins(of_entry, flags, static.options):
        return _one_by_one(primitive, arrays, dims, static)
    folded = ("q", "k", "v", *SAVED)
    joined = [
        _fold(array, dim, size) if name in folded else array
        for name, array, dim in zip(static.names, arrays, dims, strict=True)
    ]
    results = primitive.bind(*joined, static=static)
    batch = shapes["q"][0]
    return [r.reshape(size, batch, *r.shape[1:]) for r in results], [0] * len(results)


def _without(shape: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
    return tuple(n for i, n in enumerate(shape) if i != dim)


def _fold(array: Array, dim: int | None, size: int) -> Array:
    """(batch, ...) with a mapped dim somewhere, or without one -> (size * batch, ...)."""
    if dim is None:
        array = jnp.broadcast_to(array, (size, *array.shape))
    else:
        array = jnp.moveaxis(array, dim, 0)
    return array.reshape(size * array.shape[1], *array.shape[2:])


def _one_by_one(primitive, arrays, dims, static: Static):
    mapped = [
        jnp.moveaxis(array, dim, 0)
        for array, dim in zip(arrays, dims, strict=True)
        if dim is not None
    ]

    def one(entry):
        rest = iter(entry)
        whole = [a if d is None else next(rest) for a, d in zip(arrays, dims, strict=True)]
        return primitive.bind(*whole, static=static)

    results = lax.map(one, mapped)
    return results, [0] * len(results)


# Platforms


def _lower(primitive, run, platform: str, context, *values, static: Static):
    """The lowering of a primitive: a part of itself on each device, or the computation."""
    context = sharding.unvaried(context)
    if sharding.is_spread(context):
        fun = _spread(primitive, static, context)
    else:
        fun = partial(run, platform, static)
    with sharding.on_one_device():
        return mlir.lower_fun(fun, multiple_results=True)(context, *values)


def _spread(primitive, static: Static, context):
    """The primitive as XLA may share it among devices: each runs it on its part."""
    facts = problem(static, context.avals_in)
    shapes = dict(zip(static.names, (a.shape for a in context.avals_in), strict=True))
    made = _RESULTS[primitive](static, facts)
    results = tuple(zip(made, (a.shape for a in context.avals_out), strict=True))
    more = _places(static, facts)
    shapes |= {name: array.shape for name, array in more.items()}
    dense = not facts.varlen_q
    shared = bool(facts.page_size or facts.kv_batch_idx or facts.varlen_k)
    layout = sharding.Layout(dense, shared, facts.heads_k, facts.group)

    def run(by_name: dict[str, Array]):
        if "batch_index" in by_name:
            by_name |= sharding.shifted(by_name)
        return primitive.bind(*by_name.values(), static=static._replace(names=tuple(by_name)))

    rule = sharding.Rule(tuple(shapes), tuple(shapes.values()), results, layout, run)
    return lambda *arrays: rule.spread()(*arrays, *more.values())


def _places(static: Static, facts: AttentionProblem) -> dict[str, Array]:
    """Arrays by which a device knows its part of the dropout mask; the function that is spread may
    have no constants."""
    if not facts.dropout_p > 0:
        return {}
    more = {"origin": jnp.array(facts.dropout_origin, jnp.uint32)}
    more = {} if {"origin", "origins"} & {*static.names} else more
    return more | sharding.places(facts.batch, facts.heads_q)


_RESULTS = {
    forward_p: lambda static, facts: (
        ["out"]
        + ["lse"] * (facts.makes_lse + facts.keeps_rest + facts.max_scores)
        + ["probs"] * facts.return_probs
    ),
    backward_p: lambda static, facts: (
        ["dq", "dk", "dv"]
        + ["dbias"] * static.bias_grad
        + ["dsink"] * facts.sink
        + ["drel_bias"] * static.rel_bias_grad
    ),
}


def _run_forward(platform: str, static: Static, *arrays):
    by_name = static.named(arrays)
    facts = problem(static, arrays)
    results = local.forward(
        platform, facts, static.operands(arrays), by_name.get("origin"), static.options.backend
    )
    return [result for result in results if result is not None]


def _run_backward(platform: str, static: Static, *arrays):
    by_name = static.named(arrays)
    facts = problem(static, arrays)
    saved = [by_name.get(name) for name in SAVED]
    x, backend = static.operands(arrays), static.options.backend
    grads = local.backward(platform, facts, x, by_name.get("origin"), saved, backend)
    return [grad for grad in grads if grad is not None]


_NO_SECOND = partial(
    RuntimeError,
    "trying to differentiate twice a function that is differentiable once: heedful's attention has"
    " no second derivative",
)
for _own, _type, _run in (
    (forward_p, _forward_type, _run_forward),
    (backward_p, _backward_type, _run_backward),
):
    register(_own, _type, partial(_batched, _own), partial(_lower, _own, _run), _NO_SECOND)
