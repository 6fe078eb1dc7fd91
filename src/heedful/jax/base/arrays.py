"""JAX's arrays as heedful's core sees them."""

from typing import Any

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp
from jax.core import Tracer

from heedful.core.base.arrays import ArraySpec
from heedful.core.base.numbers import wrong_type


def dtype_name(dtype: Any) -> str:
    """The dtype's name as heedful's core has it."""
    return str(np.dtype(dtype).name) if not _is_key(dtype) else str(dtype)


def array_spec(array: Any) -> ArraySpec:
    """The facts about an array, traced or not: XLA stores arrays densely."""
    return ArraySpec.contiguous(tuple(array.shape), dtype_name(array.dtype))


def is_traced(value: Any) -> bool:
    """Whether it has no value yet."""
    return isinstance(value, Tracer)


def check_array(name: str, value: Any) -> None:
    """TypeError unless an array of JAX or NumPy."""
    if not isinstance(value, (Array, np.ndarray, np.generic)):
        wrong_type(name, "a jax.Array", value)


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)
