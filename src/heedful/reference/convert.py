"""From torch tensors to the NumPy arrays that the oracle takes."""

from typing import overload

import numpy as np
import torch

from heedful.core.call.operands import Operands


@overload
def as_numpy(tensor: None) -> None: ...
@overload
def as_numpy(tensor: torch.Tensor) -> np.ndarray: ...
@overload
def as_numpy(tensor: torch.Tensor | None) -> np.ndarray | None: ...
def as_numpy(tensor: torch.Tensor | None) -> np.ndarray | None:
    """The same values: floating point as float64, the rest in its own type.

    Dims that a stride of 0 repeats stay so: the oracle reads a bias's own shape from its strides.
    """
    if tensor is None:
        return None
    bare = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and bare.shape[dim] > 1:
            bare = bare.narrow(dim, 0, 1)
    bare = bare.cpu()
    array = bare.float().double().numpy() if _narrow(bare) else bare.numpy()
    if bare.dtype == torch.float32:
        array = array.astype(np.float64)
    return np.broadcast_to(array, tuple(tensor.shape))


def _narrow(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize < 4


def operands_as_numpy(x: Operands) -> Operands:
    """Every tensor of the call by `as_numpy`."""
    return Operands(*(as_numpy(field) for field in x))
