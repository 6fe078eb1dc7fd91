"""The eager path around the kernels: what is remembered of a call, and what is not."""

import threading
from typing import Any

import numpy as np
import pytest
import torch

import heedful.torch as heedful
from heedful.torch.eager.calls import CALLS, LRU


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_generations_keep_what_is_used_and_stay_bounded():
    calls = LRU(4)
    for i in range(100):
        if calls.young.get("used") is None and calls.find("used") is None:
            assert i == 0, "forgot an entry that was used at every step"
            calls.put("used", 1)
        calls.put(i, i)
        assert len(calls) <= 9
    assert calls.find(0) is None and calls.young[99] == 99


def test_an_old_entry_returns_on_use():
    calls = LRU(2)
    for name in "abc":
        calls.put(name, name)
    assert "a" not in calls.young
    assert calls.find("a") == "a" and calls.young["a"] == "a"
    assert calls.find("nothing") is None


def test_the_same_kind_of_call_is_planned_once():
    CALLS.clear()
    for _ in range(3):
        q, k, v = (torch.randn(1, 6, 2, 8) for _ in range(3))
        heedful.flash_attn_func(q, k, v, causal=True)
    assert len(CALLS) == 1


DIFFERENCES = {
    "length": lambda q: (torch.randn(1, 7, 2, 8), {}),
    "strides": lambda q: (q.transpose(1, 2).contiguous().transpose(1, 2), {}),
    "dtype": lambda q: (q.bfloat16(), {}),
    "alignment": lambda q: (torch.randn(97)[1:].view(1, 6, 2, 8), {}),
    "gradient": lambda q: (q.clone().requires_grad_(), {}),
    "argument": lambda q: (q, {"softcap": 2.0}),
    "extra": lambda q: (q, {"sink": torch.zeros(2)}),
}


@pytest.mark.parametrize("change", DIFFERENCES.values(), ids=DIFFERENCES)
def test_whatever_a_plan_may_depend_on_makes_another_kind(change):
    q = torch.randn(1, 6, 2, 8)
    other, keywords = change(q)
    CALLS.clear()
    heedful.flash_attn_func(q, q, q, backend="cpu")
    heedful.flash_attn_func(other, other, other, backend="cpu", **keywords)
    assert len(CALLS) == 2


def test_a_decoding_loop_with_int_lengths_is_one_kind():
    """The length of the cache changes with every token, and must not plan anew."""
    cache = torch.zeros(1, 16, 1, 8), torch.zeros(1, 16, 1, 8)
    CALLS.clear()
    for length in range(10):
        new = torch.randn(1, 1, 1, 8)
        heedful.flash_attn_with_kvcache(new, *cache, new, new, cache_seqlens=length)
    assert len(CALLS) == 1


def test_an_int_length_is_checked_at_every_step():
    cache = torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 1, 8)
    new = torch.ones(1, 1, 1, 8)
    heedful.flash_attn_with_kvcache(new, *cache, new, new, cache_seqlens=3)
    before = cache[0].clone()
    with pytest.raises(ValueError, match="cache_seqlens must lie between 0 and 3"):
        heedful.flash_attn_with_kvcache(new, *cache, new, new, cache_seqlens=4)
    assert torch.equal(cache[0], before)


def test_lengths_on_a_cpu_are_checked_at_every_call():
    q = torch.randn(5, 2, 8)
    heedful.flash_attn_varlen_func(q, q, q, ints(0, 2, 5), ints(0, 2, 5), 3, 3)
    with pytest.raises(ValueError, match="cu_seqlens_k must end within k's 5 tokens, got 6"):
        heedful.flash_attn_varlen_func(q, q, q, ints(0, 2, 5), ints(0, 2, 6), 3, 4)
    with pytest.raises(ValueError, match="max_seqlen_q must be at least the longest"):
        heedful.flash_attn_varlen_func(q, q, q, ints(0, 1, 5), ints(0, 2, 5), 3, 3)


def test_seeds_are_not_part_of_the_kind():
    q = torch.randn(1, 6, 2, 8)
    CALLS.clear()
    outs = [heedful.flash_attn_func(q, q, q, 0.5, dropout_seed=seed) for seed in range(3)]
    assert len(CALLS) == 1
    assert not torch.equal(outs[0], outs[1])


def test_results_are_dense_whatever_the_inputs_are():
    """As in flash-attn: `out.view(batch, seqlen, -1)` is what every model does next."""
    q, k, v = (torch.randn(2, 4, 6, 8).transpose(1, 2) for _ in range(3))
    for causal in (False, True):
        assert heedful.flash_attn_func(q, k, v, causal=causal).is_contiguous()


def test_threads_get_their_own_results():
    problems = [torch.randn(3, 1, 5 + i, 2, 8).unbind() for i in range(4)]

    def attention(i: int) -> torch.Tensor:
        q, k, v = problems[i]
        return heedful.flash_attn_func(q, k, v, causal=True, backend="cpu")

    want = [attention(i) for i in range(4)]
    CALLS.clear()
    wrong: list[int] = []

    def work(index: int):
        for step in range(50):
            i = (index + step) % 4
            if not torch.equal(attention(i), want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_two_threads_never_share_a_default_mask():
    q = torch.zeros(1, 8, 1, 8)
    v = torch.eye(8).view(1, 8, 1, 8)
    masks: list[bytes] = []

    def draw():
        for _ in range(25):
            kept = heedful.flash_attn_func(q, q, v, 0.5) > 0
            masks.append(bytes(kept.flatten().to(torch.uint8).tolist()))

    threads = [threading.Thread(target=draw) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(masks)) == len(masks) == 50


def test_inference_mode_and_parameters_take_the_eager_path():
    q = torch.nn.Parameter(torch.randn(1, 6, 2, 8))
    with torch.inference_mode():
        out = heedful.flash_attn_func(q, q, q, causal=True)
    assert out.is_inference()
    heedful.flash_attn_func(q, q, q, causal=True, backend="cpu").sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()


def test_every_public_name_is_there():
    import heedful as top

    for name in heedful.__all__:
        assert getattr(top, name) is getattr(heedful, name)
        assert getattr(heedful, name).__doc__


def test_a_call_is_not_taken_for_the_last_one_with_the_same_options():
    def draw(length, heads=2, dtype=torch.float32, grad=False, swapped=False):
        shape = (1, heads, length, 8) if swapped else (1, length, heads, 8)
        tensors = (torch.randn(shape, dtype=dtype) for _ in range(3))
        tensors = (t.transpose(1, 2) if swapped else t for t in tensors)
        return [t.requires_grad_(grad) for t in tensors]

    kinds = [{}, {"heads": 4}, {"dtype": torch.bfloat16}, {"grad": True}, {"swapped": True}]
    inputs = [draw(length, **kind) for _ in range(3) for kind in kinds for length in (16, 24)]
    CALLS.clear()
    together = [heedful.flash_attn_func(q, k, v, backend="cpu") for q, k, v in inputs]
    for (q, k, v), out in zip(inputs, together, strict=True):
        CALLS.clear()
        assert torch.equal(heedful.flash_attn_func(q, k, v, backend="cpu"), out)
        assert out.requires_grad == q.requires_grad
    q, k, v = draw(16)
    for bad in (k.to(torch.bfloat16), k[..., :4], k[:, :, :1].expand(-1, -1, 3, -1)):
        heedful.flash_attn_func(q, k, v, backend="cpu")
        with pytest.raises((TypeError, ValueError)):
            heedful.flash_attn_func(q, bad, v, backend="cpu")


@pytest.mark.parametrize("window", [(-1.0, -1), (-1, -1.0), (np.float64(-1), -1), (-1, -1, False)])
def test_what_equals_a_default_is_not_taken_for_it(window):
    """Not after a call with the default either."""
    q, k, v = torch.randn(2, 9, 4, 16), *torch.randn(2, 2, 12, 2, 16)
    flat: Any = [t[0] for t in (q, k, v)]
    bounds: Any = (ints(0, 9), ints(0, 12), 9, 12)
    calls: list[Any] = [
        lambda **more: heedful.flash_attn_func(q, k, v, **more),
        lambda **more: heedful.flash_attn_varlen_func(*flat, *bounds, **more),
        lambda **more: heedful.flash_attn_with_kvcache(q, k, v, **more),
    ]
    for call in calls:
        call(window_size=(-1, -1, 0))
        call()
        with pytest.raises(TypeError, match="window_size"):
            call(window_size=window)
    for call in calls[:2]:
        for zero in (False, 0.0, np.bool_(False)):
            with pytest.raises(TypeError, match=r"dropout_origin\[1\]"):
                call(dropout_origin=(0, zero, 0, 0))
