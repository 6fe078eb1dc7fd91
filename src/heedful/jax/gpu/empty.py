"""Uninitialised memory from XLA. `jax.lax.empty` has no name: XLA would merge two equal ones, and
then copy.
"""

from typing import Any

import jax
from jax import Array

# XLA's word for it, on GPUs as on TPUs.
TARGET = "AllocateBuffer"


def empty(shape: tuple[int, ...], dtype: Any, name: str) -> Array:
    """An array whose contents are whatever is there; name: what tells it from others."""
    made = jax.ShapeDtypeStruct(shape, dtype)
    call = jax.ffi.ffi_call(TARGET, made, custom_call_api_version=1, legacy_backend_config=name)
    return call()
