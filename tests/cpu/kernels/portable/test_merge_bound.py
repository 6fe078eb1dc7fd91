"""A merge of public log-sum-exps errs by as much as their rounding to float32 explains."""

import pytest
import torch

import heedful.torch as heedful
from support.problems.merges import SIZES, Parts, largest_share, parts_near
from support.runs import standin
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter

SHAPES = ((2, 40, 37, 2, 8), (7, 300, 2, 8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_a_merge_errs_by_no_more_than_its_bound(size, shape):
    parts = parts_near(size, shape)
    largest_share(parts, *heedful.merge_attn_states(parts.outs, parts.lses))


@pytest.mark.parametrize("size", (1e4, -1e6, 1e8))
def test_the_bound_is_reached(size):
    """Two equal parts, one lse rounded down and one up by almost half a step."""
    step = float(torch.tensor(size).nextafter(torch.tensor(torch.inf))) - size
    exact = size + step * torch.tensor([0.499, 0.501], dtype=torch.float64).view(2, 1, 1, 1)
    parts = Parts(torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1, 1), exact)
    assert largest_share(parts, *heedful.merge_attn_states(parts.outs, parts.lses)) > 0.4


@pytest.mark.parametrize("size", SIZES)
def test_jax_errs_by_no_more_than_the_bound(size):
    jnp = pytest.importorskip("jax.numpy")
    from heedful.jax import merge_attn_states

    parts = parts_near(size, SHAPES[0])
    given = (jnp.asarray(parts.outs.numpy()), jnp.asarray(parts.lses.numpy()))
    out, lse = (torch.tensor(x.__array__()) for x in merge_attn_states(*given))
    largest_share(parts, out, lse)


@interpreted
@pytest.mark.parametrize("size", SIZES)
def test_the_kernel_of_gpus_errs_by_no_more_than_the_bound(size):
    parts = parts_near(size, (5, 2, 3, 2, 16))
    with standin.gpu(interprets=True):
        merged = heedful.merge_attn_states(parts.outs, parts.lses)
    largest_share(parts, *merged)


@starts_interpreter
def test_checks_of_the_kernel_pass_in_the_interpreter():
    pytest.importorskip("triton")
    pass_in_the_interpreter(__file__)
