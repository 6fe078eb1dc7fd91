"""Kernels that leave SMs to others compute what they compute on all of them."""

from typing import Any

import pytest
import torch

import heedful
import heedful.torch as typed
from support.hopper.device import ON_HOPPER

# Lists are passed, whose types a checker does not know.
ht: Any = typed
pytestmark = ON_HOPPER


@pytest.fixture
def margin():
    yield lambda count: heedful.configure(sm_margin=count)
    heedful.configure(sm_margin=None)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_results_and_gradients_do_not_depend_on_it(margin, packed, head_dim):
    q, k, v, dout = torch.randn(4, 2, 4096, 8, head_dim, device="cuda", dtype=torch.bfloat16)

    def results():
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        if packed:
            bounds = torch.tensor([0, 1000, 8192], dtype=torch.int32, device="cuda")
            flat = [t.flatten(0, 1) for t in leaves]
            out = ht.flash_attn_varlen_func(
                *flat, bounds, bounds, 7192, 7192, causal=True, deterministic=True
            ).unflatten(0, (2, 4096))
        else:
            out = ht.flash_attn_func(*leaves, causal=True, deterministic=True)
        return out, *torch.autograd.grad(out, leaves, dout)

    whole = results()
    for count in (1, 40):
        margin(count)
        for got, want in zip(results(), whole, strict=True):
            torch.testing.assert_close(got, want, atol=0.0, rtol=0.0)


def test_a_call_that_says_how_many_it_leaves_computes_the_same():
    q, k, v = torch.randn(3, 2, 4096, 8, 128, device="cuda", dtype=torch.bfloat16)
    want = ht.flash_attn_func(q, k, v, causal=True)
    for count in (0, 7, 500):
        assert torch.equal(ht.flash_attn_func(q, k, v, causal=True, sm_margin=count), want)
