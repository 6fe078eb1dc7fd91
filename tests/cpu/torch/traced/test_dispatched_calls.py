"""Calls that go through torch's dispatcher are the eager ones, without torch.compile in between:
whatever is written, returned or raised.
"""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import heedful.torch as typed
from heedful.core.call.operands import Operands
from heedful.torch.eager.calls import CALLS

heedful: Any = typed


class Onlooker(TorchDispatchMode):
    """Sees every operator, and changes nothing; notes heedful's own."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "heedful":
            self.seen.append(func.name().removeprefix("heedful::"))
        return func(*args, **(kwargs or {}))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step(new: int = 2, page_size: int = 0, dtype=torch.float32) -> dict[str, Any]:
    """A decoding step over a cache of 12 keys a sequence."""
    torch.manual_seed(0)
    shape = (2 * 12 // page_size, page_size) if page_size else (2, 12)
    given: dict[str, Any] = {"q": torch.randn(2, 2, 4, 16)}
    given |= {"k_cache": torch.randn(*shape, 2, 16), "v_cache": torch.randn(*shape, 2, 8)}
    if new:
        given |= {"k": torch.randn(2, new, 2, 16), "v": torch.randn(2, new, 2, 8)}
    given = {name: t.to(dtype) for name, t in given.items()} | {"cache_seqlens": ints(3, 7)}
    if page_size:
        given["block_table"] = torch.randperm(shape[0]).view(2, -1).int()
    return given


ANGLE = torch.rand(20, 4)
ROTARY = {"rotary_cos": ANGLE.cos(), "rotary_sin": ANGLE.sin()}
PREFIX = {"shared_prefix": (torch.randn(5, 2, 16), torch.randn(5, 2, 8))}
QUANTISED = {
    "k_cache": torch.randint(-9, 9, (2, 12, 2, 16)).to(torch.int8),
    "v_cache": torch.randint(-9, 9, (2, 12, 2, 8)).to(torch.int8),
    **{f"{n}_{kind}": torch.rand(2, 2) for n in "kv" for kind in ("descale", "shift")},
}
STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int": {"cache_seqlens": 4},
    "int at the end": {"cache_seqlens": 10},
    "whole": {**dict.fromkeys(("k", "v", "cache_seqlens"))},
    "read": {"k": None, "v": None},
    "lse": {"return_softmax_lse": True},
    "rotary": ROTARY,
    "rotary causal": {**ROTARY, "causal": True},
    "rotary left window": {**ROTARY, "window_size": (3, -1)},
    "rotary right window": {**ROTARY, "window_size": (-1, 0)},
    "rotary first keys": {**ROTARY, "window_size": (-1, -1, 2)},
    "rotary halves": {**ROTARY, "causal": True, "rotary_interleaved": False},
    "prefix": {**PREFIX, "causal": True},
    "prefix lse": {**PREFIX, "causal": True, "return_softmax_lse": True},
    "prefix sink": {**PREFIX, "sink": torch.randn(4), "softmax_scale": 0.3, "softcap": 2.0},
    "prefix rotary": {**PREFIX, **ROTARY, "causal": True},
    "tree": {"tree_mask": torch.ones(1, 2, 2).tril().bool()},
    "leftpad": {"cache_leftpad": ints(1, 2)},
    "rows": {"cache_batch_idx": ints(1, 0)},
    "options": {"sink": torch.randn(4), "alibi_slopes": torch.rand(4), "num_splits": 2},
    "quantised": {**QUANTISED, "k": None, "v": None},
}


def copied(given: dict[str, Any]) -> dict[str, Any]:
    clones = {n: given[n].clone() for n in ("k_cache", "v_cache")}
    return {name: value for name, value in (given | clones).items() if value is not None}


def parts(results) -> tuple:
    return results if isinstance(results, tuple) else (results,)


def assert_same(got, want) -> None:
    for a, b in zip(parts(got), parts(want), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("page_size", [0, 4])
@pytest.mark.parametrize("name", STEPS)
def test_a_decoding_step_is_the_eager_one(name, page_size, autocast):
    if page_size and name in ("rows", "quantised"):
        pytest.skip("rows and these scales are of caches without pages")
    given = step(page_size=page_size) | STEPS[name]
    if autocast:
        given |= {n: given[n].bfloat16() for n in "qkv" if given.get(n) is not None}
    eager, seen = copied(given), copied(given)
    with torch.autocast("cpu", enabled=autocast):
        want = heedful.flash_attn_with_kvcache(**eager)
        with Onlooker() as onlooker:
            got = heedful.flash_attn_with_kvcache(**seen)
    assert onlooker.seen
    assert_same(got, want)
    for cache in ("k_cache", "v_cache"):
        assert torch.equal(seen[cache], eager[cache])


@pytest.mark.parametrize("name", ["plain", "prefix", "prefix lse", "lse"])
def test_an_output_is_written_in_place(name):
    given = step() | STEPS[name]
    want = parts(heedful.flash_attn_with_kvcache(**copied(given)))
    for mode in (None, Onlooker()):
        out = torch.full((2, 2, 4, 8), torch.nan)
        if mode is None:
            got = heedful.flash_attn_with_kvcache(**copied(given), out=out)
        else:
            with mode:
                got = heedful.flash_attn_with_kvcache(**copied(given), out=out)
        assert parts(got)[0] is out
        assert_same(got, want)


@pytest.mark.parametrize("page_size", [0, 4])
@pytest.mark.parametrize("length", [-1, 11, 12])
def test_an_int_length_is_checked_before_anything_is_written(page_size, length):
    given = step(page_size=page_size) | {"cache_seqlens": length}
    before = copied(given)
    with Onlooker(), pytest.raises(ValueError, match="^cache_seqlens must lie between 0 and 10"):
        heedful.flash_attn_with_kvcache(**given)
    for cache in ("k_cache", "v_cache"):
        assert torch.equal(given[cache], before[cache])


def test_no_gradient_is_recorded_of_a_step():
    given = step()
    given["q"].requires_grad_()
    with Onlooker() as onlooker:
        assert not heedful.flash_attn_with_kvcache(**given).requires_grad
    assert onlooker.seen[-1] in ("inference_v10.options", "attention_v10")


def tensors(grad: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 8)
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]


DENSE: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1, 1)},
    "window list": {"window_size": [3, 1]},
    "scale": {"softmax_scale": 0.3},
    "softcap": {"softcap": 2.0},
    "splits": {"num_splits": 3},
    "backend": {"backend": "cpu"},
    "lse": {"return_lse": True},
    "probs": {"return_attn_probs": True},
    "dropped": {"return_attn_probs": True, "dropout_p": 0.5, "dropout_seed": 3},
    "origin": {"dropout_p": 0.5, "dropout_seed": 3, "dropout_origin": (1, 2, 3, 8)},
    "seed": {"dropout_p": 0.5, "dropout_seed": torch.tensor(3)},
    "bias": {"bias": torch.randn(4, 1, 7)},
    "sink": {"sink": torch.randn(4)},
    "slopes": {"alibi_slopes": torch.rand(4)},
}


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("name", DENSE)
def test_a_dense_call_is_the_eager_one_and_so_are_its_gradients(name, grad):
    keywords = dict(DENSE[name])
    for learnt in ("bias", "sink"):
        if learnt in keywords:
            keywords[learnt] = keywords[learnt].clone().requires_grad_(grad)
    leaves = [*tensors(grad), *(keywords[n] for n in ("bias", "sink") if n in keywords)]

    def run():
        results = parts(heedful.flash_attn_func(*leaves[:3], **keywords))
        if not grad:
            return results
        wanted = [part for part in results if part.requires_grad]
        weights = [torch.arange(part.numel()).view(part.shape).sin() for part in wanted]
        return *results, *torch.autograd.grad(wanted, leaves, weights)

    want = run()
    with Onlooker() as onlooker:
        got = run()
    assert_same(got, want)
    bare = not grad and not set(keywords) - {
        *("causal", "window_size", "softmax_scale", "softcap", "num_splits", "backend")
    }
    forward = "inference_v10.options" if bare else "attention_v10"
    assert onlooker.seen == [forward, *(["attention_v10_backward"] if grad else [])]


@pytest.mark.parametrize("wanted", ["q", "k", "v", "bias", "sink", "kv", "q bias", "v sink"])
def test_only_gradients_that_are_wanted_are_returned(wanted):
    names = ("q", "k", "v", "bias", "sink")
    given: dict[str, Any] = dict(
        zip(names, (*tensors(), torch.randn(5, 7), torch.randn(4)), strict=True)
    )
    chosen = [n for n in names if n in wanted.split() or (n in "kv" and n in wanted.split()[0])]
    for name in chosen:
        given[name].requires_grad_()
    learnt = [given[name] for name in chosen]

    def run():
        out, lse = heedful.flash_attn_func(**given, return_lse=True)
        return torch.autograd.grad((out.square().sum() + lse.sum()), learnt)

    want = run()
    with Onlooker():
        assert_same(run(), want)


@pytest.mark.parametrize("loss", ["out", "lse"])
def test_a_loss_of_one_result_alone_has_gradients(loss):
    leaves = tensors(True)

    def run():
        out, lse = heedful.flash_attn_func(*leaves, return_lse=True)
        chosen = out if loss == "out" else lse
        return torch.autograd.grad(chosen.square().sum(), leaves, materialize_grads=True)

    want = run()
    with Onlooker():
        assert_same(run(), want)


def test_an_output_through_the_dispatcher_is_written_and_checked():
    q, k, v = tensors()
    want = heedful.flash_attn_func(q, k, v)
    out = torch.full_like(want, torch.nan)
    with Onlooker():
        assert heedful.flash_attn_func(q, k, v, out=out) is out
        assert torch.equal(out, want)
        with pytest.raises(ValueError, match="^out must have shape"):
            heedful.flash_attn_func(q, k, v, out=out[..., :4])
        with pytest.raises(ValueError, match="^out must be None where a gradient is wanted"):
            heedful.flash_attn_func(q.requires_grad_(), k, v, out=out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", DENSE)
def test_fake_results_have_the_metadata_of_real_ones(name, dtype):
    if dtype == torch.float8_e4m3fn and name == "backend":
        pytest.skip("named in the plain case")
    q, k, v = (t.to(dtype) for t in tensors())
    want = parts(heedful.flash_attn_func(q, k, v, **DENSE[name]))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(t) for t in (q, k, v)]
        got = parts(heedful.flash_attn_func(*fakes, **DENSE[name]))
    for fake, real in zip(got, want, strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("kv_grad", [True, False])
@pytest.mark.parametrize("bias_grad", [True, False])
@pytest.mark.parametrize("sink", [True, False])
def test_fake_gradients_have_the_metadata_of_real_ones(sink, bias_grad, kv_grad):
    q, k, v = tensors()
    x = Operands(q, k, v, bias=torch.randn(5, 7), sink=torch.randn(4) if sink else None)
    out, lse = heedful.flash_attn_func(q, k, v, bias=x.bias, sink=x.sink, return_lse=True)
    options = (
        "dense",
        None,
        None,
        0.0,
        None,
        False,
        (-1, -1),
        0.0,
        False,
        False,
        True,
        False,
        0,
        None,
        None,
    )
    operator = torch.ops.heedful.attention_v10_backward.default
    tail = (*options, (0, 0, 0, 0), bias_grad, False, kv_grad)
    want = operator(out, lse, out, lse, *x, *tail)
    with FakeTensorMode() as mode:
        out, lse, *x = (None if t is None else mode.from_tensor(t) for t in (out, lse, *x))
        got = operator(out, lse, out, lse, *x, *tail)
    for fake, real in zip(got, want, strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_operators_are_known_again(monkeypatch):
    from heedful.torch.eager import backends

    def refuse(*_):
        raise AssertionError("planned again")

    leaves = tensors(True)

    def run():
        with Onlooker():
            out = heedful.flash_attn_func(*leaves, softcap=2.0)
            return torch.autograd.grad(out.sum(), leaves)

    CALLS.clear()
    want = run()
    monkeypatch.setattr(backends, "prepare", refuse)
    assert_same(run(), want)


@pytest.mark.parametrize("name", ["plain", "prefix lse"])
def test_a_compiled_step_under_autocast_is_the_eager_one(name):
    given = step() | STEPS[name]
    given |= {n: given[n].bfloat16() for n in "qkv"}
    eager, compiled = copied(given), copied(given)
    torch._dynamo.reset()
    function = torch.compile(heedful.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu"):
        want = heedful.flash_attn_with_kvcache(**eager)
        assert_same(function(**compiled), want)
    assert torch.equal(compiled["k_cache"], eager["k_cache"])
