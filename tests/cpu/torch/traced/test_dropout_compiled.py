"""torch.compile's backward sees the dropout mask of its forward, whatever it recomputes."""

import pytest
import torch
from torch._functorch import config

import heedful
from support.problems.grids import slow_but


def masked(q, k, v):
    return heedful.flash_attn_func(q, k, v.sin(), dropout_p=0.5)


def twice(q, k, v):
    return masked(q, k, v) - masked(q, k, v)


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager_decomp_partition")


def operands() -> list[torch.Tensor]:
    """All probabilities are equal, and a row of values has 1 for its own key alone: the output
    shows the mask."""
    q, k = (torch.zeros(1, 16, 1, 16, requires_grad=True) for _ in range(2))
    return [q, k, torch.eye(16).view(1, 16, 1, 16).clone().requires_grad_()]


@pytest.mark.parametrize("budget", slow_but({1.0, 0.1}, [1.0, 0.7, 0.4, 0.1, 0.01]))
def test_the_backward_has_the_mask_of_the_forward(budget):
    with config.patch(activation_memory_budget=budget):
        q, k, v = operands()
        run = compiled(masked)
        for _ in range(2):
            out, dout = run(q, k, v), torch.randn(1, 16, 1, 16)
            (dv,) = torch.autograd.grad(out, v, dout)
            shares = (out.detach() / torch.ones(()).sin())[0, :, 0]
            wanted = shares.T @ dout[0, :, 0] * v.detach()[0, :, 0].cos()
            torch.testing.assert_close(dv[0, :, 0], wanted)


def test_two_calls_draw_a_mask_each():
    assert compiled(twice)(*operands()).abs().max() > 0


def test_a_budget_that_saves_nothing_wants_a_seed():
    with config.patch(activation_memory_budget=0.0):
        with pytest.raises(Exception, match="dropout_seed must be given where torch.compile"):
            compiled(masked)(*operands())

        def seeded(q, k, v, seed):
            return heedful.flash_attn_func(q, k, v, dropout_p=0.5, dropout_seed=seed)

        seed, given = torch.tensor([9]), operands()
        outs = [run(*given, seed=seed) for run in (seeded, compiled(seeded))]
        found = [torch.autograd.grad(out.square().sum(), given) for out in outs]
        torch.testing.assert_close(found[1], found[0])
        with torch.no_grad():
            compiled(masked)(*given)
