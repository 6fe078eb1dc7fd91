"""The runner of a planned problem on CPU tensors."""

import importlib
from collections.abc import Sequence
from functools import partial

import torch

from heedful.core.call.operands import Backward, Gradients, Operands
from heedful.core.planning.plan import Plan
from heedful.torch.base.forked import on_own_thread


class CpuRunner:
    """Runs on CPU tensors."""

    def __init__(self, plan: Plan):
        self.plan, self.problem = plan, plan.problem
        self._forward = importlib.import_module(plan.variant_of("forward").module)
        backward = plan.variant_of("backward" if plan.backward else "forward")
        self._backward = importlib.import_module(backward.module)

    def forward(self, x: Operands, out: torch.Tensor | None = None):
        """(out, lse or None, probs, largest scores or None)."""
        return on_own_thread(self._forward.forward, self.plan.problem, x, out)

    def statistics(self, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        """Maximum and sum of every row, float32, with the shape of lse."""
        return on_own_thread(self._forward.statistics, self.plan.problem, x)

    def bind(self) -> None:
        """There is nothing to compile."""

    def backward_like(self, tensors: Sequence[torch.Tensor], has_dlse: bool, once: bool) -> None:
        """There is nothing to find again."""

    def backward_of(self, x: Operands, out, lse, dout, dlse=None, laid_out=False) -> Backward:
        """The backward on tensors with the layouts of these. Nothing says how gradients lie."""
        return partial(self._gradients, self._backward.backward, self.plan.problem)

    @staticmethod
    def _gradients(backward, problem, x, out, lse, dout, dlse=None, kv_grad=True) -> Gradients:
        return on_own_thread(backward, problem, x, out, lse, dout, dlse)
