"""Primitives made known to JAX: how they run, batch, differentiate and are lowered."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from heedful.jax.private import wants_devices

PLATFORMS = ("cpu", "cuda", "rocm")


def new_primitive(name: str) -> Primitive:
    """A primitive of several results, to be registered."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    return primitive


def register(
    primitive: Primitive,
    type_of: Callable,
    batched: Callable,
    lower: Callable,
    no_derivative: Callable[[], Exception],
) -> None:
    """Says what a primitive is, whose only parameter is `static`: everything but its arrays.

    type_of(*types): the types of its results. batched(arrays, dims): results and their batch dims.
    lower(platform, context, *values): its results in MLIR. no_derivative: makes what is raised
    where one is asked for.
    """

    def jvp(primals, tangents, *, static):
        raise no_derivative()

    primitive.def_impl(partial(_run, primitive))
    primitive.def_abstract_eval(type_of)
    batching.primitive_batchers[primitive] = batched
    ad.primitive_jvps[primitive] = jvp
    wants_devices(primitive)
    for platform in PLATFORMS:
        mlir.register_lowering(primitive, partial(lower, platform), platform=platform)


def _run(primitive: Primitive, *arrays, static: Any):
    return _compiled(primitive, static)(*arrays)


@lru_cache(1024)
def _compiled(primitive: Primitive, static: Any):
    return jax.jit(partial(primitive.bind, static=static))
