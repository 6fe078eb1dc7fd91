"""Keys of calls from the metadata of their tensors."""

from typing import Any

from torch import Tensor

from heedful.core.call.arguments import Options, argument_name
from heedful.core.call.operands import Operands


def tensor_key(tensor) -> tuple:
    """The facts of an operand that a plan may depend on."""
    if not isinstance(tensor, Tensor):
        return (type(tensor),)
    address = tensor.data_ptr()
    return (
        tensor.__class__,
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        address % 16 if address else None,
        tensor.requires_grad,
        tensor.is_neg(),
    )


def tensor_keys(tensors) -> tuple:
    """The keys of many operands, None for those that are absent."""
    return (*[None if tensor is None else tensor_key(tensor) for tensor in tensors],)


def call_key(q, k, v, x: Operands | None, out, seed, bases: int) -> tuple:
    """The facts of a call's tensors that a plan may depend on, with the arguments of `attend`.
    bases: 0 if q, k and v begin at multiples of 16 bytes."""
    return (
        q.shape,
        q.stride(),
        q.dtype,
        q.device,
        k.shape,
        k.stride(),
        k.dtype,
        k.device,
        v.shape,
        v.stride(),
        v.dtype,
        v.device,
        bases and tuple([a % 16 if a else None for a in map(Tensor.data_ptr, (q, k, v))]),
        q.is_neg() or k.is_neg() or v.is_neg(),
        None if x is None else tensor_keys(x[3:]),
        None if out is None else tensor_key(out),
        None if seed is None else tensor_key(seed),
    )


def named_tensors(x: Operands, options: Options, out, seed) -> list[tuple[str, Any]]:
    """The tensors among the arguments of a call, by their public names."""
    named = (*x._asdict().items(), ("out", out), ("dropout_seed", seed))
    return [(argument_name(n, options.kind), t) for n, t in named if isinstance(t, Tensor)]
