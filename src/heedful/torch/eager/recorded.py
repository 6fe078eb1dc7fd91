"""Calls on a CPU whose gradients torch's autograd makes from the operators of their forward. No
Python runs in such a backward: a function of ours costs half of the time of a short call.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from heedful.core.base import forks
from heedful.core.call.operands import Operands
from heedful.torch.base.dispatch import any_autocast

# (pack, unpack) of the innermost hooks on saved tensors, or None. Torch's stubs do not have it.
_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009
_hooks = _autograd._top_saved_tensors_default_hooks

Recorder = Callable[[Operands, Any], Tensor | None]


def recorder(call, operands: Operands) -> Recorder | None:
    """out of such a call, from the caller's tensors and seed; None if no calls of this kind are. It
    returns None where this one has to take the other way: rows far from 0, hooks on what autograd
    saves, which may change strides, autocast, a forked child.

    call: a calls.Call. operands: as its kernels get them.
    """
    problem, plan = call.problem, call.runner.plan
    module = importlib.import_module(plan.variant_of("forward").module)
    if call.results or call.steps or call.casts or call.checks:
        return None
    if not module.records(problem, operands):
        return None

    def recorded(x: Operands, seed) -> Tensor | None:
        if any_autocast() or forks.is_stranded() or _hooks(False) is not None:
            return None
        return module.recorded(problem, call.seeded(x, seed) if call.dropout else x)

    return recorded
