"""A planned backend as the error budget's `Backend`: what the public functions run on."""

from dataclasses import replace

from heedful.core.registry.by_hand import forced
from heedful.torch.eager import backends


class Prepared:
    """Runs each problem through the planner with one backend asked for by name, or one kernel by
    the words of `by_hand.forced`."""

    def __init__(self, backend: str):
        self.backend = forced(backend)
        self._runner = None

    @property
    def plan(self):
        """That of the forward that ran last."""
        assert self._runner is not None
        return self._runner.plan

    def forward(self, problem, x, out):
        """(out, lse, probs)."""
        # The budget reads the log-sum-exp of every case.
        problem = replace(problem, return_lse=True)
        self._runner = backends.prepare(problem, x, self.backend)
        return self._runner.forward(x, out)

    def backward(self, problem, x, out, lse, dout, dlse=None):
        """Gradients of the forward that ran last."""
        assert self._runner is not None
        given = x, out, lse, dout, dlse
        return self._runner.backward_of(*given)(*given)
