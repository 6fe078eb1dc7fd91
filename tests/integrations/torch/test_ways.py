"""What a call of torch's attention costs the host once it is known: counted, not timed. The GPU is
a stand-in, which CPU tensors reach through the dispatcher as CUDA's do."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import torch.nn.functional as F
from torch import Tensor

import heedful
from heedful import attention_backward, flash_attn_func
from heedful.core.call.arguments import UNBOUNDED
from heedful.integrations.torch import aten as kernels
from heedful.integrations.torch import registry, restore, sdpa, ways
from heedful.torch.eager import heads_first
from heedful.torch.eager.calls import CALLS
from support.integrations.counts import known
from support.runs import standin
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter

aten = torch.ops.aten
HALF = torch.float16


@pytest.fixture
def gpu():
    with standin.gpu("H200") as machine:
        machine.take = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
        registry._activate("CPU")
        yield machine
        restore()


def flash(q, k, v, *, causal=True, scale=None) -> Any:
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)


def cudnn(q, k, v, *, causal=True, scale=None) -> Any:
    return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)


def efficient(q, k, v, *, causal=True, scale=None) -> Any:
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )


OPERATORS = {"flash": flash, "cudnn": cudnn, "efficient": efficient}
LAYOUTS = {
    "rows first": lambda *shape: torch.randn(shape, dtype=HALF).transpose(1, 2),
    "heads first": lambda b, s, h, d: torch.randn(b, h, s, d, dtype=HALF),
    "a slice of a cache": lambda b, s, h, d: torch.randn(b, h, s + 64, d, dtype=HALF)[:, :, :s],
}


def drawn(layout: str, rows: int = 128, grad: bool = False) -> list[Tensor]:
    made = [LAYOUTS[layout](2, rows, 4, 64) for _ in "qkv"]
    return [x.requires_grad_(grad) for x in made]


def kept() -> list[ways.Way]:
    return [found for found in CALLS.young.values() if isinstance(found, ways.Way)]


@pytest.fixture
def counts_states(monkeypatch):
    """The tensors that torch wants beside the results are of a maker that is no C function."""
    made = []

    def maker(device):
        return lambda shape, _, dtype: made.append(shape) or torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(kernels, "_maker", maker)
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", OPERATORS.values(), ids=OPERATORS)
def test_a_known_forward_makes_its_results_and_no_view(gpu, counts_states, call, layout):
    qkv = drawn(layout)
    rows_first: Any = [x.transpose(1, 2) for x in qkv]
    own = known(lambda: flash_attn_func(*rows_first, causal=True, return_lse=True))
    before = len(gpu.loads)
    got = known(lambda: call(*qkv))
    assert got["copies"] == 0
    # The operator, what keeps its states, and the counter; one more writes into given memory.
    is_given = layout != "rows first" and call is not efficient
    assert got["functions"] <= own["functions"] + 2 + is_given
    # cuDNN's lse has one more dim.
    assert got["views"] == int(call is cudnn)
    # What makes an output of a given layout is no function of Python's.
    assert got["made"] + is_given == own["made"] == 2
    counts_states.clear()
    call(*qkv)
    assert len(counts_states) == 2
    # Into memory that lies as the query does it is a kernel of the same code at most.
    assert len(gpu.loads) - before <= 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", OPERATORS.values(), ids=OPERATORS)
def test_a_known_backward_makes_its_gradients_and_no_view(gpu, call, layout):
    qkv = drawn(layout, grad=True)
    rows_first = [x.detach().transpose(1, 2).requires_grad_() for x in qkv]
    out = flash_attn_func(*rows_first, causal=True)  # pyright: ignore[reportArgumentType]
    dout = torch.randn_like(out)
    how: dict[str, Any] = {"retain_graph": True}
    own = known(lambda: torch.autograd.grad(out, rows_first, dout, **how))
    theirs = call(*qkv)[0]
    turned = dout.transpose(1, 2)
    got = known(lambda: torch.autograd.grad(theirs, qkv, turned, **how))
    assert got["copies"] == 0 and got["views"] == 0
    assert got["made"] == own["made"] and got["functions"] <= own["functions"] + 3


def test_a_known_call_within_a_scope_makes_its_output_and_no_view():
    with standin.gpu("H200") as gpu, sdpa() as report:
        gpu.take = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
        qkv = drawn("rows first")
        rows_first: Any = [x.transpose(1, 2) for x in qkv]
        own = known(lambda: flash_attn_func(*rows_first, causal=True))
        got = known(lambda: F.scaled_dot_product_attention(*qkv, is_causal=True))  # pyright: ignore[reportArgumentType]
        assert got["views"] == 0 and got["copies"] == 0 and got["made"] == own["made"] == 1
        assert got["functions"] <= own["functions"] + 1
        assert report.ours.total() == 5


@pytest.mark.parametrize("shape", [(4, 128, 64), (2, 3, 4, 128, 64), (2, 1, 4, 128, 64)], ids=str)
def test_a_call_of_another_rank_has_the_shape_of_its_query_however_often_it_comes(shape):
    with standin.gpu("H200") as gpu, sdpa() as report:
        gpu.take = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
        qkv = [torch.randn(shape, dtype=HALF) for _ in "qkv"]
        for _ in range(6):
            out = F.scaled_dot_product_attention(*qkv, is_causal=True)  # pyright: ignore[reportArgumentType]
            assert out.shape == shape
        assert report.ours.total() == 6


def test_one_look_up_finds_each_of_two_calls_that_take_turns(gpu, monkeypatch):
    """Self-attention and cross-attention of one model have other shapes and the same arguments."""
    one, two = drawn("rows first", 128), drawn("rows first", 192)
    for _ in range(4):
        for qkv in (one, one, two, two):
            flash(*qkv)

    def refuse(*_):
        raise AssertionError("looked up otherwise")

    monkeypatch.setattr(kernels, "_new_forward", refuse)
    for _ in range(3):
        flash(*one)
        flash(*two)
    with pytest.raises(AssertionError, match="looked up otherwise"):
        flash(*drawn("rows first", 64))


def test_calls_of_other_arguments_are_not_taken_for_known_ones(gpu):
    """Each launches what a call launches that nothing was known before."""
    del gpu.take
    q, k, v = drawn("rows first")
    kinds: dict[str, Callable[[], Any]] = {
        "causal": lambda: flash(q, k, v),
        "whole": lambda: flash(q, k, v, causal=False),
        "scale": lambda: flash(q, k, v, scale=0.5),
        "top left": lambda: cudnn(q, k[:, :, :64], v[:, :, :64]),
        "bottom right": lambda: flash(q, k[:, :, :64], v[:, :, :64]),
        "shared heads": lambda: flash(q, k[:, :2], v[:, :2]),
        "one tensor": lambda: flash(q, q, q),
        "heads first": lambda: flash(*(x.contiguous() for x in (q, k, v))),
        "bfloat16": lambda: flash(*(x.bfloat16() for x in (q, k, v))),
    }

    def launched(name: str) -> list[Any]:
        begin = len(gpu.launches)
        kinds[name]()
        facts = []
        for launch in gpu.launches[begin:]:
            numbers = {n: x for n, x in launch.arguments.items() if n not in launch.memory}
            maps = [x for x in launch.arguments.values() if isinstance(x, standin.Map)]
            boxes = [(x.shape, x.strides, x.box) for x in maps]
            facts.append((launch.kernel, launch.grid, launch.constants, numbers, boxes))
        return facts

    wanted = {}
    for name in kinds:
        heedful.configure()
        assert not kept()
        wanted[name] = launched(name)
    for _ in range(4):
        for name in kinds:
            assert launched(name) == wanted[name], name
    # Four of them differ in nothing but layouts and dtypes, and take each other's place.
    assert len(kept()) == 6


def results(call: Callable[..., Any], qkv: list[Tensor], dout: Tensor) -> list[Tensor]:
    out = call(*qkv)[0]
    return [out, *torch.autograd.grad(out, qkv, dout)]


def own_results(qkv: list[Tensor], dout: Tensor) -> list[Tensor]:
    """The same by heedful's own calls, which autograd does not record either."""
    dout, q, k, v = (x.detach().transpose(1, 2) for x in (dout, *qkv))
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    grads = attention_backward(dout, q, k, v, out, lse, causal=True)
    return [x.transpose(1, 2) for x in (out, *grads[:3])]


@interpreted
@pytest.mark.parametrize("call", OPERATORS.values(), ids=OPERATORS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_known_results_are_our_own_and_lie_in_memory_as_torch_says(call, layout):
    """Kernels write where the layout of the query, or of an operand, puts a result."""
    torch.manual_seed(0)
    # Memory-efficient attention shares no heads.
    heads = (2, 2, 2) if call is efficient else (2, 1, 1)
    qkv = [LAYOUTS[layout](2, 32, n, 16).requires_grad_() for n in heads]
    dout = torch.randn(2, 32, 2, 16, dtype=HALF).transpose(1, 2)
    on_meta = [x.detach().to("meta").requires_grad_() for x in qkv]
    lie = results(call, on_meta, dout.to("meta"))
    with standin.gpu(interprets=True, tiles=(32, 32)):
        wanted = own_results(qkv, dout)
        registry._activate("CPU")
        try:
            found = [results(call, qkv, dout) for _ in range(5)]
        finally:
            restore()
        assert len(kept()) == 2
    for got in found:
        for one, want, like in zip(got, wanted, lie, strict=True):
            assert torch.equal(one, want) and one.stride() == like.stride()


def layer(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
    """As a layer of transformers calls: of heads before rows, to rows before heads."""
    key, out = heads_first.find(q, k, v, (None, True, UNBOUNDED, 0.0))
    if out is None:
        turned = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = flash_attn_func(*turned, causal=True)
        heads_first.keep(key, (q, k, v), turned)
    return (out,)


@interpreted
def test_a_layer_that_came_before_gives_what_a_new_one_gives():
    torch.manual_seed(0)
    qkv = [torch.randn(2, n, 32, 16, dtype=HALF).requires_grad_() for n in (2, 1, 1)]
    dout = torch.randn(2, 32, 2, 16, dtype=HALF)
    with standin.gpu(interprets=True, tiles=(32, 32)):
        found = [results(layer, qkv, dout) for _ in range(5)]
        with torch.no_grad():
            alone = [layer(*qkv)[0] for _ in range(5)]
        known_ones = [x for x in CALLS.young.values() if isinstance(x, heads_first._Known)]
        assert len(known_ones) == 2
    for got in found:
        for one, first in zip(got, found[0], strict=True):
            assert torch.equal(one, first) and one.stride() == first.stride()
    assert all(torch.equal(one, found[0][0]) for one in alone)


@interpreted
@pytest.mark.parametrize("records", [False, True])
def test_a_layer_whose_tensors_are_copied_first_is_right_however_often_it_comes(records):
    """No key keeps it: its tensors do not go to the kernels as they are."""
    torch.manual_seed(0)
    made = [torch.randn(2, n, 16, 32, dtype=HALF).mT.requires_grad_(records) for n in (2, 1, 1)]
    dense = [x.detach().contiguous().requires_grad_(records) for x in made]
    with standin.gpu(interprets=True, tiles=(32, 32)):
        (want,) = layer(*dense)
        CALLS.clear()
        found = [layer(*made)[0] for _ in range(5)]
        assert not [x for x in CALLS.young.values() if isinstance(x, heads_first._Known)]
        assert all(torch.equal(out, want) and out.requires_grad is records for out in found)
        if records:
            first = torch.autograd.grad(want.sum(), dense)
            for out in found:
                grads = torch.autograd.grad(out.sum(), made)
                assert all(map(torch.equal, grads, first))


@starts_interpreter
def test_every_result_is_right_in_the_interpreter():
    pass_in_the_interpreter(__file__)
