"""How often the Hopper backward rounds dS, read off single elements."""

from typing import Any

import pytest
import torch

import heedful
from support.hopper.device import ON_HOPPER, WITH_TRITON_3_9

pytestmark = [*ON_HOPPER, WITH_TRITON_3_9]


def probabilities_and_dp(head_dim: int, heads: int, device: str, backend: str | None = None):
    """(dS read, P, dP), float64 (heads, 64 keys): of one query a head, whose last element is 1, so
    that dK's last column is dS. Each key comes twice, with v and with -v: the output is 0, and
    nothing is taken off dP. The scale is 1."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int):
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    q, k, v = drawn(1, 1, heads, head_dim), drawn(1, 32, heads, head_dim), drawn(1, 32, heads, 64)
    q[..., -1], k[..., -1] = 1, 0
    q[..., :-1] *= 2 * head_dim**-0.5
    k, v = torch.cat((k, k), 1), torch.cat((v, -v), 1)
    v = torch.nn.functional.pad(v, (0, head_dim - 64))
    dout = torch.nn.functional.pad(drawn(1, 1, heads, 64), (0, head_dim - 64))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    call: Any = heedful.flash_attn_func
    out = call(*inputs, softmax_scale=1.0, backend=backend)
    (dk,) = torch.autograd.grad(out, k, dout)
    q, k, v, dout = (x.detach().double() for x in (q, k, v, dout))
    p = torch.einsum("bmhd,bnhd->hn", q, k).softmax(-1)
    return dk[0, :, :, -1].double().T, p, torch.einsum("bmhd,bnhd->hn", dout, v)


def units(x: torch.Tensor) -> torch.Tensor:
    """The distance of neighbouring bfloat16 at each number."""
    return 2.0 ** (x.abs().log2().floor() - 7)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_score_gradients_are_rounded_to_bfloat16_once(head_dim):
    """P waits for dP with float16's 11 bits: half a unit of these is an eighth of one of dS at
    most. As bfloat16 it would be off by a whole one."""
    found, p, dp = probabilities_and_dp(head_dim, 64, "cuda", "hopper")
    assert p.min() > 2.0**-29
    error = (found - p * dp).abs() / units(p * dp)
    # Exponents up to 16 in float32, in units of bfloat16.
    of_float32 = 16 * 2.0**-24 / 2.0**-8
    assert error.max() <= 1 / 2 + 1 / 8 + of_float32
