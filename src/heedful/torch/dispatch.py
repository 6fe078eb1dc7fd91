"""Whether a call may run at once, or has to go through torch's dispatcher for somebody to see it.

The only users of torch's private names for that.
"""

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import Function, forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

_transforms_active = torch._C._are_functorch_transforms_active
_modes_active = torch._C._len_torch_dispatch_stack
_OWN = (Tensor, Parameter)

# Whether any device has autocast on: a fifth of the time of torch.is_autocast_enabled(type).
any_autocast = torch._C._is_any_autocast_enabled


def bare_apply(function: type[Function]):
    """`function.apply` for tensors that no functorch transform has ever wrapped, which saves the
    look for such wrappers: a fifth of the call."""
    # The C base class has it, which stubs do not say.
    return super(Function, function).apply  # pyright: ignore[reportAttributeAccessIssue]


def same_metadata(*tensors: Tensor):
    """A function that tells whether tensors have these ones' types, shapes, strides, dtypes and
    devices, and require gradients where these do. Made for torch.compile's guards; a fourth of the
    time of making a key and looking it up."""
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def transforms_active() -> bool:
    """Whether a functorch transform (vmap, grad, ...) is under way, outside of torch.compile."""
    return not is_compiling() and _transforms_active()


def nested_gradients() -> bool:
    """Whether a torch.func.grad runs within another."""
    kinds = [interpreter.key() for interpreter in get_interpreter_stack() or ()]
    return kinds.count(TransformType.Grad) > 1


def needs_dispatcher(q, k, v) -> bool:
    """Whether torch.compile, a functorch transform, a dispatch mode, forward-mode AD or a tensor
    subclass wants to see this call, or q, k, v are no tensors of a device at all."""
    return (
        is_compiling()
        or type(q) not in _OWN
        or type(k) not in _OWN
        or type(v) not in _OWN
        or _transforms_active()
        or _modes_active() > 0
        or forward_ad._current_level >= 0
        or q.is_meta
    )
