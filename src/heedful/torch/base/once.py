"""Gradients that are not differentiated again."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def _dependent(cotangent: Tensor) -> Tensor:
    """A gradient that requires one, so that `once_differentiable` makes results that raise."""
    return cotangent if cotangent.requires_grad else cotangent.detach().requires_grad_()


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of a Function, which raises wherever its gradients are differentiated again:
    `once_differentiable` raises only if what comes in depends on something."""
    guarded = once_differentiable(backward)

    def run(ctx, *grads):
        if torch.is_grad_enabled():
            return guarded(ctx, *[g if g is None else _dependent(g) for g in grads])
        return backward(ctx, *grads)

    return run
