"""The private names of torch by which operators ask its dispatcher and tracer. Eager calls do not
use this."""

import inspect
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch._C._functorch import (
    get_single_level_autograd_function_allowed,
    set_single_level_autograd_function_allowed,
)
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_slot, proxy_call
from torch.utils.checkpoint import CheckpointPolicy

# A Function for the current functorch level alone, which `Function` hides.
OneLevelFunction = _SingleLevelFunction
_PLAIN = {
    (torch._C.DispatchKeySet(dense) | torch._C.DispatchKeySet(autograd)).raw_repr()
    for dense, autograd in (
        (torch._C.DispatchKey.CPU, torch._C.DispatchKey.AutogradCPU),
        (torch._C.DispatchKey.CUDA, torch._C.DispatchKey.AutogradCUDA),
    )
}


def is_plain(keyset) -> bool:
    """Whether a kernel of the Autograd key was called with device tensors that only autograd sees:
    no transform, mode, subclass, tracer or forward-mode AD. (Compiled code with forward-mode AD in
    it was traced with tensors that are not plain.)"""
    return keyset.raw_repr() in _PLAIN and forward_ad._current_level < 0


def wants_gradients(args) -> bool:
    """Whether the current level of the dispatcher records gradients for these arguments."""
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*args)


def untraced(function):
    """Keeps torch.compile out of an operator's kernel and all that it calls. Otherwise Dynamo would
    compile these, too, if it leaves their caller to Python. Takes no time per call, unlike
    torch.compiler.disable."""
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    return function


def constant_when_traced(function):
    """Makes torch.compile call a function instead of tracing it, and take its result as a constant.
    torch.compiler.assume_constant_result does the same, but loads Dynamo."""
    function._dynamo_marked_constant = True
    return function


def register_fake(name: str, fake: Callable) -> None:
    """torch.library.register_fake of one of heedful's operators. It has `inspect` say of which
    modules its frames are, which costs 5 ms where their files are not known: then the files of all
    modules are looked for."""
    for module in (torch.library, sys.modules[__name__]):
        inspect.modulesbyfile.setdefault(inspect.getabsfile(module), module.__name__)
    torch.library.register_fake(f"heedful::{name}", fake)


def keep_result(op) -> None:
    """Makes torch.compile's partitioner save an operator's result for the backward, and not compute
    it again. Under an activation_memory_budget it would compute it again, although it is random,
    and the backward would have another mask than the forward."""

    def traced(mode, *args, **kwargs):
        # Loaded if anything is compiled, and otherwise not needed.
        from torch._functorch import config as functorch_config

        if functorch_config.activation_memory_budget == 0:
            # It then saves nothing, whatever is asked.
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
    """Whether forward-mode AD follows one of the tensors among these."""
    return torch._C._is_fwd_grad_enabled() and any(
        isinstance(arg, Tensor) and torch._VF._unpack_dual(arg, level=0)[1] is not None
        for arg in args
    )


def below_autograd(op, args: tuple):
    """Calls an operator past the Autograd key, as a kernel of that key does in the end."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def record(function: type[OneLevelFunction], op, args: tuple, plain: bool):
    """`function.apply(below, *args)` from within a kernel of the Autograd key, where `below` calls
    the operator past that key. plain: see is_plain. The dispatcher unwraps and wraps the tensors of
    each functorch transform, as for torch's own operators, so that the function sees one level;
    apply() must be told so.
    """
    # The function's forward turns both modes off, which outer levels must not see.
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


def are_in_order(sharded: Any) -> bool:
    """Whether mesh dims that split one dim of a DTensor did so from the first to the last. Torch
    has no public name for this order."""
    order = getattr(getattr(sharded, "_spec", None), "shard_order", None) or ()
    return all([list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in order])
