"""Lengths and tables of int64, and sinks of 16 bits, are cast in the call."""

from typing import Any

import pytest
import torch

import heedful.torch as heedful
from heedful.torch.eager import calls
from support.problems.grids import in_turns, slow_but
from support.runs.api import compiled, dense

LONG, INT = torch.int64, torch.int32


def sequences(*bounds: int, dtype=LONG) -> tuple[Any, dict[str, Any]]:
    """q, k and v of packed sequences that end there, and their arguments."""
    torch.manual_seed(0)
    cu = torch.tensor([0, *bounds], dtype=dtype)
    longest = int(cu.diff().max())
    given = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True}
    given |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return torch.randn(3, bounds[-1], 2, 16), given


def test_results_and_gradients_are_those_of_int32_to_the_bit():
    found = []
    for dtype in (LONG, INT):
        rows, given = sequences(3, 8, 12, dtype=dtype)
        q, k, v = (t.requires_grad_() for t in rows.unbind())
        out = heedful.flash_attn_varlen_func(q, k, v, **given)
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", slow_but({torch.bfloat16}, [torch.float16, torch.bfloat16]))
def test_the_gradient_of_a_sink_has_its_dtype(dtype):
    q, k, v = dense()
    sink = torch.randn(4).to(dtype).requires_grad_()
    whole = sink.detach().float().requires_grad_()

    def gradient(sink):
        return heedful.flash_attn_func(q, k, v, sink=sink).square().sum()

    (got,), (want,) = (torch.autograd.grad(gradient(s), s) for s in (sink, whole))
    assert got.dtype == dtype and torch.equal(got, want.to(dtype))
    (got,) = torch.autograd.grad(compiled(gradient)(sink), sink)
    assert got.dtype == dtype and torch.equal(got, want.to(dtype))
    assert torch.func.grad(gradient)(sink.detach()).dtype == dtype


def cache(**more) -> dict[str, Any]:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(4, 8, 2, 16), torch.randn(4, 8, 2, 16)
    return {"q": q, "k_cache": k, "v_cache": v, "return_softmax_lse": True, **more}


NEW = {"k": torch.ones(2, 1, 2, 16), "v": torch.ones(2, 1, 2, 16)}
PREFIX = torch.linspace(-1, 1, 5 * 2 * 16).view(5, 2, 16)
STEPS: dict[str, dict[str, Any]] = {
    "pages": {"block_table": torch.tensor([[3, 1], [0, 2]])},
    "rows": {"cache_batch_idx": torch.tensor([2, 0])},
    "left": {"cache_leftpad": torch.tensor([1, 2]), "cache_batch_idx": torch.tensor([2, 0])},
    "appended": {"block_table": torch.tensor([[3, 1], [0, 2]]), **NEW},
    "prefix": {"cache_batch_idx": torch.tensor([2, 0]), "shared_prefix": (PREFIX, PREFIX), **NEW},
}


@pytest.mark.parametrize("name, traced", in_turns(STEPS, (True, False), each=4))
def test_a_step_over_a_cache_is_that_of_int32_and_float32(name, traced):
    more = STEPS[name] | {"cache_seqlens": torch.tensor([5, 6]), "sink": torch.randn(4).bfloat16()}
    plain = {
        n: t.to({LONG: INT, torch.bfloat16: torch.float32}.get(t.dtype, t.dtype))
        if isinstance(t, torch.Tensor)
        else t
        for n, t in more.items()
    }
    step = heedful.flash_attn_with_kvcache
    got, want = cache(**more), cache(**plain)
    for result, other in zip(
        (compiled(step) if traced else step)(**got), step(**want), strict=True
    ):
        assert torch.equal(result, other)
    assert torch.equal(got["k_cache"], want["k_cache"])


def test_a_merge_takes_a_sink_of_16_bits():
    outs, lses = torch.randn(2, 5, 4, 8), torch.randn(2, 4, 5)
    sink = torch.randn(4).bfloat16()
    for got, want in zip(
        heedful.merge_attn_states(outs, lses, sink),
        heedful.merge_attn_states(outs, lses, sink.float()),
        strict=True,
    ):
        assert torch.equal(got, want)


def test_a_length_beyond_int32_is_no_other_length():
    q, k, v = torch.randn(3, 2, 4, 2, 16).unbind()
    with pytest.raises(ValueError, match="^cache_seqlens must be at most"):
        heedful.flash_attn_with_kvcache(q, k, v, cache_seqlens=torch.tensor([3, 2**32 + 2]))


def test_both_dtypes_are_told_apart_in_any_order():
    for dtype in (LONG, INT, LONG, INT):
        rows, given = sequences(3, 8, 12, dtype=dtype)
        out = heedful.flash_attn_varlen_func(*rows.unbind(), **given)
        assert out.isfinite().all()


def test_new_lengths_are_not_planned_anew(monkeypatch):
    """Casts do not change with lengths."""
    pytest.importorskip("triton")
    from support.runs import standin

    described: list[Any] = []
    describe = calls.describe
    monkeypatch.setattr(calls, "describe", lambda call: described.append(call) or describe(call))
    counts = []
    for dtype in (LONG, INT):
        described.clear()
        with standin.gpu("H200"):
            for count in range(129, 250, 9):
                rows, given = sequences(count, 2 * count, dtype=dtype)
                rows = rows.repeat(1, 1, 1, 4).bfloat16()
                heedful.flash_attn_varlen_func(*rows.unbind(), **given)
        counts.append(len(described))
    assert counts[0] == counts[1] < 5


def test_explain_says_what_is_cast():
    rows, given = sequences(3, 8, 12)
    sink = torch.randn(2).bfloat16()
    said = heedful.explain(heedful.flash_attn_varlen_func, *rows.unbind(), **given, sink=sink)
    assert "cu_seqlens_q is cast to int32 by a launch of its own" in said
    assert "sink is cast to float32 by a launch of its own" in said
    more = {"cache_seqlens": torch.tensor([5, 6]), "cache_batch_idx": torch.tensor([2, 0])}
    said = heedful.explain(heedful.flash_attn_with_kvcache, **cache(**more))
    for name in more:
        assert f"{name} is cast to int32 by a launch of its own" in said
