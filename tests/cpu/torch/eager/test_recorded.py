"""Short calls on a CPU whose gradients torch's autograd makes: they have the values of the other
way, and what autograd alone cannot do takes that way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import heedful

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
    "causal dropout": {"dropout_p": 0.3, "dropout_seed": 5, "causal": True},
    "grouped": {"backend": "cpu"},
    "wide": {"backend": "cpu"},
    "half": {"dropout_p": 0.1, "dropout_seed": 5},
}


def leaves(name: str, length: int = 20) -> list[Any]:
    dtype = torch.float16 if name == "half" else torch.float32
    dim, heads_k = (96, 4) if name == "wide" else (16, 2 if name == "grouped" else 4)
    shapes = [(2, length, heads, dim) for heads in (4, heads_k, heads_k)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def is_recorded(out: Tensor) -> bool:
    return "Attention" not in type(out.grad_fn).__name__ or "Flash" in type(out.grad_fn).__name__


def gradients(inputs: list[Any], dout: Tensor, **how: Any) -> tuple[Tensor, ...]:
    out = heedful.flash_attn_func(*inputs, **how)
    return out, *torch.autograd.grad(out, inputs, dout)


def unhooked(tensor: Tensor) -> Tensor:
    return tensor


@pytest.mark.parametrize("name", CALLS)
def test_both_ways_have_the_same_bits(name):
    inputs = leaves(name)
    dout = torch.randn_like(inputs[0])
    for _ in range(3):
        recorded = gradients(inputs, dout, **CALLS[name])
        with saved_tensors_hooks(unhooked, unhooked):
            other = gradients(inputs, dout, **CALLS[name])
        assert is_recorded(recorded[0]) and not is_recorded(other[0])
        assert recorded[0].is_contiguous() and recorded[0].dtype == inputs[0].dtype
        assert all(torch.equal(one, two) for one, two in zip(recorded, other, strict=True))


def rows_far(inputs: list[Tensor]) -> None:
    inputs[0].data.mul_(1e4)


def row_of_nan(inputs: list[Tensor]) -> None:
    inputs[0].data[0, 1] = torch.nan


@pytest.mark.parametrize("change", [rows_far, row_of_nan])
def test_rows_that_torch_is_not_exact_for_take_the_other_way(change: Callable):
    """In known calls, too: values decide."""
    inputs = leaves("plain")
    dout = torch.randn_like(inputs[0])
    assert is_recorded(heedful.flash_attn_func(*inputs))
    change(inputs)
    assert not is_recorded(heedful.flash_attn_func(*inputs))
    want = gradients(inputs, dout, backend="cpu", return_lse=False)
    for got, exact in zip(gradients(inputs, dout), want, strict=True):
        assert torch.equal(got.isnan(), exact.isnan())
        assert torch.allclose(got, exact, rtol=1e-3, atol=1e-3, equal_nan=True)


def test_a_row_of_nan_among_few_keys_stays_nan():
    """Of fewer keys than a vector torch gives 0, and a log-sum-exp near 0."""
    inputs = leaves("plain", 5)
    row_of_nan(inputs)
    out = heedful.flash_attn_func(*inputs)
    assert out[0, 1].isnan().all() and not out[0, 0].isnan().any() and not is_recorded(out)


def test_autocast_hooks_and_results_besides_out_take_the_other_way():
    inputs = leaves("plain")
    heedful.flash_attn_func(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_recorded(heedful.flash_attn_func(*inputs))
    assert not is_recorded(heedful.flash_attn_func(*inputs, return_lse=True)[0])
    seen: list[int] = []
    with saved_tensors_hooks(lambda t: seen.append(t.data_ptr()) or t, unhooked):
        heedful.flash_attn_func(*inputs)
    assert {x.data_ptr() for x in inputs} <= {*seen}


def test_which_calls_are_recorded():
    """On the caller's thread, and where every row sees a key."""

    def recorded(rows: int, keys: int, **how: Any) -> bool:
        shapes = ((1, rows, 2, 8), (1, keys, 2, 8), (1, keys, 2, 8))
        inputs: list[Any] = [torch.randn(shape, requires_grad=True) for shape in shapes]
        return is_recorded(heedful.flash_attn_func(*inputs, backend="cpu", **how))

    assert recorded(9, 9) and recorded(9, 9, causal=True) and recorded(9, 10, causal=True)
    assert not recorded(10, 9, causal=True)
    assert recorded(9, 7) and recorded(9, 10, window_size=(-1, 0))
    assert recorded(10, 9, window_size=(-1, 1)) and not recorded(10, 8, window_size=(-1, 1))
    assert not recorded(9, 9, window_size=(3, 3)) and not recorded(9, 9, softcap=1.0)
    assert recorded(256, 256) and not recorded(256, 257)
    assert not recorded(8, 513)


def test_autograd_maps_and_accumulates_as_ever():
    inputs = leaves("plain")
    out = heedful.flash_attn_func(*inputs)
    douts = torch.randn(3, *out.shape)
    mapped = torch.autograd.grad(out, inputs, douts, is_grads_batched=True, retain_graph=True)
    for i, dout in enumerate(douts):
        alone = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        for one, many in zip(alone, mapped, strict=True):
            assert torch.allclose(one, many[i], rtol=1e-5, atol=1e-6)
    (only,) = torch.autograd.grad(out, inputs[1:2], douts[0])
    assert only.shape == inputs[1].shape


def test_a_second_derivative_is_right_or_an_error():
    inputs = leaves("plain")
    out = heedful.flash_attn_func(*inputs)
    (dq,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        dq.square().sum().backward()
    small: list[Any] = [torch.randn(1, 3, 1, 4, requires_grad=True) for _ in range(3)]

    def second(function) -> tuple[Tensor, ...]:
        (dk,) = torch.autograd.grad(function(*small).square().sum(), small[1], create_graph=True)
        return torch.autograd.grad(dk.square().sum(), small)

    how: dict[str, Any] = {"backend": "cpu", "dropout_p": 0.25, "dropout_seed": 3}
    kept = heedful.flash_attn_func(*small, **how, return_attn_probs=True)[2] > 0

    def eager(q, k, v) -> Tensor:
        q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
        p = torch.softmax(q @ k.mT / 2, -1) * kept / 0.75
        return (p @ v).transpose(1, 2).float()

    got = second(lambda *x: heedful.flash_attn_func(*x, **how))
    for one, two in zip(got, second(eager), strict=True):
        assert torch.allclose(one, two, rtol=1e-3, atol=1e-4)
