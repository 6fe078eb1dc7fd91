"""A layer's call that came before runs on the tensors as the model holds them: no view, one node of
autograd, and the same results."""

from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import heedful
from heedful import flash_attn_func
from heedful.integrations.transformers import attention as layers
from heedful.torch.eager import heads_first
from heedful.torch.eager.calls import CALLS
from support.integrations.counts import known
from support.runs import standin

# More rows than calls of which torch's autograd makes the gradients.
BATCH, ROWS, DIM = 2, 520, 16
MODULE: Any = torch.nn.Module()
KINDS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "whole": {"is_causal": False},
    "scale": {"is_causal": True, "scaling": 0.5},
    "window": {"is_causal": True, "sliding_window": 5},
    "softcap": {"is_causal": True, "softcap": 3.0},
}


@pytest.fixture(autouse=True)
def forgets():
    heedful.configure()


def drawn(grads: tuple[bool, ...] = (True, True, True), dtype=torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(BATCH, heads, ROWS, DIM, dtype=dtype) for heads in (2, 1, 1)]
    return [x.requires_grad_(wanted) for x, wanted in zip(made, grads, strict=True)]


def layer(qkv: list[Tensor], **facts: Any) -> Tensor:
    q, k, v = qkv
    return layers.attention(MODULE, q, k, v, None, **facts)[0]


def is_known(qkv: list[Tensor], **facts: Any) -> bool:
    """Whether the next call needs no views. Makes six."""
    for _ in range(6):
        layer(qkv, **facts)
    return any(isinstance(found, heads_first._Known) for found in CALLS.young.values())


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_known_layer_does_what_our_own_call_does(needs_grad):
    qkv = drawn((needs_grad,) * 3, torch.float16)
    rows_first: Any = [x.detach().transpose(1, 2).requires_grad_(needs_grad) for x in qkv]
    with standin.gpu("H200") as gpu:
        gpu.take = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
        own = known(lambda: flash_attn_func(*rows_first, causal=True))
        got = known(lambda: layer(qkv, is_causal=True))
        record: Any = layer(qkv, is_causal=True).grad_fn
    assert got["copies"] == 0 and got["made"] == own["made"]
    assert got["views"] == 3 * needs_grad  # Inside of the node.
    assert got["functions"] <= own["functions"] + 3
    if needs_grad:
        sources = {type(node).__name__ for node, _ in record.next_functions if node}
        assert sources == {"AccumulateGrad"}


@pytest.mark.parametrize("grads", [(True,) * 3, (True, False, False), (False, True, True)])
def test_results_of_known_layers_are_those_of_new_ones(grads):
    """Kinds take turns: none is taken for another."""
    qkv = drawn(grads)
    leaves = [x for x in qkv if x.requires_grad]
    dout = torch.randn(BATCH, ROWS, 2, DIM)

    def results(facts: dict[str, Any]) -> list[Tensor]:
        out = layer(qkv, **facts)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    wanted = {name: results(facts) for name, facts in KINDS.items()}
    for _ in range(6):
        for name, facts in KINDS.items():
            for one, other in zip(results(facts), wanted[name], strict=True):
                assert torch.equal(one, other) and one.stride() == other.stride()
    kept = [x for x in CALLS.young.values() if isinstance(x, heads_first._Known)]
    assert len(kept) == len(KINDS)


def test_learned_queries_learn_however_often_they_come():
    q, k, v = drawn()
    shared = q[:1].detach().requires_grad_()
    found = []
    for _ in range(7):
        out = layer([shared, k, v], is_causal=False)
        found.append(torch.autograd.grad(out.sum(), [shared, k, v]))
    assert all(torch.equal(x, y) for got in found for x, y in zip(got, found[0], strict=True))
    assert found[0][0].shape == shared.shape


def test_a_known_layer_saves_what_a_new_one_saves():
    def saved() -> list[tuple]:
        found: list[tuple] = []
        pack = lambda x: found.append((x.shape, x.stride(), x.dtype)) or x  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            layer(qkv, is_causal=True).sum().backward()
        return found

    qkv = drawn()
    first = saved()
    assert is_known(qkv, is_causal=True)
    assert saved() == first and len(first) == 5


def test_a_known_layer_refuses_what_a_new_one_refuses():
    qkv = drawn()
    assert is_known(qkv, is_causal=True)
    out = layer(qkv, is_causal=True)
    (dq,) = torch.autograd.grad(out.sum(), qkv[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()
    out = layer(qkv, is_causal=True)
    with torch.no_grad():
        qkv[1].add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


def test_what_must_see_a_call_sees_a_known_one():
    qkv = drawn()
    assert is_known(qkv, is_causal=True)
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        layer(qkv, is_causal=True)
    assert any("heedful" in name for name in seen)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(qkv, is_causal=True).dtype == torch.bfloat16
    together = torch.vmap(lambda q, k, v: layer([q, k, v], is_causal=True))
    stacked = [torch.stack([x, 2 * x]) for x in qkv]
    assert torch.allclose(together(*stacked)[0], layer(qkv, is_causal=True), atol=1e-6)


def test_a_step_of_one_row_keeps_nothing():
    """Its number of keys hardly comes again, and keeping it takes longer than it saves."""
    qkv = drawn((False,) * 3, torch.float16)
    with standin.gpu("H200") as gpu:
        gpu.take = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
        assert not is_known([qkv[0][:, :, :1], *qkv[1:]], is_causal=True)
        assert is_known(qkv, is_causal=True)
