"""Whether a call may run at once, or has to go through torch's dispatcher for somebody to see it.

The only users of torch's private names for that.
"""

import sys
from collections.abc import Iterable, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce
from operator import itemgetter, or_
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch._C._dynamo.guards import TensorGuards
from torch._C._functorch import (
    get_single_level_autograd_function_allowed,
    set_single_level_autograd_function_allowed,
)
from torch.autograd import Function, forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.compiler import is_compiling
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_slot, proxy_call
from torch.nn import Parameter
from torch.utils.checkpoint import CheckpointPolicy

# A Function of the functorch level that is at work alone, which `Function` hides.
OneLevelFunction = _SingleLevelFunction
# Whether a functorch transform (vmap, grad, ...) is under way.
transforms_active = torch._C._are_functorch_transforms_active
_modes_active = torch._C._len_torch_dispatch_stack
# The classes that are torch's own, and no subclass that wants to see a call.
OWN = (Tensor, Parameter)
_PLAIN = {
    (torch._C.DispatchKeySet(own) | torch._C.DispatchKeySet(autograd)).raw_repr()
    for own, autograd in (
        (torch._C.DispatchKey.CPU, torch._C.DispatchKey.AutogradCPU),
        (torch._C.DispatchKey.CUDA, torch._C.DispatchKey.AutogradCUDA),
    )
}

_KEY = torch._C.DispatchKey
# The keys of plain tensors of a device, and of those made in inference mode.
_BARE = {
    keys.raw_repr()
    for own, autograd, autocast in (
        (_KEY.CPU, _KEY.AutogradCPU, _KEY.AutocastCPU),
        (_KEY.CUDA, _KEY.AutogradCUDA, _KEY.AutocastCUDA),
    )
    for keys in (
        torch._C.DispatchKeySet(own).add(autocast),
        torch._C.DispatchKeySet(own).add(autocast).add(_KEY.ADInplaceOrView).add(autograd),
    )
}

# Whether any device has autocast on: a fifth of the time of torch.is_autocast_enabled(type).
any_autocast = torch._C._is_any_autocast_enabled


def bare_apply(function: type[Function]):
    """`function.apply` for tensors that no functorch transform has ever wrapped, which saves the
    look for such wrappers: a fifth of the call."""
    # The C base class has it, which stubs do not say.
    return super(Function, function).apply  # pyright: ignore[reportAttributeAccessIssue]


def bare_backward(function: type[Function]) -> None:
    """Lets autograd's engine call `function.backward` itself, which saves its look for another way
    to say what a backward is: a fiftieth of the call. Torch's own way does the same."""
    # Where a torch has no such class, or never asks it, the look is made.
    backward_class: Any = getattr(function, "_backward_cls", None)
    if backward_class is not None:
        backward_class.apply = function.backward


def same_metadata(*tensors: Tensor):
    """A function that tells whether tensors have these ones' types, shapes, strides, dtypes and
    devices, require gradients where these do, and are one where these are. Made for torch.compile's
    guards, which want each but once; a fourth of the time of making a key and looking it up."""
    return _same_kind(tensors, None)


def _same_kind(tensors: Sequence[Tensor], moving: Sequence[int] | None):
    """As `same_metadata`, but for sizes and strides that lengths may change: see Likeness."""
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
    repeats = [(index, first[id(tensor)]) for index, tensor in enumerate(tensors)]
    repeats = [(index, other) for index, other in repeats if index != other]

    def fits(*others: Tensor) -> bool:
        for index, other in repeats:
            if others[index] is not others[other]:
                return False
        return guards.check(*[others[index] for index in indices])

    return fits


class Likeness:
    """Tells tensors like those that it is made of: all have memory that begins at multiples of 16
    bytes, and `alike(*tensors)`, of those that are there, is true."""

    __slots__ = ("_dense", "alike", "pick", "places")

    def __init__(
        self,
        values: Sequence[Any],
        kinds: Sequence[Any] | None = None,
        places: Sequence[int] | None = None,
    ):
        """values: tensors, and whatever else is in its place each time. kinds: where lengths may
        differ, those of the tensors (kinds.ArrayKind). places: of the tensors, in another order
        than that in which they come."""
        if places is None:
            places = [index for index, value in enumerate(values) if isinstance(value, Tensor)]
        self.pick, self.places = itemgetter(*places), places
        tensors = self.pick(values)
        moving, self._dense = None, []
        if kinds is not None:
            moving = [kind.moving for kind in kinds]
            self._dense = [place for place, kind in zip(places, kinds, strict=True) if kind.dense]
        self.alike = _same_kind(tensors, moving)

    def are_aligned(self, values: Sequence[Any]) -> bool:
        """Whether all tensors, which are where they were, begin at multiples of 16 bytes."""
        bits = 0
        for address in map(Tensor.data_ptr, self.pick(values)):
            bits |= address
        return not bits & 15

    def addresses(self, values: Sequence[Any]) -> list[int] | None:
        """Those of tensors that `fits` says are like those, of the same lengths; else None."""
        tensors = self.pick(values)
        addresses = [*map(Tensor.data_ptr, tensors)]
        if reduce(or_, addresses) & 15 or 0 in addresses or not self.alike(*tensors):
            return None
        return addresses

    def fits(self, values: Sequence[Any], aligned: bool = False) -> bool:
        """Whether tensors, which are where they were, are like those, and aligned. Strides of dims
        of one element are of no account. aligned: they are known to be."""
        tensors, bits = self.pick(values), 0
        if not aligned:
            for address in map(Tensor.data_ptr, tensors):
                bits |= address or 1
        for place in self._dense:
            if not values[place].is_contiguous():
                return False
        return not bits & 15 and self.alike(*tensors)


def is_bare(tensor: Tensor) -> bool:
    """Whether a tensor is strided memory of a device that holds its values: no view whose signs
    are a bit of it, no zeros without memory, no wrapper of another tensor, none that is traced."""
    return (
        type(tensor) in OWN
        and torch._C._dispatch_keys(tensor).raw_repr() in _BARE
        and (tensor.data_ptr() != 0 or tensor.numel() == 0)
    )


def are_bare(named: Iterable[tuple[str, Any]]) -> bool:
    """Whether all tensors among these are bare, and nobody traces what is called.

    Raises ValueError, by its name, for one whose memory was freed.
    """
    odd = [(n, t) for n, t in named if isinstance(t, Tensor) and not is_bare(t)]
    for name, tensor in odd:
        keys = torch._C._dispatch_keys(tensor).raw_repr()
        if type(tensor) in OWN and keys in _BARE:
            check_bare(name, tensor)
    return not odd and torch._C._get_tracing_state() is None


def check_all_bare(named: Iterable[tuple[str, Any]]) -> None:
    """As `check_bare` of each."""
    for name, value in named:
        check_bare(name, value)


def check_bare(name: str, value: Any) -> None:
    """ValueError for a tensor whose memory does not hold its values, where the dispatcher has done
    what it can."""
    if isinstance(value, Tensor) and not is_bare(value):
        raise ValueError(
            f"{name} must be a plain tensor with memory that holds its values, got a"
            f" {type(value).__name__} of shape {tuple(value.shape)} of"
            f" {torch._C._dispatch_keys(value)}, which has no such memory"
        )


def has_shards(values: Iterable[Any]) -> bool:
    """Whether a DTensor is among these, which may be anything. Does not load their module."""
    odd = [value for value in values if isinstance(value, Tensor) and type(value) not in OWN]
    if not odd:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any([isinstance(value, module.DTensor) for value in odd])


def no_shards(function: str) -> TypeError:
    """What to raise where a DTensor is among the arguments of a function that takes none."""
    return TypeError(
        f"{function} takes no DTensors: give it the tensors that a rank has (DTensor.to_local)"
    )


def are_in_order(sharded: Any) -> bool:
    """Whether dims of the mesh that split one dim of a DTensor did so from the first to the last.
    Torch keeps the order, and has no public name for it."""
    order = getattr(getattr(sharded, "_spec", None), "shard_order", None) or ()
    return all([list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in order])


def is_plain(keyset) -> bool:
    """Whether a kernel of the Autograd key was called with tensors of a device that autograd alone
    looks at: no transform, no mode, no subclass, no tracer, no forward-mode AD. (Compiled code with
    forward-mode AD in it was traced with tensors that are not plain.)"""
    return keyset.raw_repr() in _PLAIN and forward_ad._current_level < 0


def wants_gradients(args) -> bool:
    """Whether the level that the dispatcher is at records what happens to these arguments."""
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*args)


def untraced(function):
    """Keeps torch.compile out of a kernel of an operator and all that it calls, which Dynamo would
    compile too where it left its caller to Python. Takes no time per call, unlike
    torch.compiler.disable."""
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    return function


def keep_result(op) -> None:
    """Has torch.compile's partitioner save an operator's result for the backward, and never compute
    again what it is of: under an activation_memory_budget it would, though that is random, and the
    backward would see another mask than the forward."""

    def traced(mode, *args, **kwargs):
        # There where anything is compiled, and not loaded by others.
        from torch._functorch import config as functorch_config

        if functorch_config.activation_memory_budget == 0:
            # It saves nothing then, whatever is asked for.
            raise ValueError(
                "dropout_seed must be given where torch.compile has an activation_memory_budget of"
                " 0, which would draw another in the backward, got None"
            )
        result: Any = proxy_call(mode, op, mode.pre_dispatch, args, kwargs)
        slot = get_proxy_slot(result, mode.tracer, None)
        if slot is not None:
            slot.proxy.node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return result

    op.py_impl(ProxyTorchDispatchMode)(traced)


def has_tangent(args) -> bool:
    """Whether forward-mode AD wants the derivative along one of the tensors among these."""
    return torch._C._is_fwd_grad_enabled() and any(
        isinstance(arg, Tensor) and torch._VF._unpack_dual(arg, level=0)[1] is not None
        for arg in args
    )


def below_autograd(op, args: tuple):
    """Calls an operator as a kernel of the Autograd key does in the end: past that key."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def record(function: type[OneLevelFunction], op, args: tuple, plain: bool):
    """`function.apply(below, *args)` from within a kernel of the Autograd key, where `below` calls
    the operator past that key. plain: see is_plain.

    There the dispatcher unwraps and wraps the tensors of each functorch transform, as for torch's
    own operators, so that the function sees one level; which apply() wants to be told.
    """
    # The function's forward has both modes off, which outer levels must not see.
    forward_mode = torch._C._is_fwd_grad_enabled()
    outer_modes = nullcontext() if plain else _both_modes(forward_mode)

    def below(*args):
        with outer_modes:
            return below_autograd(op, args)

    before = get_single_level_autograd_function_allowed()
    set_single_level_autograd_function_allowed(True)
    try:
        # The C base class has it, which stubs do not say.
        return function.apply(below, *args)  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        set_single_level_autograd_function_allowed(before)


@contextmanager
def _both_modes(forward_mode: bool):
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(forward_mode):
        yield


def needs_dispatcher(q, k, v) -> bool:
    """Whether torch.compile, a functorch transform, a dispatch mode, forward-mode AD or a tensor
    subclass wants to see this call, or q, k, v are no tensors of a device at all."""
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
