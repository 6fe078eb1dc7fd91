"""The few operations that masks are made of, on arrays of PyTorch or of JAX."""

import importlib
import sys
from typing import Any

from heedful.core.base.numbers import LONGEST


def namespace(name: str, array: Any) -> Any:
    """torch or jax.numpy, whose array this is. TypeError naming the argument for anything else."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(array, torch.Tensor):
        return torch
    if jax is not None and isinstance(array, jax.Array):
        return importlib.import_module("jax.numpy")
    raise TypeError(f"{name} must be a torch.Tensor or a jax.Array, got {type(array).__name__}")


def is_torch(xp: Any) -> bool:
    return xp.__name__ == "torch"


def is_compiling() -> bool:
    """Whether torch.compile traces this."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def positions(xp: Any, count: int, beside: Any) -> Any:
    """int32 0, 1, ..., count - 1, on the device of `beside`."""
    where = {"device": beside.device} if is_torch(xp) else {}
    return xp.arange(count, dtype=xp.int32, **where)


def along(xp: Any, count: int, sample: Any) -> Any:
    """`positions`, along the last dim of an array with as many dims as `sample`."""
    return positions(xp, count, sample).reshape(*(1,) * (len(sample.shape) - 1), count)


def int32(xp: Any, array: Any) -> Any:
    return array.to(xp.int32) if is_torch(xp) else array.astype(xp.int32)


def clipped(xp: Any, array: Any, most: int) -> Any:
    """int32 of ints, each from 0 to `most`. Ints of 64 bits may be far beyond."""
    wide = array.long() if is_torch(xp) else array
    if not is_torch(xp) and array.dtype.itemsize < 4:
        wide = int32(xp, array)
    return int32(xp, xp.clip(wide, 0, most))


def scattered(xp: Any, table: Any, slots: Any, values: Any) -> Any:
    """The table with values in these slots; of several for one slot, any."""
    if is_torch(xp):
        return table.scatter(0, slots, values)
    return table.at[slots].set(values)


def shape_of(name: str, array: Any, words: str) -> tuple[int, ...]:
    """The shape of an array. words: names of its dims. Raises ValueError for another number of
    dims."""
    if len(array.shape) != words.count(",") + 1:
        raise ValueError(f"{name} must be {words}, got shape {tuple(array.shape)}")
    return tuple(array.shape)


def check_ints(name: str, array: Any) -> None:
    """TypeError for an array of floats or of complex numbers."""
    xp = namespace(name, array)
    if is_torch(xp):
        is_real = array.dtype.is_floating_point or array.dtype.is_complex
    else:
        is_real = xp.issubdtype(array.dtype, xp.inexact)
    if is_real:
        raise TypeError(f"{name} must be ints, got {array.dtype}")


def check_count(name: str, value: Any, least: int) -> None:
    """TypeError or ValueError unless an int of at least so many."""
    # First: torch.compile, which counts sizes as ints, knows no attributes of theirs.
    is_int = type(value) is int
    if not is_int and (isinstance(value, bool) or not hasattr(value, "__index__")):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")


def near(value: int) -> int:
    """An int that int32 holds: positions are int32, and none lies beyond."""
    return min(value, LONGEST)
