"""Whether a call may run at once, or has to go through torch's dispatcher because a tracer, a mode
or a subclass must see it. Torch's private names for this are used only here.
"""

import sys
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import itemgetter, or_
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import Function, forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

# Whether a functorch transform (vmap, grad, ...) is active.
transforms_active = torch._C._are_functorch_transforms_active
_modes_active = torch._C._len_torch_dispatch_stack
# torch's own classes, which are no subclasses that intercept calls.
OWN = (Tensor, Parameter)

_KEY = torch._C.DispatchKey
# The keys of plain tensors of a device, and of those made in inference mode.
_BARE = {
    keys.raw_repr()
    for dense, autograd, autocast in (
        (_KEY.CPU, _KEY.AutogradCPU, _KEY.AutocastCPU),
        (_KEY.CUDA, _KEY.AutogradCUDA, _KEY.AutocastCUDA),
    )
    for keys in (
        torch._C.DispatchKeySet(dense).add(autocast),
        torch._C.DispatchKeySet(dense).add(autocast).add(_KEY.ADInplaceOrView).add(autograd),
    )
}

# Whether any device has autocast on: a fifth of the time of torch.is_autocast_enabled(type).
any_autocast = torch._C._is_any_autocast_enabled


def bare_apply(function: type[Function]):
    """`function.apply` for tensors that no functorch transform has wrapped. It does not look for
    such wrappers, which saves a fifth of the call."""
    # The C base class has it, which stubs do not say.
    return super(Function, function).apply  # pyright: ignore[reportAttributeAccessIssue]


def bare_backward(function: type[Function]) -> None:
    """Lets autograd's engine call `function.backward` directly, without looking for `vjp`: this
    saves a fiftieth of the call."""
    # In a torch without such a class, nothing changes.
    backward_class: Any = getattr(function, "_backward_cls", None)
    if backward_class is not None:
        backward_class.apply = function.backward


def same_metadata(tensors: Sequence[Tensor], moving: Sequence[int] | None = None):
    """A function that tells whether other tensors have the types, shapes, strides, dtypes and
    devices of these, require gradients where these do, and are the same object where these are. It
    is the guard code of torch.compile, and takes a fourth of the time of making a key and looking
    it up. moving: for each tensor, how many of its first sizes lengths may change, with their
    strides."""
    first = {id(tensor): index for index, tensor in reversed(list(enumerate(tensors)))}
    indices = sorted(first.values())
    unique = [tensors[index] for index in indices]
    sizes: Any = None
    strides: Any = None
    if moving is not None:
        sizes = [[None] * moving[i] + [*tensors[i].shape[moving[i] :]] for i in indices]
        strides = [[None] * (t.dim() - 1) + [*t.stride()[-1:]] for t in unique]
    guards = TensorGuards(*unique, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    if len(indices) == len(tensors):
        return guards.check
    repeats = [(i, first[id(t)]) for i, t in enumerate(tensors) if first[id(t)] != i]
    # One more: for a single place itemgetter would not return a tuple.
    pick, check = itemgetter(*indices, indices[0]), guards.check

    def fits(*others: Tensor) -> bool:
        for index, other in repeats:
            if others[index] is not others[other]:
                return False
        return check(*pick(others)[:-1])

    return fits


class Likeness:
    """Recognises tensors like those that it is made from: all begin at multiples of 16 bytes, and
    `alike(*tensors)`, for those that are there, is true."""

    __slots__ = ("_dense", "alike", "pick")

    def __init__(
        self,
        values: Sequence[Any],
        kinds: Sequence[Any] | None = None,
        places: Sequence[int] | None = None,
    ):
        """values: tensors, and other values that are the same each time. kinds: the tensors' kinds
        (kinds.ArrayKind), if lengths may differ. places: the tensors' indices, if addresses are
        wanted in another order."""
        if places is None:
            places = [index for index, value in enumerate(values) if isinstance(value, Tensor)]
        self.pick = itemgetter(*places)
        tensors = self.pick(values)
        moving, self._dense = None, []
        if kinds is not None:
            moving = [kind.moving for kind in kinds]
            self._dense = [place for place, kind in zip(places, kinds, strict=True) if kind.dense]
        self.alike = same_metadata(tensors, moving)

    def addresses(self, values: Sequence[Any]) -> list[int] | None:
        """The tensors' addresses, if they are like the first ones and aligned, and the other values
        are the same; else None. Strides of dims of one element do not matter."""
        tensors = self.pick(values)
        addresses = [*map(Tensor.data_ptr, tensors)]
        fits = not (0 in addresses or reduce(or_, addresses) & 15) and self.alike(*tensors)
        if fits and self._dense:
            fits = all([values[place].is_contiguous() for place in self._dense])
        return addresses if fits else None


def is_bare(tensor: Tensor) -> bool:
    """Whether a tensor is strided memory of a device that holds its values: not a view with a
    conjugate or negative bit, zeros without memory, a wrapper of another tensor, or traced."""
    return (
        type(tensor) in OWN
        and torch._C._dispatch_keys(tensor).raw_repr() in _BARE
        and (tensor.data_ptr() != 0 or tensor.numel() == 0)
    )


def are_bare(named: Iterable[tuple[str, Any]]) -> bool:
    """Whether all tensors among these are bare, and the call is not traced. Raises ValueError
    naming one whose memory was freed.
    """
    odd = [(n, t) for n, t in named if isinstance(t, Tensor) and not is_bare(t)]
    for name, tensor in odd:
        keys = torch._C._dispatch_keys(tensor).raw_repr()
        if type(tensor) in OWN and keys in _BARE:
            check_bare(name, tensor)
    return not odd and torch._C._get_tracing_state() is None


def check_all_bare(named: Iterable[tuple[str, Any]]) -> None:
    """`check_bare` for each."""
    for name, value in named:
        check_bare(name, value)


def check_bare(name: str, value: Any) -> None:
    """ValueError for a tensor whose memory does not hold its values even after the dispatcher."""
    if isinstance(value, Tensor) and not is_bare(value):
        raise ValueError(
            f"{name} must be a plain tensor with memory that holds its values, got a"
            f" {type(value).__name__} of shape {tuple(value.shape)} of"
            f" {torch._C._dispatch_keys(value)}, which has no such memory"
        )


def has_shards(values: Iterable[Any]) -> bool:
    """Whether one of these values, of any type, is a DTensor. Does not load the module of
    DTensors."""
    odd = [value for value in values if isinstance(value, Tensor) and type(value) not in OWN]
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any([isinstance(value, module.DTensor) for value in odd])


def no_shards(function: str) -> TypeError:
    """The error for a DTensor among the arguments of a function that takes none."""
    return TypeError(
        f"{function} takes no DTensors: give it the tensors that a rank has (DTensor.to_local)"
    )


def needs_dispatcher(q, k, v) -> bool:
    """Whether torch.compile, a functorch transform, a dispatch mode, forward-mode AD or a tensor
    subclass must see this call, or q, k, v are not tensors on a device."""
    return (
        is_compiling()
        or not (
            q.__class__ is k.__class__ is v.__class__ is Tensor
            or (type(q) in OWN and type(k) in OWN and type(v) in OWN)
        )
        or transforms_active()
        or _modes_active() > 0
        or forward_ad._current_level >= 0
        or q.is_meta
    )
