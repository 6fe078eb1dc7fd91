"""Invariant calls of JAX have the bits of PyTorch's on the same operands."""

import os
from typing import Any

import pytest

# Beside torch, which wants memory too; before JAX is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import heedful.jax  # noqa: E402
import heedful.torch  # noqa: E402

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
