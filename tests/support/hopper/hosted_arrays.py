"""NumPy arrays that stand for tensors in hosted Gluon functions (hosted.py), which no thread waits
for: whole tiles of rows, with the memory that they go to.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np


class Tensor(np.ndarray):
    """An array with what device code asks of a tensor."""

    # Of a constexpr, which some are.
    type = SimpleNamespace(layout=None)

    def to(self, dtype, bitcast: bool = False) -> "Tensor":
        if bitcast:
            return tensor(np.asarray(self).view(dtype), dtype)
        return self.astype(dtype).view(Tensor)

    def permute(self, order) -> "Tensor":
        return self.transpose(order)


def tensor(values, dtype: Any = np.int32) -> Tensor:
    return np.asarray(values, dtype).view(Tensor)


class Memory:
    """Addresses of elements of an array: one, or one for each element of a tensor."""

    def __init__(self, array: np.ndarray, at: Any = 0):
        self.array, self.at = array, tensor(at, np.int64)
        self.dtype = SimpleNamespace(element_ty=array.dtype)

    def __add__(self, count) -> "Memory":
        return Memory(self.array, self.at + count)

    def __getitem__(self, index) -> "Memory":
        return Memory(self.array, self.at[index])

    def to(self, dtype) -> "Memory":
        """The same addresses of wider elements, at whose beginnings they must lie."""
        times = np.dtype(dtype).itemsize // self.array.itemsize
        assert not (self.at % times).any()
        return Memory(self.array.reshape(-1).view(dtype), self.at // times)

    def places(self, mask) -> tuple[np.ndarray, np.ndarray]:
        """Elements and which of them count: those lie in the array."""
        at, counts = np.broadcast_arrays(self.at, mask)
        inside = (at >= 0) & (at < self.array.size)
        assert (inside | ~counts).all(), "outside of memory"
        return np.where(counts, at, 0), counts


class Arrays:
    """What of `gl` and `tl` these functions use. program, programs: this one's number, and how many
    there are."""

    float32, int32, int64, int1 = np.float32, np.int32, np.int64, np.bool_
    constexpr = None
    PropagateNan = SimpleNamespace(ALL=True)
    static_range = range
    SliceLayout = BlockedLayout = NVMMADistributedLayout = staticmethod(lambda *args: None)

    def __init__(self, program: int = 0, programs: int = 1):
        self._program, self._programs = program, programs

    def program_id(self, axis):
        return tensor(self._program)

    def num_programs(self, axis):
        return tensor(self._programs)

    def barrier(self):
        """All is done in order here."""

    def arange(self, begin, end, layout=None):
        return tensor(np.arange(begin, end))

    def full(self, shape, value, dtype, layout=None):
        return tensor(np.full(shape, value), dtype)

    def zeros(self, shape, dtype, layout=None):
        return self.full(shape, 0, dtype)

    def zeros_like(self, x):
        return np.zeros_like(x)

    def to_tensor(self, x):
        return tensor(x)

    def pointer_type(self, dtype):
        return dtype

    def cast(self, x, dtype):
        return tensor(x, dtype)

    def cdiv(self, a, b):
        return -(-a // b)

    def where(self, condition, a, b):
        return _as(a, b, np.where(condition, a, b))

    def minimum(self, a, b):
        return _as(a, b, np.minimum(a, b))

    def maximum(self, a, b, propagate_nan=True):
        return _as(a, b, np.maximum(a, b))

    def fma(self, a, b, c):
        exact = np.asarray(a, np.float64) * np.float64(np.float32(b)) + np.asarray(c, np.float64)
        return tensor(exact, np.float32)

    def exp2(self, x):
        return np.exp2(x)

    def log2(self, x):
        with np.errstate(divide="ignore"):
            return np.log2(x)

    def log(self, x):
        with np.errstate(divide="ignore"):
            return np.log(x)

    def abs(self, x):
        return np.abs(x)

    def sum(self, x, axis):
        return tensor(np.sum(x, axis), x.dtype)

    def max(self, x, axis):
        return tensor(np.max(x, axis), x.dtype)

    def expand_dims(self, x, axis):
        return np.expand_dims(x, axis) if isinstance(x, np.ndarray) else x[_behind(x, axis)]

    def convert_layout(self, x, layout):
        return x

    def load(self, place, mask=True, other=0, cache_modifier=""):
        at, counts = place.places(mask)
        return tensor(np.where(counts, place.array.flat[at], other), place.array.dtype)

    def store(self, place, value, mask=True):
        at, counts = place.places(mask)
        counts, value = np.broadcast_arrays(counts, value)
        at = np.broadcast_to(at, counts.shape)[counts]
        assert len(np.unique(at)) == len(at), "written twice"
        place.array.flat[at] = value[counts]

    def atomic_add(self, place, value, sem="", scope=""):
        old = self.load(place)
        self.store(place, old + value)
        return old


def _behind(x: Memory, axis: int) -> tuple:
    index: list = [slice(None)] * x.at.ndim
    index.insert(axis, None)
    return tuple(index)


def _as(a, b, made) -> Tensor:
    """The result, of the dtype of those that are tensors: numbers take theirs."""
    dtypes = [x.dtype for x in (a, b) if isinstance(x, np.ndarray)]
    return tensor(made, np.result_type(*dtypes) if dtypes else made.dtype)
