"""Primitives made known to JAX: how they run, batch, differentiate and are lowered."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from heedful.jax.base import private

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
    private.wants_devices(primitive)
    for platform in PLATFORMS:
        mlir.register_lowering(primitive, partial(lower, platform), platform=platform)


def _run(primitive: Primitive, *arrays, static: Any):
    if _is_set("jax_disable_jit"):
        # As JAX's own primitives: what would run in place of the compiled one is itself.
        with jax.disable_jit(False):
            return _run(primitive, *arrays, static=static)
    with infinite_lse():
        results = _compiled(primitive, static)(*arrays)
    # A program that was compiled before the flags were set is not looked at by JAX.
    if _is_set("jax_debug_infs"):
        _check(primitive, results, "inf", np.isposinf)
    if _is_set("jax_debug_nans"):
        _check(primitive, results, "nan", np.isnan)
    return results


def _check(primitive: Primitive, results: Iterable[Array], what: str, is_wrong: Callable) -> None:
    """FloatingPointError where any value is wrong."""
    floats = (r for r in results if jnp.issubdtype(r.dtype, jnp.floating))
    if any(is_wrong(np.asarray(r, np.float32)).any() for r in floats):
        raise FloatingPointError(f"invalid value ({what}) encountered in {primitive.name}")


def _is_set(flag: str) -> bool:
    """Whether one of JAX's flags is set."""
    return getattr(jax.config, flag)


def infinite_lse() -> Any:
    """A context in which jax_debug_infs lets infinities pass: the log-sum-exp of a row without keys
    is -inf, and so is a score that a mask hides."""
    return jax.debug_infs(False) if _is_set("jax_debug_infs") else nullcontext()


@lru_cache(1024)
def _compiled(primitive: Primitive, static: Any):
    def run(*arrays):
        return primitive.bind(*arrays, static=static)

    run.__name__ = run.__qualname__ = primitive.name
    private.is_one_primitive(run)
    return jax.jit(run)
