"""The facts about an array that do not depend on its values, whatever its framework."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from heedful.core.base.numbers import truth, wholes
from heedful.core.base.symbols import if_above, larger

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4}


def item_bytes(dtype: str) -> int:
    """Bytes of one stored element."""
    return ITEM_BYTES.get(dtype, 1)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense row-major array, as torch has them."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= larger(size, 1)
    return tuple(reversed(strides))


def ordered_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense array whose dims lie in memory in the order of these ones."""
    order = sorted(range(len(shape)), key=strides.__getitem__, reverse=True)
    by_axis = dict(zip(order, dense_strides([shape[axis] for axis in order]), strict=True))
    return tuple([by_axis[axis] for axis in range(len(shape))])


class _Fields(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    aligned: bool
    device: Any


class ArraySpec(_Fields):
    """An array: shape, strides in elements, the name of its dtype (as torch and NumPy have it),
    whether its address is a multiple of 16 bytes, and the device it is on, None where that does not
    matter."""

    __slots__ = ()

    def __new__(
        cls,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: str,
        aligned: bool = True,
        device: Any = None,
    ):
        # NumPy's numbers would make other keys than Python's, and cannot be written as JSON.
        shape, strides = wholes("shape", shape), wholes("strides", strides)
        if len(strides) != len(shape):
            raise ValueError(f"strides must be as many as dims, got {strides} for shape {shape}")
        return cls._make((shape, strides, dtype, truth("aligned", aligned), device))

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: str, device: Any = None) -> "ArraySpec":
        """A dense row-major array, as scratch is."""
        return cls(tuple(shape), dense_strides(shape), dtype, device=device)

    @property
    def steps(self) -> tuple[int, ...]:
        """The strides, with 0 for a dim of one element, whose stride does not matter."""
        return tuple(map(_step, self.shape, self.strides))

    @property
    def size(self) -> int:
        """How many elements it has."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.size * item_bytes(self.dtype)


def _step(size: int, stride: int) -> int:
    return if_above(size, 1, stride, 0)
