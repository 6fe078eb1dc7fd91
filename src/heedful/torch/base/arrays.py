"""ArraySpecs of torch's tensors."""

import torch
from torch import Tensor

from heedful.core.base.arrays import ArraySpec

_new = tuple.__new__


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name in heedful's core."""
    return str(dtype).removeprefix("torch.")


class _Names(dict):
    def __missing__(self, dtype: torch.dtype) -> str:
        self[dtype] = name = dtype_name(dtype)
        return name


# In a third of the time of dtype_name.
_NAMES = _Names()


def array_spec(tensor: Tensor) -> ArraySpec:
    """The facts about a tensor that has memory."""
    shape, strides, dtype = tuple(tensor.shape), tensor.stride(), _NAMES[tensor.dtype]
    return _new(ArraySpec, (shape, strides, dtype, tensor.data_ptr() % 16 == 0, tensor.device))


def abstract_spec(tensor: Tensor) -> ArraySpec:
    """The facts about a fake tensor, whose sizes may be symbols."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    return _new(ArraySpec, (shape, strides, dtype_name(tensor.dtype), True, tensor.device))
