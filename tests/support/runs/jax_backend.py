"""The tiled JAX backend behind the interface of `support.problems.budget.run`, on torch tensors."""

from functools import lru_cache

import jax
import ml_dtypes
import numpy as np
import torch

from heedful.core.call.operands import Gradients, Operands, own_shape
from heedful.jax.tiled import scan as tiled

_NARROW = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e4m3fnuz: (torch.uint8, ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}


def as_array(tensor: torch.Tensor | None) -> np.ndarray | None:
    """The same values as NumPy has them, without the dims that a stride of 0 repeats."""
    if tensor is None:
        return None
    own = own_shape(tuple(tensor.shape), tensor.stride())
    tensor = tensor[tuple(slice(n) for n in own)].contiguous().cpu()
    if tensor.dtype in _NARROW:
        bits, dtype = _NARROW[tensor.dtype]
        return tensor.view(bits).numpy().view(dtype)
    return tensor.numpy()


def as_tensor(array) -> torch.Tensor:
    """The reverse of as_array."""
    array = np.asarray(array)
    for dtype, (bits, own) in _NARROW.items():
        if array.dtype == own:
            whole = array.view({torch.int16: np.int16, torch.uint8: np.uint8}[bits])
            return torch.from_numpy(whole.copy()).view(dtype)
    return torch.from_numpy(array.copy())


def as_operands(x: Operands) -> Operands:
    """Operands as the JAX functions have them inside."""
    arrays = [as_array(t) for t in x]
    made = Operands(*arrays)
    if made.seed is not None:
        made = made._replace(seed=made.seed.view(np.uint32))
    return made


@lru_cache(256)
def _jitted(direction: str, problem, names: tuple[str, ...]):
    def run(arrays, *rest):
        return getattr(tiled, direction)(
            problem, Operands(**dict(zip(names, arrays, strict=True)), **_absent(names)), *rest
        )

    return jax.jit(run)


def _absent(names):
    return {name: None for name in Operands._fields[:3] if name not in names}


def _call(direction: str, problem, x: Operands, *rest):
    given = {n: a for n, a in as_operands(x)._asdict().items() if a is not None}
    return _jitted(direction, problem, tuple(given))(tuple(given.values()), *rest)


def forward(problem, x: Operands, out):
    """As heedful.cpu.forward."""
    o, lse, probs = _call("forward", problem, x)
    out.copy_(as_tensor(o))
    return out, as_tensor(lse), None if probs is None else as_tensor(probs)


def backward(problem, x: Operands, out, lse, dout, dlse=None) -> Gradients:
    """As heedful.cpu.backward."""
    grads = _call("backward", problem, x, *map(as_array, (out, lse, dout, dlse)))
    return Gradients(*(None if g is None else as_tensor(g) for g in grads))
