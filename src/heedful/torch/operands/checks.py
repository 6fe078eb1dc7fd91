"""The checks of a call's tensors that only torch can make: their types, their devices, and whether
autograd records them. `core.call.describe` checks all else on their ArraySpecs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from heedful.core.base.arrays import ArraySpec
from heedful.core.base.numbers import wrong_type
from heedful.core.call import describe
from heedful.core.call.arguments import AttentionCall, Options, argument_name
from heedful.core.call.operands import SCALES, Operands
from heedful.torch.base.arrays import array_spec, dtype_name

FLOATS = tuple(getattr(torch, name) for name in describe.FLOATS)
# Operands of floating point that have no gradient.
CONSTANTS = ("alibi_slopes", *SCALES)
# Whether a call is recorded, and whether it will want the gradients of bias and rel_bias.
Grads = tuple[bool, bool, bool]


def attention_call(
    x: Operands,
    options: Options,
    grad: Grads,
    out: Tensor | None = None,
    seed: Any = None,
    spec: Callable[[Tensor], ArraySpec] = array_spec,
) -> AttentionCall:
    """A call for `core.call.describe`, after a check that its operands are tensors. x: the caller's
    tensors. out: the tensor to write, if any. grad: whether autograd records this call, and whether
    it will want the gradients of bias and rel_bias. spec: `abstract_spec` for fake tensors.

    Raises TypeError or ValueError.
    """
    check_tensors(x, options)
    check_seed(seed, x.q.device)
    if isinstance(seed, Tensor):
        x = x._replace(seed=seed)
    if grad[0]:
        check_constants(x)
    place = None
    if out is not None:
        check_own_out(out, x.q)
        place = spec(out)
    specs = Operands._make([None if tensor is None else spec(tensor) for tensor in x])
    return AttentionCall(specs, options, *grad, out=place)


def check_tensor(name: str, value: Any, device: torch.device | None = None, peer: str = "q"):
    """TypeError unless a dense tensor, ValueError unless on `device`, that of `peer`."""
    if not isinstance(value, Tensor):
        wrong_type(name, "a torch.Tensor", value)
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense (strided) tensor, got layout {value.layout}")
    if device is not None:
        describe.check_device(name, value.device, device, peer)


def check_tensors(x: Operands, options: Options) -> None:
    """Raises unless every operand is a dense tensor on q's device, or absent where it may be."""
    needed = ("k", "v", "cu_seqlens_q") if options.kind == "varlen" else ("k", "v")
    check_tensor("q", x.q)
    device = x.q.device
    for operand, value in zip(Operands._fields, x, strict=True):
        if value is not None or operand in needed:
            check_tensor(argument_name(operand, options.kind), value, device)


def check_dtype(name: str, tensor: Tensor, *wanted: str) -> None:
    """TypeError unless the dtype's name is one of `wanted`."""
    describe.check_dtype(name, dtype_name(tensor.dtype), *wanted)


def requires_gradients(x: Operands) -> bool:
    """Whether an operand that has a gradient requires one; operands may be anything."""
    bias, sink, rel_bias = x.bias, x.sink, x.rel_bias
    return (
        x.q.requires_grad
        or x.k.requires_grad
        or x.v.requires_grad
        or (isinstance(bias, Tensor) and bias.requires_grad)
        or (isinstance(sink, Tensor) and sink.requires_grad)
        or (isinstance(rel_bias, Tensor) and rel_bias.requires_grad)
    )


def gradients_wanted(x: Operands) -> Grads:
    """Whether autograd records a call of these operands, of its bias, and of its rel_bias."""
    if not torch.is_grad_enabled() or not requires_gradients(x):
        return False, False, False
    of_bias = isinstance(x.bias, Tensor) and x.bias.requires_grad
    return True, of_bias, isinstance(x.rel_bias, Tensor) and x.rel_bias.requires_grad


def wanting(x: Operands) -> str:
    """The name of an operand that requires a gradient that is not computed; "" if there is none."""
    for operand in CONSTANTS:
        tensor = getattr(x, operand)
        if tensor is not None and tensor.requires_grad:
            return operand
    return ""


def check_constants(x: Operands) -> None:
    """ValueError where a gradient is wanted that is not computed."""
    operand = wanting(x)
    if operand:
        raise ValueError(
            f"{operand} must not require a gradient, as none is computed for it, got one that does"
            f" (pass {operand}.detach(), or call under torch.no_grad())"
        )


def check_seed(seed: Any, device: torch.device) -> None:
    """dropout_seed as `plain.plain_seed` leaves it: None, an int or a tensor on the device."""
    if isinstance(seed, Tensor):
        check_tensor("dropout_seed", seed, device)
    elif seed is not None:
        describe.check_seed(seed)


def check_own_out(out: Any, q: Tensor, needs_grad: bool = False) -> None:
    """TypeError or ValueError unless `out` is a tensor on q's device that autograd leaves alone."""
    check_tensor("out", out, q.device)
    if needs_grad or out.requires_grad:
        raise describe.no_out()
