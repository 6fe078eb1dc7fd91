"""Calls of JAX have the bits of PyTorch's on the same operands: invariant ones, and documents."""

import os
from typing import Any

import pytest

# Beside torch, which wants memory too; before JAX is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import heedful.jax  # noqa: E402
import heedful.torch  # noqa: E402
from heedful import masks  # noqa: E402
from heedful.core.registry.by_hand import named  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("length", [77, 1300, 8250])
@pytest.mark.parametrize(
    "more", [{}, {"causal": True}, {"causal": True, "window_size": (300, 0)}, {"softcap": 20.0}]
)
@pytest.mark.parametrize("dim", [64, 128])
def test_both_frameworks_give_the_same_bits(dim, more: dict[str, Any], length):
    torch.manual_seed(length)
    shapes = [(2, length, heads, dim) for heads in (4, 2, 2)]
    tensors = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    usual = {**more, "return_lse": True, "numerics": "invariant"}
    ours = heedful.torch.flash_attn_func(*tensors, **usual)
    arrays = [jax.dlpack.from_dlpack(x) for x in tensors]
    theirs = jax.jit(lambda *x: heedful.jax.flash_attn_func(*x, **usual))(*arrays)
    for x, y in zip(ours, theirs, strict=True):
        kind = torch.int16 if x.itemsize == 2 else torch.int32
        assert torch.equal(x.view(kind), torch.from_dlpack(y).view(kind))


@pytest.mark.parametrize("dim", [64, 128])
def test_both_frameworks_cut_rows_of_documents_and_give_the_same_bits(dim):
    """dQ is summed in any order, dK and dV in that of the queries."""
    torch.manual_seed(dim)
    tensors = [
        torch.randn(1, 16384, 16, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    ]
    *inputs, dout = tensors
    ids = torch.arange(16384, device="cuda", dtype=torch.int32)[None] // 1000
    words = heedful.torch.explain(
        heedful.torch.flash_attn_func,
        *(x.requires_grad_() for x in inputs),
        causal=True,
        key_ranges=masks.documents(ids),
    )
    assert "rows      forward and backward: cut into packed sequences" in words
    out = heedful.torch.flash_attn_func(*inputs, causal=True, key_ranges=masks.documents(ids))
    ours = out.detach(), *torch.autograd.grad(out, inputs, dout)
    q, k, v, cotangent, places = (jax.dlpack.from_dlpack(x.detach()) for x in (*tensors, ids))

    def call(q, k, v):
        documents = masks.documents(places)
        how = {"key_ranges": documents, "backend": named("hopper", cuts_rows=1)}
        return heedful.jax.flash_attn_func(q, k, v, causal=True, **how)

    made, back = jax.vjp(jax.jit(call), q, k, v)
    theirs = [torch.from_dlpack(x) for x in (made, *back(cotangent))]
    for name, x, y in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=True):
        if name == "dq":
            torch.testing.assert_close(x, y)
        else:
            assert torch.equal(x.view(torch.int16), y.view(torch.int16)), name
